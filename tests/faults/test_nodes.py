"""Several nodes, with two torchrun agents on one machine: the second starts with exactly the command that is printed."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.errors import KitError, RankDied, RankTimeout
from kit.world import World
from kit.world import crew as module
from tests.holdings import holdings, wait_for

pytestmark = [pytest.mark.timeout(60)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class OtherMachine:
    """Run the command that World prints for the other machine, as a person there would."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.message: list[str] = []

    def __call__(self, text: str) -> None:
        self.message.append(text)
        if found := re.search(r"KIT_KEY=(\S+) python (-m kit\.world\.agent .*)", text):
            env = {
                **os.environ,
                "KIT_KEY": found[1],
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            self.process = subprocess.Popen([sys.executable, *shlex.split(found[2])], env=env, start_new_session=True)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, OtherMachine]]:
    other = OtherMachine()
    monkeypatch.setattr(module, "print", other, raising=False)
    world = World(
        4,
        nodes=2,
        endpoint=f"127.0.0.1:{free_port()}",
        device="cpu",
        logs=tmp_path,
        env={"GLOO_SOCKET_IFNAME": "lo"},
        start_timeout_s=45,
    )
    yield world, other
    world.close()
    assert other.process is not None
    other.process.wait(10)
    assert wait_for(lambda: holdings(os.getpid())["processes"] == [])


@pytest.mark.slow
def test_two_agents_make_one_world(two_nodes: tuple[World, OtherMachine], capsys: pytest.CaptureFixture[str]) -> None:
    world, _ = two_nodes
    world.run("t = torch.ones(1) * (rank + 1); dist.all_reduce(t)\nprint('printed on', rank)")
    assert world.eval("[t.item(), world_size, int(__import__('os').environ['GROUP_RANK'])]") == [
        [10.0, 4, 0],
        [10.0, 4, 0],
        [10.0, 4, 1],
        [10.0, 4, 1],
    ]
    assert [row["node"] for row in world.status()] == [0, 0, 1, 1]
    shown = capsys.readouterr().out
    assert all(f"[{rank}] printed on {rank}" in shown for rank in range(4))
    # On the other machine one rank hangs and one dies; then fresh ranks start on both.
    with pytest.raises(RankTimeout) as late:
        world.run("import time, ctypes\nif rank == 3: ctypes.PyDLL(None).sleep(600)\ndist.barrier()", timeout_s=1.5)
    assert late.value.culprits == (3,)
    assert "<ranks" in late.value.stacks[3]
    world.restart()
    with pytest.raises(RankDied) as died:
        world.run("import os\nif rank == 2: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert (died.value.rank, died.value.signal) == (2, "SIGKILL")
    world.restart()
    assert world.eval("rank") == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_machine_that_never_joins_is_named(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    message: list[str] = []
    monkeypatch.setattr(module, "print", message.append, raising=False)
    with pytest.raises(KitError, match=r"1 of 2 machines have joined; missing: 1"):
        World(2, nodes=2, endpoint=f"127.0.0.1:{free_port()}", device="cpu", logs=tmp_path, start_timeout_s=7)
    assert any("missing: 1" in text for text in message)  # progress while the World waited


def test_an_agent_without_a_notebook_ends_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kit.world.agent", "--connect", f"127.0.0.1:{free_port()}", "--node", "1"]
    env = {**os.environ, "KIT_KEY": "00" * 32, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, start_new_session=True)
    assert done.returncode == 1
    assert "no notebook answers" in done.stderr
