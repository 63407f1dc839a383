"""The bench of Worlds: a sample counts only if the result was right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.errors import KitError
from kit.labs.bench_world import parts as bench
from kit.world import World


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_what_was_not_loaded_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preload that has no effect must not count as one, so the bench asks the ranks what they loaded."""

    def without_preload(ranks: int, *, preload: object, **options: Any) -> World:
        return World(ranks, **options)

    monkeypatch.setattr(bench, "World", without_preload)
    with pytest.raises(KitError, match=r"this should be loaded on every rank"):
        bench.start_once(tmp_path, ["this"])
