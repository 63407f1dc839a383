"""The public interface: names, a World with a folder for its logs, labs and runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import kit
import kit.errors
import kit.results
from kit.world import leftovers
from tests.holdings import holdings


def test_names() -> None:
    for name in kit.__all__:
        assert getattr(kit, name) is not None
    assert set(kit.__all__) <= set(dir(kit))
    assert kit.Run is kit.results.Run
    assert kit.BadInput is kit.errors.BadInput
    for error in (kit.BadInput, kit.RankError, kit.RankDied, kit.RankTimeout):
        assert issubclass(error, kit.KitError)
    assert kit.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="module 'kit' has no attribute 'wordl'"):
        kit.wordl  # noqa: B018


def test_an_error_has_its_words_however_it_was_made() -> None:
    assert (
        str(kit.RankDied("gone", rank=1, phase="p")) == str(kit.RankDied(message="gone", rank=1, phase="p")) == "gone"
    )
    late: dict[str, Any] = {"phase": "p", "ranks": (1,), "culprits": (), "stacks": {}}
    assert str(kit.RankTimeout(message="late", **late)) == "late"
    assert str(kit.RankError(message="raised", rank=1, phase="p", traceback="")) == "raised"


def test_a_folder_of_that_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """As beside a checkout cloned into a folder named `kit`."""
    (tmp_path / "kit").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = "import kit; print(kit.World.__name__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("World", "")


def test_what_a_world_leaves_is_reported_from_other_files(tmp_path: Path) -> None:
    """matplotlib keeps font files open; in a checkout whose path contains the kit's name, they must not count as a World's."""
    before = holdings(os.getpid())["fds"]
    (tmp_path / "lifecycle-kit").mkdir()
    with (tmp_path / "lifecycle-kit" / "font.ttf").open("w"):
        assert holdings(os.getpid())["fds"] == before
        for own in (leftovers.base() / f"test-{os.getpid()}", Path(f"/dev/shm/kit-test-{os.getpid()}")):
            with own.open("w"):
                own.unlink()
                assert holdings(os.getpid())["fds"] != before
        with socket.socket():
            assert holdings(os.getpid())["fds"] != before


def test_a_world_that_printed_nothing_leaves_nothing(runs: Path, nothing_left: None) -> None:
    with kit.World(2) as world:
        assert world.logs.is_relative_to(runs / "worlds")
        assert world.eval("rank + 1") == [1, 2]
    assert not list((runs / "worlds").iterdir())


def test_a_world_that_printed_keeps_its_logs(
    runs: Path, nothing_left: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with kit.World(2) as world:
        world.run("print('hello from', rank)")
        first = world.logs
        world.close()
    assert (first / "rank1.log").read_text() == "hello from 1\n"
    assert "[0] hello from 0" in capsys.readouterr().out


def test_logs_that_were_asked_for_stay(runs: Path, tmp_path: Path, nothing_left: None) -> None:
    with kit.World(1, logs=tmp_path / "mine") as world:
        assert world.logs == tmp_path / "mine"
    assert (tmp_path / "mine" / "rank0.log").exists()
    assert not runs.exists()


@pytest.mark.slow
def test_a_process_forked_from_a_world_leaves_its_logs_when_it_ends(runs: Path, nothing_left: None) -> None:
    with kit.World(1) as world:
        if (child := os.fork()) == 0:
            try:
                world.close()  # what the end of a process calls
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (world.logs / "rank0.log").exists()
        world.restart()
        world.run("print('still here')")
    assert (world.logs / "rank0.log").read_text() == "still here\n"


def test_logs_are_for_their_owner_only(runs: Path, tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with kit.World(1, logs=tmp_path / "open") as world:
        world.run("print('secret')")
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "open").iterdir()}
    assert modes["torchrun.log"] == 0o600


def test_a_world_that_cannot_start_leaves_nothing(runs: Path, nothing_left: None) -> None:
    with pytest.raises(kit.BadInput):
        kit.World(0)
    assert not list(runs.glob("worlds/*"))


def test_lab_run_and_load(runs: Path, nothing_left: None) -> None:
    with kit.lab("smoke", cycles=1) as lab:
        assert lab.phases[0].status == "next"
        assert lab.step().phase == "baseline"
        run = lab.run()
    assert isinstance(run, kit.Run)
    assert run.dir.parent == runs
    loaded = kit.load(run.dir)
    assert loaded.verdict() == run.verdict()
    assert not loaded.verdict(groups_return_to_baseline=-1).passed
    saved = run.save(runs / "table.parquet")
    assert pd.read_parquet(saved).equals(run.frame())


def test_out_names_the_folder(runs: Path, tmp_path: Path, nothing_left: None) -> None:
    run = kit.run("smoke", cycles=1, out=tmp_path / "here")
    assert run.dir == tmp_path / "here"
    with pytest.raises(kit.BadInput, match="already holds a run"):
        kit.run("smoke", cycles=1, out=tmp_path / "here")


def test_a_panel_starts_nothing_and_a_labs_own_takes_it_as_it_stands(runs: Path, nothing_left: None) -> None:
    panel = kit.panel("smoke", cycles=1, fault="leaked-group")
    assert (panel.model.state, panel.model.fault, panel.model.values["cycles"]) == ("idle", "leaked-group", 1)
    panel.close()
    assert not runs.exists()
    with pytest.raises(kit.BadInput, match="unknown lab 'smok'"):
        kit.panel("smok")
    with pytest.raises(kit.BadInput, match="no setting 'cycle'"):
        kit.panel("smoke", cycle=1)
    with kit.lab("smoke", cycles=1) as lab:
        lab.step()
        taken = lab.panel()
        assert [row.status for row in taken.model.phases[:2]] == ["done", "next"]
        taken.controller.run_all()
        taken.controller.wait()
        assert taken.model.verdict.passed
        again = kit.panel("smoke")
        assert again.model.run.dir == lab.dir
        for one in (taken, again):
            one.close()


def test_a_run_draws_one_plot_by_its_name(runs: Path) -> None:
    from kit.results import Row, create_run

    writer = create_run(runs, "mine", {}, {})
    row = {"run": writer.id, "lab": "mine", "cycle": 1, "phase": "train", "rank": 0, "time": 1e9}
    writer.append([Row(**row, metric="seconds", value=0.1, unit="s")])
    writer.finish()
    run = kit.load(writer.dir)
    assert [axes.get_xlabel() for axes in run.plot("times").axes] != [axes.get_xlabel() for axes in run.plot().axes]
    with pytest.raises(kit.BadInput, match=r"this run has no plot 'time'; its plots are: .*times"):
        run.plot("time")
