"""Record runs whose verdicts later versions must reproduce:

    python -m tests.frozen.record

runs every lab once as it is and once with each of its faults, and keeps in runs.tar.xz the records and the verdicts of the runs
without a fault and of as few others as let every check fail that any fault makes fail. It takes about half an hour on two cores.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from kit.labs.discover import discover

ARCHIVE = Path(__file__).with_name("runs.tar.xz")
FILES = ("run.json", "records.jsonl", "verdict.json")


def record(folder: Path) -> None:
    for lab in discover().labs.values():
        if lab.tag:
            continue
        for fault in ("", *(fault.name for fault in lab.faults if "cpu" in fault.devices)):
            with_fault = ["--fault", fault] if fault else []
            out = folder / f"{lab.name}-{fault or 'default'}"
            subprocess.run([sys.executable, "-m", "kit", "run", lab.name, *with_fault, "--out", str(out)], check=False)


def failed(run: Path) -> set[tuple[str, str]]:
    lab = run.name.partition("-")[0]
    return {(lab, row["check"]) for row in json.loads((run / "verdict.json").read_text()) if row["passed"] is False}


def choose(folder: Path) -> list[Path]:
    """The runs without a fault, then those that add most checks for their size."""
    costs = {run: len(lzma.compress((run / "records.jsonl").read_bytes())) for run in folder.iterdir()}
    chosen = [run for run in costs if run.name.endswith("-default")]
    wanted = set[tuple[str, str]]().union(*map(failed, costs))
    while wanted:
        best = max(costs, key=lambda run: len(failed(run) & wanted) / costs[run])
        chosen.append(best)
        wanted -= failed(best)
    return sorted({*chosen})


def keep(runs: list[Path]) -> None:
    with lzma.open(ARCHIVE, "wb", preset=9) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for run in runs:
            for name in FILES:
                archive.add(run / name, arcname=f"{run.name}/{name}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        record(Path(made))
        keep(choose(Path(made)))
