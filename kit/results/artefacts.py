"""What a run's folder has beside its records, and how to open it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.results.run import Run

SNAPSHOTS = "memory"  # the folder in a run's folder
VIEWER = "drop one on https://pytorch.org/memory_viz, which opens it in the browser and uploads nothing"


def memory_snapshots(run: Run) -> str:
    """PyTorch's memory snapshots of a run, or why there are none; empty where none were asked for."""
    if not run.config.get("memory_snapshot"):
        return ""
    found = sorted(run.dir.glob(f"{SNAPSHOTS}/rank*.pickle"), key=lambda path: (len(path.name), path.name))
    if found:
        return f"{', '.join(f'{SNAPSHOTS}/{path.name}' for path in found)}; {VIEWER}"
    device = str((run.provenance.get("world") or {}).get("device", ""))
    if device == "cpu":
        return "none: the ranks worked on the CPU, and PyTorch keeps a history of its CUDA allocator only"
    return "none: no rank came to write one; its log says why where something prevented it"
