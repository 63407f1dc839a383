"""What a machine can carry, with the arithmetic."""

from __future__ import annotations

import pytest

from kit.errors import BadInput
from kit.world import capacity


def test_memory_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 2**30)
    capacity.check_ranks(3)
    with pytest.raises(
        BadInput, match=r"4 ranks need about 1\.2 GiB \(300 MiB each\) and 1\.0 GiB are free; at most 3 fit"
    ):
        capacity.check_ranks(4)


def test_the_cgroups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is never more than what the kernel says is available on the machine."""
    from pathlib import Path

    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < capacity.available_bytes() <= int(fields["MemTotal"].split()[0]) * 1024
