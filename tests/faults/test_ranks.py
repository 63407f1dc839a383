"""Failures of ranks on a rented box. Each error names rank and phase, nothing is left behind, and the next World starts."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit import machine
from kit.errors import KitError, RankDied, RankError, RankTimeout
from kit.world import World, leftovers
from tests.holdings import wait_for

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(90)]

BARRIER = "dist.barrier()"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(2, device="cpu", logs=tmp_path) as made:
        yield made
        made.restart()  # after any failure, fresh ranks must work
        made.run("t = torch.ones(1); dist.all_reduce(t)")
        assert made.eval("t.item()") == [2.0, 2.0]


@contextlib.contextmanager
def while_waiting(world: World, act: Callable[[], None]) -> Iterator[None]:
    """Run `act` in a thread once rank 0 is inside a call."""

    def watch() -> None:
        assert wait_for(lambda: world._crew.members and world._crew.members[0].busy is not None)
        wait_for(lambda: "barrier" in world_stack(world))
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


def world_stack(world: World) -> str:
    """Rank 0's stack, written by its interpreter on the kit's signal, so that it does not use the call's links."""

    member = world._crew.members[0]
    return leftovers.describe_leftover(member.pid, member.started, world._crew.folder / "stack0")


def test_sigkill_of_a_rank(world: World) -> None:
    victim = world.pids[1]
    with while_waiting(world, lambda: os.kill(victim, signal.SIGKILL)), pytest.raises(RankDied) as info:
        world.run(f"import time\nif rank == 1: time.sleep(60)\n{BARRIER}")
    assert (info.value.rank, info.value.signal, info.value.phase) == (1, "SIGKILL", "run")
    assert str(victim) in str(info.value)
    assert world.state == "dead"
    with pytest.raises(KitError, match=r"rank 1 .* SIGKILL"):
        world.run("1")


def test_sigkill_of_a_rank_between_two_calls(world: World) -> None:
    os.kill(world.pids[0], signal.SIGKILL)
    with pytest.raises(RankDied) as info:
        world.run("1")
    assert (info.value.rank, info.value.signal) == (0, "SIGKILL")


def test_sigkill_of_torchrun(world: World) -> None:
    assert world.torchrun_pid is not None
    pid = world.torchrun_pid
    with while_waiting(world, lambda: os.kill(pid, signal.SIGKILL)), pytest.raises(RankDied) as info:
        world.run(f"import time\nif rank == 1: time.sleep(60)\n{BARRIER}")
    assert (info.value.rank, info.value.signal, info.value.phase) == (-1, "SIGKILL", "run")
    assert "torchrun" in str(info.value)


@pytest.mark.slow
def test_sigstop_of_a_rank(world: World) -> None:
    os.kill(world.pids[1], signal.SIGSTOP)
    with pytest.raises(RankTimeout) as info:
        world.run(BARRIER, timeout_s=1.5)
    error = info.value
    assert error.ranks == (0, 1)
    assert error.culprits == (1,)
    assert "stopped" in error.stacks[1]
    assert "kill -CONT" in error.stacks[1]
    assert "barrier" in error.stacks[0]
    assert error.phase == "run"


@pytest.mark.slow
def test_a_stopped_rank_that_goes_on_makes_the_world_usable_again(world: World) -> None:
    os.kill(world.pids[1], signal.SIGSTOP)
    with pytest.raises(RankTimeout):
        world.run(BARRIER, timeout_s=0.5)
    with pytest.raises(KitError, match="still in phase 'run'"):
        world.eval("rank")
    os.kill(world.pids[1], signal.SIGCONT)

    def answers() -> bool:
        with contextlib.suppress(KitError):
            return world.eval("rank") == [0, 1]
        return False

    assert wait_for(answers)


@pytest.mark.slow
def test_a_rank_asleep_while_another_waits(world: World) -> None:
    with pytest.raises(RankTimeout) as info:
        world.run(f"import time\nif rank == 1:\n    time.sleep(600)\n{BARRIER}", timeout_s=1)
    error = info.value
    assert error.ranks == (0, 1)
    assert error.culprits == (1,)
    assert "time.sleep(600)" in error.stacks[1]
    assert "(culprit)" in str(error)


@pytest.mark.slow
def test_waits_that_hide_in_a_work_handle(world: World) -> None:
    """The innermost Python frame of the waiting rank is a line of user code."""
    code = (
        "import time\nif rank == 0: time.sleep(600)\nwork = dist.all_reduce(torch.ones(1), async_op=True)\nwork.wait()"
    )
    with pytest.raises(RankTimeout) as info:
        world.run(code, timeout_s=1)
    assert info.value.culprits == (0,)


@pytest.mark.slow
def test_a_chain_of_waits_blames_its_end(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another, and rank 2 sleeps."""
    with World(3, device="cpu", logs=tmp_path) as three:
        three.run("a, b = dist.new_group([0, 1]), dist.new_group([1, 2])")
        with pytest.raises(RankTimeout) as info:
            three.run(
                "import time\nif rank == 2: time.sleep(600)\nif rank == 1: dist.all_reduce(torch.ones(1), group=b)\n"
                "if rank < 2: dist.all_reduce(torch.ones(1), group=a)",
                timeout_s=1,
            )
        assert info.value.ranks == (0, 1, 2)
        assert info.value.culprits == (2,)


@pytest.mark.slow
def test_a_rank_that_left_without_joining_is_named(world: World) -> None:
    with pytest.raises(RankTimeout) as info:
        world.run(f"if rank == 0: {BARRIER}", timeout_s=1)
    assert info.value.ranks == (0,)
    assert info.value.culprits == ()
    assert "rank 1 did not enter" in str(info.value)


@pytest.mark.slow
def test_a_c_call_that_holds_the_interpreter_still_shows_its_stack(world: World) -> None:
    """The rank's side thread cannot run, but the signal still writes the stack."""
    with pytest.raises(RankTimeout) as info:
        world.run(f"import ctypes\nif rank == 1:\n    ctypes.PyDLL(None).sleep(600)\n{BARRIER}", timeout_s=1)
    assert info.value.culprits == (1,)
    assert "<ranks" in info.value.stacks[1]


def test_an_exception_on_one_rank_while_the_other_waits_for_it(world: World) -> None:
    with pytest.raises(RankError) as info:
        world.run(f"if rank == 1: raise ValueError('only mine')\n{BARRIER}", timeout_s=15)
    assert (info.value.rank, info.value.ranks, info.value.phase) == (1, (1,), "run")
    assert "only mine" in info.value.traceback
    assert "rank 0 still in a collective" in str(info.value)


@pytest.mark.slow
def test_an_exception_on_one_rank_only_is_reported_when_the_other_has_finished_its_work(world: World) -> None:
    with pytest.raises(RankError) as info:
        world.run("import time\nif rank == 1: raise ValueError('early')\ntime.sleep(1.5)\ndone = True")
    assert info.value.ranks == (1,)
    assert world.eval("'done' in globals()") == [True, False]


def test_an_exception_on_all_ranks(world: World) -> None:
    with pytest.raises(RankError) as info:
        world.run("{}['missing']")
    assert info.value.ranks == (0, 1)
    assert world.eval("rank") == [0, 1]


def test_the_death_of_one_rank_is_not_blamed_on_the_one_whose_connection_broke(world: World) -> None:
    with pytest.raises(RankDied) as info:
        world.run(
            "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nfor _ in range(1000): dist.all_reduce(torch.ones(1))"
        )
    assert info.value.rank == 1


@pytest.mark.slow
def test_an_import_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RankError) as info:
        World(2, device="cpu", logs=tmp_path / "bad", preload=["no_such_module_anywhere"])
    assert info.value.phase == "start"
    assert info.value.rank in {0, 1}
    assert "no_such_module_anywhere" in info.value.traceback
    with World(1, logs=tmp_path / "good") as after:
        assert after.eval("rank") == [0]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(3)", 3),
        pytest.param("sys.exit()", 0, marks=pytest.mark.slow),
        pytest.param("sys.exit('words')", 1, marks=pytest.mark.slow),
    ],
)
def test_sys_exit_on_a_rank(world: World, code: str, status: int) -> None:
    with pytest.raises(RankDied) as info:
        world.run(f"import sys\nif rank == 1: {code}\n{BARRIER}")
    assert (info.value.rank, info.value.signal, info.value.exitcode, info.value.phase) == (1, None, status, "run")
    assert f"sys.exit({status})" in str(info.value)


@pytest.mark.slow
def test_ranks_that_leave_without_a_word(world: World) -> None:
    """torchrun does not treat exit status 0 as a death; restart() (in the fixture) replaces torchrun."""
    with pytest.raises(RankDied) as info:
        world.run("import os; os._exit(0)")
    assert info.value.exitcode == 0


def test_a_crash_in_c(world: World) -> None:
    with pytest.raises(RankDied) as info:
        world.run(f"import ctypes\nif rank == 0: ctypes.string_at(0)\n{BARRIER}")
    assert (info.value.rank, info.value.signal) == (0, "SIGSEGV")
    assert "string_at" in str(info.value)  # the interpreter's last output, from the log


def test_a_rank_that_prints_200_mb(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.run(
        "if rank == 1:\n    for _ in range(200): print('x' * 99 + '\\n' * 1, end='') or print(('y' * 99 + '\\n') * 10_000, end='')"
    )
    shown = capsys.readouterr().out
    assert len(shown) < 2**20
    assert "MiB more in" in shown
    assert (world.logs / "rank1.log").stat().st_size > 190 * 10**6
    assert world.eval("rank") == [0, 1]


def test_interrupt_of_python_code_leaves_the_world_usable(world: World) -> None:
    with interrupted_after(0.5), pytest.raises(KeyboardInterrupt):
        world.run("import time\nmark = 1\ntime.sleep(600)")
    assert world.state == "idle"
    assert world.eval("mark") == [1, 1]


@pytest.mark.slow
def test_interrupt_of_a_collective_ends_the_world_clearly(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    with interrupted_after(0.5), pytest.raises(KeyboardInterrupt):
        world.run(f"import time\nif rank == 0: {BARRIER}\nelse: time.sleep(600)")
    assert time.monotonic() - started < 10  # the limit that users are promised, not a speed test
    assert world.state == "dead"
    assert "rank 0 did not stop" in capsys.readouterr().out
    with pytest.raises(KitError, match="interrupted"):
        world.eval("1")


def test_a_world_outlives_the_thread_that_made_it(tmp_path: Path) -> None:
    """The death signal is tied to the forking thread; the World must not be."""
    made: list[World] = []
    thread = threading.Thread(target=lambda: made.append(World(2, device="cpu", logs=tmp_path)))
    thread.start()
    thread.join()
    with made[0] as world:
        assert world.eval("rank") == [0, 1]


@pytest.mark.slow
def test_what_a_rank_started_ends_with_it(world: World) -> None:
    world.run("import subprocess\nchild = subprocess.Popen(['sleep', '600'])")
    children = world.eval("child.pid")
    world.restart()
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.parametrize("end", ["restart", pytest.param("close", marks=pytest.mark.slow)])
def test_what_a_rank_started_in_a_session_of_its_own_ends_too(tmp_path: Path, end: str) -> None:
    """Such as an inference engine's server: outside the rank's process group, and orphaned once the rank is gone."""
    with World(1, device="cpu", logs=tmp_path) as one:
        one.run("import subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)")
        (child,) = one.eval("child.pid")
        assert Path(f"/proc/{child}").exists()
        getattr(one, end)()
        assert wait_for(lambda: not alive(child), 1.0)


ESCAPES = """
import os
reads, writes = os.pipe()
if not os.fork():
    os.setsid()
    os.dup2(writes, 1)
    os.execve("/bin/sh", ["sh", "-c", "sleep 600 & echo $!; %s"], {})
os.close(writes)
child = int(os.read(reads, 20))
"""


@pytest.mark.parametrize(
    ("way", "ends"),
    [
        ("restart", "exit"),
        ("death", "wait"),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("restart", "wait"), ("death", "exit"), ("close", "wait"), ("close", "exit"))
        ),
    ],
)
def test_what_a_rank_started_without_a_trace_ends_too(tmp_path: Path, way: str, ends: str) -> None:
    """The child has its own session and an empty environment; its parent waits for it, or is gone."""
    with World(2, device="cpu", logs=tmp_path) as two:
        two.run(ESCAPES % ends)
        children = two.eval("child")
        assert all(alive(child) and machine.marked(child) is None for child in children)
        if way == "death":
            os.kill(two.pids[1], signal.SIGKILL)
            with pytest.raises(RankDied):
                two.run(BARRIER)
        else:
            getattr(two, way)()
        assert wait_for(lambda: not any(map(alive, children)), 5.0)


def test_orphans_that_end_are_collected(world: World) -> None:
    """Otherwise each would stay a zombie of the agent and count against the process limit."""
    world.run("import os\nfor _ in range(20): os.system('sleep 0 &')")
    assert wait_for(lambda: not zombies(world.torchrun_pid or 0))


def zombies(parent: int) -> list[int]:
    found = []
    for pid in machine.pids():
        fields = machine.stat_fields(pid)
        if fields and fields[0] == "Z" and int(fields[1]) == parent:
            found.append(pid)
    return found


def test_scratch_files_do_not_add_up_over_restarts(tmp_path: Path) -> None:
    def files() -> int:
        return sum(1 for _ in world._crew.folder.rglob("*"))

    with World(2, device="cpu", logs=tmp_path) as world:
        world.restart()
        before, temporary = files(), len(list(Path(tempfile.gettempdir()).iterdir()))
        for _ in range(4):
            world.restart()
        assert files() == before
        assert len(list(Path(tempfile.gettempdir()).iterdir())) <= temporary


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not: its new parent may reap it later."""
    fields = machine.stat_fields(pid)
    return fields is not None and fields[0] != "Z"


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send SIGINT to this process's main thread, as Ctrl-C and the stop button do."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    yield
    timer.join()
