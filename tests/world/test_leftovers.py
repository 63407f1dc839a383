"""What `kit clean` ends, and what it must leave alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import doctor, machine
from kit.errors import BadInput
from kit.world import World, leftovers
from tests.holdings import wait_for

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def dead() -> Iterator[str]:
    """The mark of a World whose notebook is gone, with the World's folder."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    value = f"dead@{machine.namespace()}:{gone.pid}:12345"
    (leftovers.base() / value).mkdir()
    yield value
    shutil.rmtree(leftovers.base() / value, ignore_errors=True)


def test_a_folder_goes_although_a_process_that_ends_still_writes_in_it(dead: str) -> None:
    folder = leftovers.base() / dead
    filled = threading.Event()

    def write() -> None:
        with contextlib.suppress(OSError):
            for number in range(10_000_000):
                (folder / str(number)).touch()
                if number == 200:
                    filled.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert filled.wait(10)
    leftovers.remove_folder(folder)
    assert not folder.exists()
    writer.join(10)


def test_a_folder_that_cannot_be_removed_keeps_no_core_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries: list[Path] = []
    monkeypatch.setattr(leftovers.shutil, "rmtree", lambda folder, **_: tries.append(folder))
    monkeypatch.setattr(leftovers, "REMOVED_S", 0.2)
    leftovers.remove_folder(tmp_path)
    assert 1 <= len(tries) <= 102


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, machine.MARK: mark}, start_new_session=True)


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def listed() -> dict[int, bool]:
    return {one.pid: one.sure for one in leftovers.find_leftovers()}


def test_what_runs_in_the_session_of_a_dead_world_is_ended_and_what_inherited_its_mark_is_listed(
    dead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left, shell, alive, plain = sleeper(dead), sleeper(dead), sleeper(leftovers.mark("abc")), sleeper("")
    (leftovers.base() / dead / leftovers.SESSION).write_text(str(left.pid))
    try:
        assert wait_for(lambda: {left.pid, shell.pid} <= set(listed()))
        assert {pid: sure for pid, sure in listed().items() if pid in {left.pid, shell.pid, alive.pid, plain.pid}} == {
            left.pid: True,
            shell.pid: False,
        }
        assert doctor.clean(dry_run=True, yes=False)["ended"] == []
        shown = capsys.readouterr().out
        assert f"pid {left.pid}, started 20" in shown
        assert f"{shell.pid}" in shown
        assert "may only have inherited KIT_WORLD" in shown
        assert shown.endswith("nothing was ended or removed\n")
        assert left.poll() is None
        with pytest.raises(BadInput, match="use --yes, or --dry-run for the list"):
            doctor.clean(dry_run=False, yes=False)  # tests have no terminal to confirm in
        assert doctor.clean(dry_run=False, yes=True)["ended"] == [left.pid]
        assert left.wait(5) == -signal.SIGKILL
        assert [process.poll() for process in (shell, alive, plain)] == [None] * 3
        assert (leftovers.base() / dead).exists()  # a process with its mark still runs
        end(shell)
        assert (leftovers.base() / dead) in leftovers.end_leftovers(leftovers.find_leftovers())
    finally:
        end(left, shell, alive, plain)


@pytest.mark.parametrize(
    "value", ["x", "::", "a:b:c", "../../etc:1:1", "old:1:12345", "é@:-1:²", f"a@{'0' * 8}:1:1", "n" * 300 + ":1:1"]
)
def test_a_bad_mark_or_a_stray_file_breaks_nothing(value: str) -> None:
    stray = leftovers.base() / (value.replace("/", "-")[:200])
    stray.touch()
    marked = sleeper(value)
    try:
        assert marked.pid not in listed()
        assert stray not in leftovers.dead_folders([])
        leftovers.end_leftovers([])
        assert stray.exists()
        assert marked.poll() is None
    finally:
        end(marked)
        stray.unlink()


def test_a_folder_that_is_not_ours_does_not_break_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "leftover_place", lambda: tmp_path / "file")
    (tmp_path / "file").touch()
    leftovers.find_leftovers()
    with pytest.raises(BadInput, match="only you can enter"):
        leftovers.dead_folders([])


def namespaces() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


INSIDE = """
import os, subprocess, sys
from kit import machine
from kit.world import leftovers
mark = leftovers.mark("inside")
(leftovers.base() / mark).mkdir()
child = subprocess.Popen(["sleep", "60"], env={**os.environ, machine.MARK: mark})
print(mark, flush=True)
sys.stdin.read()
child.kill()
(leftovers.base() / mark).rmdir()
"""


@pytest.mark.skipif(not namespaces(), reason="this machine does not let us make a pid namespace")
def test_a_live_world_of_another_pid_namespace_is_left_alone() -> None:
    """As in a container whose processes and temporary folder are visible from outside: its pids mean other processes here."""
    around = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    inside = subprocess.Popen(
        [*around, sys.executable, "-c", INSIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert inside.stdout is not None
    mark = inside.stdout.readline().strip()
    try:
        seen = [pid for pid in machine.pids() if machine.marked(pid) == mark]
        assert len(seen) == 1
        assert seen[0] not in listed()
        assert leftovers.base() / mark not in leftovers.dead_folders([])
        leftovers.end_leftovers(leftovers.find_leftovers())
        assert machine.stat_fields(seen[0])
    finally:
        inside.communicate()


def test_the_mark_of_a_world_leads_to_its_processes(tmp_path: Path) -> None:
    """Agent and ranks run in the session that the World's folder names, so the processes of an orphaned World are found and ended."""
    with World(1, device="cpu", logs=tmp_path) as world:
        mark = leftovers.mark(world._crew.id)
        session = (leftovers.base() / mark / leftovers.SESSION).read_text()
        pids = [world.torchrun_pid, *world.pids]
        assert [machine.marked(pid) for pid in pids if pid] == [mark, mark]
        assert [os.getsid(pid) for pid in pids if pid] == [int(session)] * 2
        assert not set(pids) & set(listed())


FORKS = """
import os, signal
from kit.world import leftovers

def raises(number, frame):
    raise InterruptedError("torchrun's handler, inherited")

signal.signal(signal.SIGTERM, raises)
at_once = True
os.register_at_fork(after_in_child=lambda: at_once and os.kill(os.getpid(), signal.SIGTERM))  # runs before the kit's own
if HOOK:
    leftovers.let_signals_end_forks()

def status_of(child):
    pid = os.fork()
    if not pid:
        os._exit(child())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork_of_a_fork():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    def grandchild():
        os.kill(os.getpid(), signal.SIGTERM)
        return 0
    return status_of(grandchild)

first = status_of(lambda: 0)
at_once = False
print(first, status_of(fork_of_a_fork), signal.getsignal(signal.SIGTERM) is raises, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.parametrize(("hook", "first"), [(True, -signal.SIGTERM), (False, 0)])
def test_a_signal_in_the_first_moment_of_a_fork_ends_it(hook: bool, first: int) -> None:
    """Without the hook the fork survives: torchrun's handler raises in a place where Python ignores errors."""
    code = f"HOOK = {hook}\n{FORKS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.split(maxsplit=3) == [str(int(first)), "7", "True", "set()\n"]


STRUCK = """
import os, signal
from kit.world import leftovers

mask_signals = signal.pthread_sigmask

def raises(number, frame):
    raise InterruptedError("torchrun's handler")

def raises_late(how, which):
    mask = mask_signals(how, which)
    if how == signal.SIG_BLOCK and which:
        raises(signal.SIGTERM, None)  # of a signal that another thread got a moment ago
    return mask

signal.signal(signal.SIGTERM, raises)
parent = os.getpid()
if BEFORE:
    signal.pthread_sigmask = raises_late
else:
    os.register_at_fork(before=lambda: os.kill(parent, signal.SIGTERM))
leftovers.let_signals_end_forks()
try:
    if not os.fork():
        os._exit(0)
except InterruptedError:
    print("raised", mask_signals(signal.SIG_BLOCK, []))
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_signal_before_or_in_a_fork_reaches_the_handler_of_the_parent(before: bool) -> None:
    code = f"BEFORE = {before}\n{STRUCK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == "raised set()\n"
