"""`make peers`: a tool that is missing or broken has a row with the reason; a trial ends with all processes that it started."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.results.comparison import recorded
from kit.world import leftovers
from tests.peers.measure import (
    STARTED,
    STEPPED,
    TOLD,
    VANISHED,
    measure,
    of_trial,
    row,
    seconds_until_gone,
    write_tables,
)
from tests.peers.tools import TOOLS


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(TOOLS[name].needs)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def nothing_marked() -> bool:
    return not leftovers.carriers(lambda mark: mark.startswith("peer-") and mark.split(":")[1] == str(os.getpid()))


def folders() -> list[Path]:
    return sorted(path for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("kit-peers-"))


def test_a_tool_that_is_not_installed_has_a_row_that_says_so() -> None:
    [missing] = measure({"it": SimpleNamespace(needs="no-such-distribution")}, trials=1, steps=1)
    assert (missing["who"], missing["n"], missing["note"]) == (
        "it",
        0,
        "not measured: no-such-distribution is not installed",
    )


def test_a_tool_that_breaks_says_how_and_the_others_go_on() -> None:
    tools = {"broken": SimpleNamespace(needs="pytest"), "gone": SimpleNamespace(needs="no-such")}
    rows = list(measure(tools, trials=1, steps=1))
    assert [row["n"] for row in rows] == [0, 0]
    assert "KeyError: 'broken'" in rows[0]["note"]
    assert nothing_marked()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_a_real_tool(name: str) -> None:
    if not installed(name):
        pytest.skip(f"{TOOLS[name].needs} is not installed")
    before = folders()
    rows = {row["what"]: row for row in measure({name: TOOLS[name]}, trials=1, steps=3)}
    assert set(rows) >= {STARTED, TOLD, VANISHED}, rows
    assert (rows[STARTED]["n"], rows[STARTED]["note"]) == (2, "")
    assert rows[TOLD]["n"] == 1
    assert rows[TOLD]["note"]
    assert (STEPPED in rows) == bool(TOOLS[name].is_a_step)
    assert rows[VANISHED]["n"] or "still alive" in rows[VANISHED]["note"]
    assert nothing_marked()
    assert folders() == before


def test_the_files_are_shown_as_a_benchs(tmp_path: Path) -> None:
    rows = [
        row(what, who, seconds)
        for who, seconds in (("kit 1", [0.5, 0.7, 0.9]), ("torchrun 2", [2.0]))
        for what in (STARTED, TOLD)
    ]
    rows.append(row(VANISHED, "torchrun 2", [], note="3 of 3 processes are still alive after 5 s"))
    text = write_tables(tmp_path / "box", "make peers BOX=box", rows)
    assert (tmp_path / "box" / "bench-peers.txt").read_text().startswith(text)
    assert "torchrun 2, SIGKILL of the notebook's process to nothing left: 3 of 3 processes" in text
    (shown,) = recorded("bench-peers", folder=tmp_path)
    assert shown.table == (
        ("what, median", "kit 1", "torchrun 2"),
        [[STARTED, "700 ms", "2 s"], [TOLD, "700 ms", "2 s"], [VANISHED, "", "-"]],
    )


def test_remains_are_found_by_their_mark_and_ended(tmp_path: Path) -> None:
    mark = leftovers.mark("peer-test")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=of_trial(mark, str(tmp_path)))
    other = subprocess.Popen(["sleep", "60"])
    try:
        while leftovers.carriers(mark.__eq__) != [sleeper.pid]:
            assert sleeper.poll() is None
        assert seconds_until_gone(mark.__eq__, [sleeper.pid], time.perf_counter(), at_most=0.01) is None
        leftovers.end_carriers(mark.__eq__)
        assert seconds_until_gone(mark.__eq__, [sleeper.pid], time.perf_counter(), at_most=5) is not None
        assert sleeper.wait() == -9
        assert other.poll() is None
    finally:
        for process in (sleeper, other):
            process.kill()
            process.wait()
