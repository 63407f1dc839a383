"""PyTorch's own history of its CUDA allocator, written to a file for each rank: what was allocated, when, and by which lines.

Every allocation is recorded with its stack, so that times of such a run are those of a run that is watched. Limits: CUDA only; the
last `ENTRIES` events; a rank that is killed writes nothing, one on another machine writes there. The file names paths of the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

ENTRIES = 100_000  # some KB each


class History:
    """Kept from `start` to `stop`; `write` in between."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")

    def write(self) -> bool:
        """Whether the file is there now, whole. What prevents it is printed: it must not hide why a phase raised."""
        draft = self.file.with_name(f".{self.file.name}.draft")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(draft))  # type: ignore[no-untyped-call]
            draft.replace(self.file)
        except (OSError, RuntimeError) as error:
            print(f"no memory snapshot: {type(error).__name__}: {error}", flush=True)
            draft.unlink(missing_ok=True)
            return False
        return True

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)
