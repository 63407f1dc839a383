"""What a rank maps while the bench of weight transfer takes its turns."""

from __future__ import annotations

import pytest

from kit.labs.bench_sync.ranks import stalls, ways
from kit.sync.cache import Segment


def count_mappings(*, meeting: str, rounds: int) -> dict[str, int]:
    """By the part of the bench, how often this rank maps memory of the sender's, in all turns together."""
    mapped: list[int] = []
    attach = Segment.attach

    def counting(fd: int) -> Segment:
        mapped.append(fd)
        return attach(fd)

    counts = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Segment, "attach", counting)
        asked = {"receivers": 1, "ways": ["shm", "shm+whole", "shm+cache", "shm+expand"], "rounds": rounds}
        ways.transfer_seconds(shape={"size": 4096, "count": 4}, meeting=meeting, **asked)
        counts["ways"] = len(mapped)
        stalls.stalls(mib=8, each_mib=4, meeting=f"{meeting}-stalls", rounds=rounds)
        counts["stalls"] = len(mapped) - counts["ways"]
    return counts
