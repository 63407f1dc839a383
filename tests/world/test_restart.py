"""Restarts that fail or are interrupted, and processes forked from the notebook: the World reports its state and keeps its ranks."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.errors import KitError
from kit.world import World
from kit.world.world import Printer, Worlds
from tests.holdings import holdings, wait_for

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(180)]


class Impatient(Printer):
    """Press Ctrl-C while ranks start."""

    def tick(self, answered: object) -> None:
        if answered == ():
            raise KeyboardInterrupt


def refuses(world: World | Worlds, why: str) -> None:
    assert world.state == "dead"
    with pytest.raises(KitError, match=why):
        world.call("os:getpid")


def test_a_restart_that_fails_leaves_a_dead_world(tmp_path: Path) -> None:
    """Without the log folder no rank can start. Once the folder exists again, the next restart works."""
    logs = tmp_path / "logs"
    with World(2, device="cpu", logs=logs, start_timeout_s=20) as world:
        shutil.rmtree(logs)
        with pytest.raises((KitError, OSError)):
            world.restart()
        assert world.pids == []
        refuses(world, r"this World is dead: restart\(\) failed: .*; restart\(\) starts fresh ranks")
        logs.mkdir()
        world.restart()
        assert world.eval("rank") == [0, 1]


def test_an_interrupted_restart_leaves_a_dead_world(tmp_path: Path) -> None:
    with World(2, device="cpu", logs=tmp_path) as world:
        before, world.observer = world.observer, Impatient()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                world.restart()
            refuses(world, r"restart\(\) was interrupted")
            assert wait_for(lambda: holdings(os.getpid())["processes"] == [world.torchrun_pid])
        world.observer = before
        world.restart()
        assert world.eval("dist.get_world_size()") == [2, 2]


def test_a_restart_of_several_worlds_that_is_interrupted(tmp_path: Path) -> None:
    with Worlds([1, 1], device="cpu", logs=tmp_path) as worlds:
        before, worlds.observer = worlds.observer, Impatient()
        with pytest.raises(KeyboardInterrupt):
            worlds.restart()
        refuses(worlds, r"restart\(\) was interrupted")
        worlds.observer = before
        worlds.restart()
        assert worlds.call("os:getpid") == worlds.pids


def test_an_interrupted_close_can_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr("kit.world.leftovers.end_carriers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            world.close()
    assert world.state == "closed"
    world.close()
    assert not world.logs.exists()


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


FORKS: dict[str, Callable[[World], None]] = {
    "a child that only ends": lambda _: None,
    "a child that closes the World": lambda world: world.close(),
    "a child that leaves the with block": lambda world: world.__exit__(None, None, None),
}


@pytest.mark.parametrize("what", FORKS)
def test_a_forked_child_does_not_close_its_parents_world(tmp_path: Path, what: str) -> None:
    with World(2, device="cpu", logs=tmp_path) as world:
        child = multiprocessing.get_context("fork").Process(target=FORKS[what], args=(world,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert world.eval("rank") == [0, 1]


def test_a_forked_child_is_reported_whose_world_it_is(tmp_path: Path) -> None:
    """A child of os.fork that exits normally runs the exit handlers that it inherited."""
    code = (
        "import os, sys\nfrom kit.world import World\nfrom kit.errors import KitError\n"
        f"world = World(1, device='cpu', logs={str(tmp_path)!r})\n"
        "if not (child := os.fork()):\n"
        "    for use in (lambda: world.eval('1'), world.restart):\n"
        "        try: use()\n"
        "        except KitError as error: print(error, world.state, flush=True)\n"
        "    sys.exit(7)\n"
        "print(os.getpid(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), world.eval('rank'), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    *refused, last = done.stdout.splitlines()
    owner, rest = last.split(maxsplit=1)
    assert (done.returncode, rest) == (0, "7 [0]"), done.stderr
    sentence = f"this World belongs to process {owner}, which started it; a process forked from it cannot use it closed"
    assert refused == [sentence] * 2
