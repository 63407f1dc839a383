"""Other tools beside the kit: one installed, some missing, one broken; each trial ends with all processes that it started."""

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

from kit.bench.session import Row
from kit.bench.world import PEERS, STARTED, STEPPED, TOLD, VANISHED, of_trial, peers, seconds_until_gone
from kit.world import leftovers


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(PEERS[name].needs)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def nothing_marked() -> bool:
    return not leftovers.carriers(lambda mark: mark.startswith("peer-") and mark.split(":")[1] == str(os.getpid()))


def folders() -> list[Path]:
    return sorted(path for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("kit-bench-"))


def test_a_peer_that_is_not_installed_has_a_row_that_says_so() -> None:
    [one] = peers({"it": SimpleNamespace(needs="no-such-distribution")}, trials=1, steps=1)
    assert (one.who, one.n, one.note) == ("it", 0, "not measured: no-such-distribution is not installed")


def test_a_peer_that_breaks_says_how_and_the_others_go_on() -> None:
    wanted = {"broken": SimpleNamespace(needs="pytest"), "gone": SimpleNamespace(needs="no-such")}
    rows = list(peers(wanted, trials=1, steps=1))
    assert [one.n for one in rows] == [0, 0]
    assert "KeyError: 'broken'" in rows[0].note
    assert nothing_marked()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchrun", *sorted(PEERS)[:-1]])
def test_a_real_peer(name: str) -> None:
    if not installed(name):
        pytest.skip(f"{PEERS[name].needs} is not installed")
    before = folders()
    rows: dict[str, Row] = {one.what: one for one in peers({name: PEERS[name]}, trials=1, steps=3)}
    assert set(rows) >= {STARTED, TOLD, VANISHED}, rows
    assert rows[STARTED].n == 2
    assert rows[STARTED].note == ""
    assert rows[TOLD].n == 1
    assert rows[TOLD].note
    assert (STEPPED in rows) == bool(PEERS[name].is_a_step)
    assert rows[VANISHED].n or "still alive" in rows[VANISHED].note
    assert nothing_marked()
    assert folders() == before


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
