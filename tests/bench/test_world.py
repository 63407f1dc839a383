"""The World bench with the fewest samples: every row exists, in order, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import cli
from kit.bench import world as bench
from kit.bench.session import conduct, read_rows
from kit.errors import KitError
from kit.world import asked

TINY = dict.fromkeys(("starts", "megatron", "deaths", "kernels", "helps", "restarts", "phases", "flights"), 1)
TINY["steps"] = 3


def test_the_command_line_finds_it() -> None:
    assert "world" in cli.benches()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_every_row(tmp_path: Path) -> None:
    assert conduct("world", **TINY, out=tmp_path / "rows.jsonl") == 0
    message = read_rows(tmp_path / "rows.jsonl")
    rows = {one["what"]: one for one in message["rows"] if one["who"] == "kit"}
    limits = [2.5, 4.5, 1.3, 0.25, None, 1.0, 0.5, 1.0, 2.0, 2.0, 0.3]
    assert [one["limit"] for one in rows.values()] == limits
    measured = [one for one in rows.values() if not one["note"].startswith("not measured")]
    assert all(one["low"] <= one["median"] <= one["high"] for one in measured)
    assert len(measured) == 11 if asked.find_python().megatron else 9
    assert rows[bench.STEPPED]["n"] == 3
    assert "rank 1" in rows[bench.TOLD]["note"]
    assert message["provenance"]["versions"]["torch"]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_what_was_not_loaded_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preload that has no effect must not count as one, so the bench asks the ranks what they loaded."""
    monkeypatch.setattr(bench, "world_of_two", lambda logs, preload: real(logs))
    with pytest.raises(KitError, match=r"this should be loaded on every rank"):
        bench.start_once(tmp_path, ["this"])


real = bench.world_of_two
