"""The waiting agent: later Worlds are forked from it, as fresh as those that started their own, and never where they would differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit import machine
from kit.errors import KitError
from kit.world import World, asked, leftovers, warm
from kit.world.warmside import state_of_file
from tests.holdings import marked, wait_for


def current() -> Any:
    assert warm._current is not None
    return warm._current


def start(tmp_path: Path, ranks: int = 1, **options: Any) -> World:
    return World(ranks, device="cpu", logs=tmp_path / "logs", **options)


def look_up(target: str) -> str | None:
    return warm.look_up(target, sys.executable, "cpu", 2, megatron=False, seconds=60)


LEFT = """
import os, sys, torch, numpy, random, tempfile
os.environ["LEFT"] = "1"; os.chdir("/"); os.umask(0o777)
sys.path.insert(0, "/left"); sys.modules["left"] = sys; torch.left = 1; torch.set_num_threads(1); torch.manual_seed(5)
dist.barrier()
"""
SEES = (
    "[os.environ.get('LEFT'), os.environ['MALLOC_ARENA_MAX'], os.getcwd(), "
    "'/left' in sys.path, 'left' in sys.modules, hasattr(torch, 'left'), "
    "'kit.world.warm' in sys.modules, len(os.listdir('/proc/self/fd')), os.environ['KIT_WORLD'], "
    "signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, torch.get_num_threads()]"
)


def test_a_later_world_is_as_fresh_as_one_that_starts_its_own_agent(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    for kind, options in (("first", {}), ("later", {}), ("own", {"env": {"FRESH": "1"}})):
        with start(tmp_path, **options) as world:
            assert (world.torchrun_pid in {agent.pid for agent in current().agents.values()}) == (kind != "own")
            world.run("import os, sys, signal, numpy")
            (facts,) = world.eval(SEES)
            assert world._crew.id in facts[8]
            seen[kind] = [*facts[:8], *facts[9:]]
            seen[f"{kind} numbers"] = world.eval("[numpy.random.rand(), torch.initial_seed()]")
            world.run(LEFT)
    assert seen["first"] == seen["later"] == seen["own"]
    assert not {*seen["first numbers"][0]} & {*seen["later numbers"][0]}


def test_another_folder_for_runs_is_no_reason_to_start_anew(tmp_path: Path, monkeypatch: Any) -> None:
    runs = "__import__('os').environ.get('KIT_RUNS')"
    pids = []
    for folder in ("a", "b"):
        monkeypatch.setenv("KIT_RUNS", folder)
        with start(tmp_path) as world:
            assert world.eval(runs) == [folder]
        pids.append(current().process.pid)
    monkeypatch.delenv("KIT_RUNS")
    with start(tmp_path) as world:
        assert world.eval(runs) == [None]
    assert {*pids, current().process.pid} == {pids[0]}


def test_its_worlds_have_their_own_session_mark_and_channel(tmp_path: Path) -> None:
    with start(tmp_path) as one, start(tmp_path) as other:
        for world in (one, other):
            pid = world.torchrun_pid
            assert pid is not None
            assert machine.marked(pid) == machine.marked(world.pids[0]) == world._crew.folder.name
            assert (world._crew.folder / leftovers.SESSION).read_text() == str(os.getsid(pid)) == str(pid)
        assert not {*links(one.torchrun_pid)} & {*links(current().process.pid)}


def links(pid: int | None) -> list[str]:
    return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(fd).startswith("socket:")]


def test_megatron_is_only_where_it_is_wanted(tmp_path: Path) -> None:
    loaded = "'megatron.core' in __import__('sys').modules"
    seeds = []
    for _ in range(2):
        with start(tmp_path, preload=["megatron.core"]) as world:
            assert world.eval(loaded) == [True]
            assert world.torchrun_pid in {agent.pid for agent in current().agents.values()}
            seeds += world.eval("torch.initial_seed()")
    assert len({*seeds}) == 2
    assert (
        f"torch and megatron.core imported waits for the next World (pid {current().process.pid}, "
        in warm.waiting_line()
    )
    with start(tmp_path) as plain:
        assert plain.eval(loaded) == [False]


@pytest.mark.drawn(2, of="changes")
@pytest.mark.parametrize("change", ["environment", "limit", "umask", "device", "ranks", "file"])
def test_one_that_would_differ_is_not_taken(change: str, tmp_path: Path, monkeypatch: Any) -> None:
    wanted = warm.conditions(sys.executable, "cpu", 2)
    before = warm.waiting_agent(wanted)
    assert warm.waiting_agent(warm.conditions(sys.executable, "cpu", 2)) is before
    if change == "environment":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    elif change == "limit":
        monkeypatch.setattr("kit.machine.resource.getrlimit", lambda _: (1, 1))
    elif change == "umask":
        old = os.umask(0o027)
    elif change == "device":
        monkeypatch.setattr(machine, "has_gpu_driver", lambda: True)
    elif change == "ranks":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    elif change == "file":
        edited = tmp_path / "module.py"
        edited.write_text("VALUE = 1")
        before.files[str(edited)] = state_of_file(str(edited))
        edited.write_text("VALUE = 22")
    try:
        assert not before.usable(warm.conditions(sys.executable, "auto" if change == "device" else "cpu", 2))
    finally:
        if change == "umask":
            os.umask(old)
    before.files.pop(str(tmp_path / "module.py"), None)


def test_what_it_imported_is_watched_on_disk() -> None:
    waiting = warm.waiting_agent(warm.conditions(sys.executable, "cpu", 2))
    assert wait_for(lambda: waiting.pids, 60)
    assert warm.__file__ not in waiting.files
    assert {asked.__file__.replace("asked", "rankside"), *map(str, Path(sys.prefix).glob("lib/*/site-packages"))} <= {
        *waiting.files
    }


def test_the_replaced_one_stays_until_its_worlds_have_ended(tmp_path: Path, monkeypatch: Any) -> None:
    with start(tmp_path) as world:
        before = current()
        monkeypatch.setenv("MINE", "1")
        assert warm.waiting_agent(warm.conditions(sys.executable, "cpu", 1)) is not before
        assert not before.gone.wait(0.1)
        assert world.eval("rank") == [0]
    assert before.gone.wait(10)


def test_the_replaced_one_ends_with_a_start_that_is_interrupted_before_it_forked(
    tmp_path: Path, monkeypatch: Any, nothing_left: None
) -> None:
    with start(tmp_path):
        before = current()

    class Replacing:
        def tick(self, _: object) -> None:
            assert current() is before
            monkeypatch.setattr(warm, "_current", None)
            before.retire()
            raise KeyboardInterrupt

    os.kill(before.process.pid, signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, observer=Replacing())
    os.kill(before.process.pid, signal.SIGCONT)
    assert before.gone.wait(10)
    monkeypatch.undo()


def test_none_where_it_is_switched_off(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(warm.SETTING, "off")
    monkeypatch.setattr(warm, "_current", None)
    warm.prepare_waiting()
    plan: Any = SimpleNamespace(job_machines=1, env={})
    assert (warm.fork_agent(plan, tmp_path, tmp_path, []), look_up("json:loads"), warm.waiting_line()) == (
        None,
        None,
        "",
    )


def test_an_interrupted_start_leaves_nothing_and_the_next_one_works(tmp_path: Path, nothing_left: None) -> None:
    class Interrupting:
        def tick(self, _: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # while torch is imported
        start(tmp_path, observer=Interrupting())
    with start(tmp_path) as world:
        assert world.eval("rank") == [0]
    with pytest.raises(KeyboardInterrupt):  # while the agent is forked or its ranks start
        start(tmp_path, observer=Interrupting())
    assert wait_for(lambda: len(marked(os.getpid())) == 1)


def test_one_that_cannot_import_torch_is_reported_with_its_last_words(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(KitError, match=r"(?s)torchrun exited with status 1 .*ImportError: torch is broken"):
        start(tmp_path)


def test_a_world_outlives_the_waiting_agent(tmp_path: Path, nothing_left: None) -> None:
    with start(tmp_path) as world:
        os.kill(current().process.pid, signal.SIGKILL)
        assert current().gone.wait(10)
        assert world.eval("rank") == [0]
        with start(tmp_path) as other:
            assert other.eval("rank") == [0]
        os.kill(world.torchrun_pid or 0, signal.SIGKILL)
        with pytest.raises(KitError, match="was killed by SIGKILL"):
            world.run("import time; time.sleep(60)")


def test_the_end_of_a_forked_agent_has_its_status(tmp_path: Path) -> None:
    with start(tmp_path) as world:
        process: Any = world._crew._process
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(10) == process.poll() == -signal.SIGUSR1


KERNEL = """
import sys
from kit.world import World, warm
class Observer:
    def tick(self, _):
        print("ready", flush=True)
        sys.stdin.read()
if sys.argv[1] == "importing":
    warm.prepare_waiting()
    while warm._current is None: pass
elif sys.argv[1] == "ordered":
    World(1, device="cpu", observer=Observer())  # torch is being imported; no agent is there yet
else:
    World(1, device="cpu").close()
print("ready", flush=True)
if sys.argv[1] != "ends": sys.stdin.read()
"""


@pytest.mark.parametrize(
    "when", ["importing", "ordered", *(pytest.param(when, marks=pytest.mark.slow) for when in ("waiting", "ends"))]
)
def test_it_ends_with_the_kernel(when: str) -> None:
    command = [sys.executable, "-c", KERNEL, when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"ready\n"
        if when != "ends":
            assert marked(kernel.pid)
            kernel.kill()
    assert wait_for(lambda: not marked(kernel.pid))
    assert wait_for(lambda: not [folder for folder in leftovers.base().iterdir() if f":{kernel.pid}:" in folder.name])


FORKING = """
import os, signal, sys
from kit.world import warm
for mine in "12":
    os.environ["MINE"] = mine
    warm.waiting_agent(warm.conditions(sys.executable, "cpu", 1)).look("json:loads", megatron=False)  # until heard, a replaced one stays
forked = os.fork()
if forked:
    print(forked, flush=True)
signal.pause()
"""


def test_a_process_forked_from_the_notebook_keeps_none() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        forked = int(kernel.stdout.readline())
        try:
            assert len(marked(kernel.pid)) == 2
            kernel.kill()
            assert wait_for(lambda: not marked(kernel.pid))
        finally:
            kernel.kill()
            os.kill(forked, signal.SIGKILL)


def test_code_is_looked_up_afresh_each_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert look_up("mine:make") == "ModuleNotFoundError: No module named 'mine'"
    mine = tmp_path / "mine.py"
    for text, why in (
        ("import torch\nprint('loud')\ndef make(): ...", ""),
        ("raise ValueError('two\\nlines')", "ValueError: two (mine.py, line 1)"),
        ("import sys; sys.exit(3)", "it exited with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it was killed by SIGKILL"),
        ("make = 5  # no function", "TypeError: mine:make is not callable"),
    ):
        mine.write_text(text)
        assert look_up("mine:make") == why
    assert current().process.poll() is None


def test_a_look_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: Any) -> None:
    assert look_up("json:loads") == ""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import time, pathlib, os\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    waiting, pid = current(), tmp_path / "pid"
    number = waiting.look("mine:make", megatron=False)
    assert wait_for(lambda: pid.exists() and pid.read_text())
    assert waiting.hear_look(number, 0.01) == "it did not answer within 0.01 s"
    assert wait_for(lambda: not Path(f"/proc/{pid.read_text()}").exists())
