"""Deaths of the notebook, with a real ipykernel: however it ends, its ranks and torchrun end too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client import BlockingKernelClient, KernelManager

from kit import machine
from kit.world import leftovers
from tests.holdings import holdings, wait_for

pytestmark = [pytest.mark.timeout(90)]

START = "from kit.world import World\nworld = World(2, device='cpu', logs={logs!r})\nworld.run('t = torch.ones(1); dist.all_reduce(t)')"
NOTHING = {"processes": [], "folders": [], "shared memory": [], "fds": []}


class Kernel:
    """A real kernel that holds a World."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.connect()

    def connect(self) -> None:
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.pid
        assert self.pid is not None

    def do(self, code: str) -> None:
        reply = self.client.execute_interactive(code, timeout=60, output_hook=lambda _: None, store_history=False)
        assert reply["content"]["status"] == "ok", reply["content"].get("traceback")

    def start_world(self) -> None:
        self.do(START.format(logs=str(self.logs)))
        assert len(holdings(self.pid)["processes"]) == 4  # type: ignore[arg-type]

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.close()


def all_gone(owner: int) -> bool:
    return wait_for(lambda: {**holdings(owner), "shared memory": []} == NOTHING)


def test_sigkill_of_the_kernel(kernel: Kernel) -> None:
    kernel.start_world()
    os.kill(kernel.pid, signal.SIGKILL)
    assert all_gone(kernel.pid)


def test_sigkill_of_the_kernel_ends_what_ranks_started_in_sessions_of_their_own(kernel: Kernel) -> None:
    kernel.start_world()
    kernel.do("world.run(\"import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)\")")
    assert len(holdings(kernel.pid)["processes"]) == 6  # type: ignore[arg-type]
    os.kill(kernel.pid, signal.SIGKILL)
    assert all_gone(kernel.pid)


def test_sigkill_of_the_kernel_while_ranks_hang_in_a_collective(kernel: Kernel) -> None:
    kernel.start_world()
    hang = "print('hanging', flush=True)\\nif rank == 0: dist.barrier()\\nelse: import ctypes; ctypes.PyDLL(None).sleep(600)"
    kernel.client.execute(f'world.run("{hang}")')
    logs = [kernel.logs / f"rank{rank}.log" for rank in (0, 1)]
    assert wait_for(lambda: all("hanging" in log.read_text() for log in logs))
    os.kill(kernel.pid, signal.SIGKILL)
    assert all_gone(kernel.pid)


def test_sigkill_of_kernel_and_torchrun_at_once(kernel: Kernel) -> None:
    kernel.start_world()
    agents = [pid for pid in holdings(kernel.pid)["processes"] if os.getsid(pid) == pid]  # the waiting one too
    started = machine.start_time(kernel.pid)
    os.kill(kernel.pid, signal.SIGSTOP)  # so that the kernel cannot clean up in between
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    os.kill(kernel.pid, signal.SIGKILL)
    # The ranks may end first: a killed kernel exists until all its memory is freed.
    assert wait_for(lambda: not machine.alive(kernel.pid, started) and holdings(kernel.pid)["processes"] == [])
    leftovers.end_leftovers(leftovers.find_leftovers())  # no process was left to remove the folder
    assert holdings(kernel.pid)["folders"] == []


@pytest.mark.slow
@pytest.mark.parametrize("now", [False, True], ids=["restart", "restart now"])
def test_kernel_restart(kernel: Kernel, now: bool) -> None:
    kernel.start_world()
    before = kernel.pid
    kernel.client.stop_channels()
    kernel.manager.restart_kernel(now=now)
    assert all_gone(before)
    kernel.connect()
    kernel.start_world()
    kernel.do("assert world.eval('t.item()') == [2.0, 2.0]")


@pytest.mark.slow
def test_three_kernels_with_a_world_each_do_not_collide(tmp_path: Path) -> None:
    kernels = [Kernel(tmp_path / str(n)) for n in range(3)]
    try:
        for number, kernel in enumerate(kernels):
            kernel.start_world()
            kernel.do(f"world.run('mine = {number}')")
        for number, kernel in enumerate(kernels):
            kernel.do(f"assert world.eval('mine') == [{number}] * 2")
    finally:
        for kernel in kernels:
            kernel.close()
    assert all(all_gone(kernel.pid) for kernel in kernels)


def test_a_script_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    code = f"from kit.world import World; import os\nw = World(2, device='cpu', logs={str(tmp_path)!r})\nprint(os.getpid()); exit(5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert all_gone(int(done.stdout))


def test_a_child_forked_from_the_notebook_does_not_keep_the_ranks(tmp_path: Path) -> None:
    """A forked child has copies of the channel's descriptors; they must not count as the notebook."""
    code = (
        "from kit.world import World\nimport os, time, sys\n"
        f"w = World(2, device='cpu', logs={str(tmp_path)!r})\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(30); os._exit(0)\n"
        "print(os.getpid(), child, flush=True)\nos.kill(os.getpid(), 9)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    owner, child = map(int, process.stdout.readline().split())
    process.wait()
    try:
        assert all_gone(owner)
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
