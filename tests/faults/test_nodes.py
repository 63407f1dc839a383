"""Several nodes, with two torchrun agents on one machine: the second starts with exactly the command that is printed."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit
from kit.errors import BadInput, KitError, RankDied, RankTimeout
from kit.labs.bench_world import hosts
from kit.labs.bench_world.hosts import SecondHost
from kit.labs.definition import world_machines
from kit.labs.lab import devices
from kit.labs.share.lab import roles
from kit.results.frames import with_ids
from kit.tls import make_certificate
from kit.world import World, leftovers
from kit.world import crew as module
from kit.world.agentside import look_around
from kit.world.asked import check_worlds, spread
from kit.world.channel import ASKED_S, SILENCE_S, WorldLink, WorldListener
from kit.world.launch import Launched, agent_command, launch_commands
from kit.world.world import Worlds
from tests.faults.test_strangers import Proxy
from tests.holdings import holdings, wait_for
from tests.labs.parts import failed, why
from tests.labs.share.conftest import share

pytestmark = [pytest.mark.timeout(150)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class OtherMachine:
    """Run the command that World prints for the other machine, as a person there would."""

    prefix: Sequence[str] = ()
    device = "lo"

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.message: list[str] = []

    def __call__(self, text: str) -> None:
        self.message.append(text)
        if found := re.search(r"KIT_KEY=(\S+) python (-m kit\.world\.agent .*)", text):
            env = {
                **os.environ,
                "KIT_KEY": found[1],
                "GLOO_SOCKET_IFNAME": self.device,
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            command = [*self.prefix, sys.executable, *shlex.split(found[2])]
            self.process = subprocess.Popen(command, env=env, start_new_session=True)


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
        start_timeout_s=90,
    )
    yield world, other
    world.close()
    assert other.process is not None
    other.process.wait(10)
    assert wait_for(lambda: holdings(os.getpid())["processes"] == [])


def addresses_listening_at(port: int) -> list[str]:
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


class OtherHost(SecondHost, OtherMachine):
    """A second host, where the command that is printed runs as a person there would run it."""

    def __init__(self) -> None:
        OtherMachine.__init__(self)
        SecondHost.__init__(self)
        self.device = self.far


def test_a_second_host_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(words[1:])
        if "address" in words:
            raise subprocess.CalledProcessError(2, words, stderr="no room")
        taken = f"10.99.{os.getpid() % 256}.0/24"
        return subprocess.CompletedProcess(words, 1 if "delete" in words else 0, "a route" if taken in words else "")

    monkeypatch.setattr(hosts, "IP", "ip")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KitError, match="no room"):
        SecondHost()
    name = f"kit{os.getpid()}"
    free = f"10.99.{(os.getpid() + 1) % 256}.1/30"  # the first network has a route
    assert commands[-3:] == [
        ["address", "add", free, "dev", f"{name}a"],
        ["link", "delete", f"{name}a"],
        ["netns", "delete", name],
    ]


@pytest.fixture(scope="module")
def far_host() -> Iterator[OtherHost]:
    try:
        other = OtherHost()
    except KitError as error:
        pytest.skip(str(error))
    yield other
    other.remove()


LABS_OVER_HOSTS: dict[str, dict[str, Any]] = {
    "smoke": {},
    "offload": {"tp": 1},
    "split": {},
    # Three replicas that answer without a pause, and the trainer, share two cores.
    "sync": {"ranks": 4, "replicas": 3, "tp": 1, "placement": "apart", "sweep_mib": 1, "timeout_s": 300},
    "stream": {
        "steps": 3,
        "groups": 3,
        "group": 2,
        "layers": 1,
        "lr": 3e-3,
        "slots": 4,
        "answer": [8, 16],
        "decode": 2,
        "replicas": 3,
        "ranks": 4,
    },
    "share": {"steps": 2, "layers": 1, "groups": 3, "group": 2, "answer": [8, 12], "decode": 2},
}


@pytest.mark.slow
@pytest.mark.drawn(1, of="labs")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lab", LABS_OVER_HOSTS)
def test_a_lab_passes_over_two_hosts(
    far_host: OtherHost, lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", far_host.near)
    # Both hosts have the same cores, and each would start threads for all of them.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    where = {"nodes": 2, "endpoint": far_host.free_endpoint(), "launch": far_host.launch, "device": "cpu"}
    run = kit.run(lab, out=tmp_path / "run", **where, **LABS_OVER_HOSTS[lab])
    verdict = run.verdict()
    assert {check: why(verdict, check) for check in failed(verdict)} == {}
    if lab == "sync":
        rows = run.frame()
        kinds = rows[rows["metric"] == "transport_receivers"]["ids"].astype(str)
        assert kinds.str.contains("broadcast").any()  # across the cable
        assert kinds.str.contains("shm").any()  # beside the sender
        assert not kinds.str.contains("serialize").any()
    if lab == "share":
        rows = run.frame()
        looks = with_ids(rows[(rows["phase"] == "shared") & (rows["metric"] == "seen_samples")], "machine", "blind")
        assert sorted(looks["machine"].astype(int)) == [0, 1]  # an observer on each
        if not looks["blind"].astype(int).any():
            seen = with_ids(rows[(rows["phase"] == "shared") & (rows["metric"] == "seen_owner")], "device")
            assert {"a.replica 1", "b.trainer", "b.replica 1"} <= {
                *seen[seen["device"].astype(int) == 1]["text"]
            }  # of the other one
    if lab == "stream":
        rows = run.frame()
        assert (
            len(rows[(rows["metric"] == "named_seconds") & rows["value"].notna()]) == 1
        )  # a replica over there was killed
        launches = {path.name for path in (tmp_path / "run" / "logs").glob("machine*")}
        assert launches == {"machine1_rank1.log", "machine1_rank3.log"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_machine_that_is_lost_is_named_and_ends_by_itself(
    far_host: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, at close, and while it is idle: a World for each, since a silent machine counts as lost only after SILENCE_S."""
    monkeypatch.setattr(module, "print", far_host, raising=False)
    options = {"device": "cpu", "env": {"GLOO_SOCKET_IFNAME": far_host.near}, "start_timeout_s": 90}
    agents = []

    def begin(name: str) -> World:
        world = World(4, nodes=2, endpoint=far_host.free_endpoint(), logs=tmp_path / name, **options)
        agents.append(far_host.process)
        return world

    try:
        with begin("step") as in_a_step, begin("closed") as closed, begin("idle") as idle:
            assert [world.eval("rank") for world in (in_a_step, closed, idle)] == [[0, 1, 2, 3]] * 3
            asked: list[int] = []
            hear_until = in_a_step._crew._hear_until
            in_a_step._crew._hear_until = lambda done, seconds: asked.append(1) or hear_until(done, seconds)  # type: ignore[assignment, func-returns-value]
            code = "import time\nif rank > 1: time.sleep(600)\ndist.barrier()"
            pending = in_a_step.submit_code(code, timeout_s=3)
            far_host.cut()
            with pytest.raises(RankTimeout, match=r"no stack: its machine's agent does not answer") as late:
                pending.result()
            assert (late.value.ranks, late.value.culprits) == ((0, 1, 2, 3), (2, 3))
            assert len(asked) == 1  # of two ranks there; the time does not grow with their number
            assert 1 in closed._crew.agents  # not known as lost yet
            closed.close()
            assert closed.state == "closed"
            assert wait_for(lambda: idle._crew.hear_agents() or 1 not in idle._crew.agents, 60)
            with pytest.raises(RankDied, match=r"^rank 2 .* is gone with the agent of machine 1 in phase 'run'"):
                idle.run("dist.barrier()", timeout_s=60)
            assert wait_for(lambda: all(agent is not None and agent.poll() is not None for agent in agents), 60)
        assert len({id(agent) for agent in agents}) == 3
        assert wait_for(lambda: holdings(os.getpid())["processes"] == [])
    finally:
        far_host.mend()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.drawn(1, of="loops")
@pytest.mark.parametrize(("lab_name", "phase"), [("stream", "stream"), ("share", "shared")])
def test_a_machine_that_is_lost_in_a_loop_is_named(
    far_host: OtherHost, lab_name: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", far_host.near)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    where = {"nodes": 2, "endpoint": far_host.free_endpoint(), "launch": far_host.launch, "device": "cpu"}
    limits = {"timeout_s": 8.0, "deadline_s": 8.0}
    try:
        longer = {"phases": phase, "steps": 100} if lab_name == "stream" else {}
        settings = {**LABS_OVER_HOSTS[lab_name], **longer}
        with kit.lab(lab_name, out=tmp_path / "run", **where, **limits, **settings) as lab:
            while lab.phases[lab.done].phase != phase:
                lab.step()
            cutter = threading.Timer(0.5, far_host.cut)
            cutter.start()
            with pytest.raises(RankTimeout, match="no stack: its machine's agent does not answer"):
                lab.step()
            cutter.join()
            states = {(row["node"], row["state"]) for row in lab.world.status()}
            # Also ranks there that no call was waiting for, so that none is asked in vain. Other calls there are cancelled, which ends
            # their Worlds: the only one of stream, if two replicas there had a call.
            assert {state for node, state in states if node} <= {"lost", "dead"}
            assert "lost" not in {state for node, state in states if not node}
        assert wait_for(lambda: far_host.pids() == [], 30)  # the agents end by themselves, whatever they were sending
        assert [*Path(tempfile.gettempdir()).glob("kit-devices-*")] == []
    finally:
        far_host.mend()
    assert wait_for(lambda: holdings(os.getpid())["processes"] == [])


def test_an_agent_ends_when_its_notebook_s_machine_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it sends: the kernel's own limit begins again with each message."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        assert 0 <= WorldLink(sock, b"", caller=True).silence() < SILENCE_S

    class EndedError(Exception): ...

    def end() -> None:
        raise EndedError

    paused = [
        0.0,
        SILENCE_S + 60,
        SILENCE_S + 61,
        0.0,
    ]  # the machine of the agent itself; then the kernel asks, and is answered
    silences = iter([*paused, *range(SILENCE_S - ASKED_S + 1, SILENCE_S + 2)])
    node: Any = SimpleNamespace(link=SimpleNamespace(silence=lambda: next(silences)), end=end)
    monkeypatch.setattr("kit.world.agentside.time.sleep", lambda _: None)
    with pytest.raises(EndedError):
        look_around(node)
    assert [*silences] == []


@pytest.mark.slow
def test_a_rank_of_another_machine_is_killed_and_named(two_nodes: tuple[World, OtherMachine]) -> None:
    world, _ = two_nodes
    with pytest.raises(BadInput, match="ranks must be a list of some of 0 to 3"):
        world.kill_rank(7)
    pending = world.submit_code("import time\nif rank == 3: time.sleep(60)\ndist.barrier()", timeout_s=60)
    world.kill_rank(3)
    with pytest.raises(RankDied) as death:
        pending.result()
    assert (death.value.rank, death.value.signal) == (3, "SIGKILL")


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
    port = int(world._crew.plan.endpoint.rpartition(":")[2])
    assert addresses_listening_at(port) == ["0100007F"]  # torchrun's store, and not on other interfaces
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
def test_a_template_launches_the_other_machine(tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "words").touch()
    launch = f"echo machine {{node}} >> {tmp_path}/words; GLOO_SOCKET_IFNAME=lo exec sh -c {{command}}"
    options = {"device": "cpu", "logs": tmp_path, "env": {"GLOO_SOCKET_IFNAME": "lo", "OF_THE_WORLD": "a b"}}
    with World(2, nodes=2, endpoint=f"127.0.0.1:{free_port()}", launch=launch, **options) as world:
        assert world.eval("__import__('os').environ['OF_THE_WORLD']") == ["a b", "a b"]
        seen = "open('/proc/self/environ').read()"
        assert world.eval(f"['KIT_KEY' in {seen}, 'KIT_WORLD=node1-' in {seen}]") == [[False, False], [False, True]]
        commands = [line for pid in Path("/proc").glob("[0-9]*") for line in command_of(pid)]
        assert world._crew._key.hex() not in " ".join(commands)
        world.restart()
        assert world.eval("rank") == [0, 1]
    assert (tmp_path / "words").read_text() == "machine 1\n"


def command_of(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@pytest.mark.slow
def test_a_link_of_an_agent_that_was_tampered_with_is_the_reason(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies: list[Proxy] = []

    def through_a_proxy(python: str, agent: Path, arguments: list[str], env: dict[str, str]) -> str:
        proxies.append(Proxy(arguments[1]))
        return agent_command(python, agent, ["--connect", proxies[0].address, *arguments[2:]], env)

    monkeypatch.setattr(module, "agent_command", through_a_proxy)
    options = {"device": "cpu", "logs": tmp_path, "env": {"GLOO_SOCKET_IFNAME": "lo"}}
    launch = "GLOO_SOCKET_IFNAME=lo exec sh -c {command}"
    with World(2, nodes=2, endpoint=f"127.0.0.1:{free_port()}", launch=launch, **options) as world:
        proxies[0].flip = "listener"
        assert world._crew.ask(1, "log", rank=1, offset=0, limit=10) is None
        said = r"is gone with the agent of machine 1; a link to it was broken: receiving failed: tampered or wrong key"
        with pytest.raises(RankDied, match=said):
            world.run("import time; time.sleep(50)")  # until the agent, which has heard of it, ends its ranks
    proxies[0].thread.join()


@pytest.mark.slow
def test_the_agents_of_several_worlds_start_at_once(tmp_path: Path, nothing_left: None) -> None:
    """Each of the two launches waits for the other one."""
    (tmp_path / "begun").mkdir()
    both = f"touch {tmp_path}/begun/$$; until [ $(ls {tmp_path}/begun | wc -l) = 2 ]; do sleep 0.05; done"
    options = {"device": "cpu", "logs": tmp_path / "logs", "env": {"GLOO_SOCKET_IFNAME": "lo"}, "start_timeout_s": 60}
    launch = f"{both}; GLOO_SOCKET_IFNAME=lo exec sh -c {{command}}"
    with Worlds([1, 1, 1, 1], nodes=2, endpoint=f"127.0.0.1:{free_port()}", launch=launch, **options) as worlds:
        assert [row["node"] for row in worlds.status()] == [0, 1, 0, 1]


@pytest.mark.slow
def test_a_launch_that_fails_says_so_at_once(tmp_path: Path, nothing_left: None) -> None:
    launch = "echo no route to machine {node} >&2; exit 255; {command}"
    said = r"the launch of machine 1 exited with status 255 before its agent joined: no route to machine 1$"
    with pytest.raises(KitError, match=said):
        World(2, nodes=2, endpoint=f"127.0.0.1:{free_port()}", launch=launch, device="cpu", logs=tmp_path)


def test_a_launch_that_waits_is_quoted_and_has_time_to_clean_up(tmp_path: Path) -> None:
    waits = "trap 'echo cleaned up; exit' TERM; echo note: a rehearsal; echo waiting; while :; do sleep 0.05; done; {command}"
    launches = [Launched.start([node], waits, ["agent"], b"key", tmp_path / f"log{node}") for node in (1, 2)]
    assert wait_for(lambda: all(launched.last_words(1) == ": waiting" for launched in launches))
    crew = module.Crew.__new__(module.Crew)
    crew._launched, crew.agents = launches, {0: Any}
    crew.plan = SimpleNamespace(nodes=3, machines=(0, 1, 2))
    says = [f"the launch of machine {node} says: waiting" for node in (1, 2)]
    assert crew._missing("agents") == "; ".join(["1 of 3 machines have joined", "missing: 1, 2", *says])
    for launched in launches:
        assert launched.notes() == ["a rehearsal"]
        launched.end(within_s=0.0)
        assert launched.last_words(1) == ": cleaned up"


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ("ssh", "launch must be 'print', 'ssh:HOST1,HOST2', 'slurm', 'ray', or a command with {command}"),
        ("ssh:a,b", "launch='ssh:a,b' names 2 machines, and nodes=2 needs 1 beside this one"),
        ("ssh:-oProxyCommand=x", "launch= names '-oProxyCommand=x', which is no host name"),
        ("slurm", "launch='slurm' works inside an allocation"),
        ("run {command} {host}", "launch must be 'print'"),
        ("run {command", "launch='run {command' cannot be read"),
    ],
)
def test_a_launch_that_cannot_be_is_one_sentence(launch: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(BadInput, match=re.escape(said)):
        World(2, nodes=2, endpoint="127.0.0.1:4000", launch=launch)
    with pytest.raises(BadInput, match="launch= is for several nodes"):
        World(2, launch=launch)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"devices": 3}, "devices=3 cannot be spread evenly over nodes=2; give a multiple of 2"),
        (
            {"devices": 4, "infer_tp": 2, "a.infer": [0, 3], "a.train": [1]},
            "a's replica 0 uses the devices [0, 3], which are not on one machine: with devices=4 and nodes=2 each machine has 2",
        ),
        ({"simulated": True}, "nodes=2 is for live ranks; leave nodes=1 with simulated=true"),
        ({"ranks": 6}, "ranks=6, but trainers, replicas and an observer on each other machine need 7; leave ranks out"),
    ],
)
def test_shared_devices_that_machines_cannot_have_are_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        kit.lab("share", nodes=2, endpoint="127.0.0.1:4000", **settings)


def test_pipelines_are_where_their_devices_are_and_an_observer_is_on_each_other_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = share(nodes=2, devices=4, **{"a.train": (0, 1), "b.train": (2,), "b.infer": (3,)})
    on = {role.name: role.machine for role in roles(config)}
    assert on == {"a trainer": 0, "a replica 0": 0, "a replica 1": 0, "b trainer": 1, "b replica 0": 1, "observer 1": 1}
    assert [role.name for role in roles(config) if role.called] == ["a trainer", "b trainer"]
    assert (config.ranks, [config.devices_on(machine) for machine in (0, 1)]) == (7, [[0, 1], [2, 3]])
    monkeypatch.setattr("kit.labs.share.lab.free_gpu_bytes", lambda: [1, 1])
    gpus = devices(roles(dataclasses.replace(config, device="auto")), [2, 1, 1, 1, 1, 1])
    assert gpus == [[0, 1], [0], [1], [0], [1], None]  # which no observer has
    parts = spread([2, 1, 1, 1, 1, 1], 2, world_machines(roles(config)))
    assert [(part.machine, part.before, part.neighbours) for part in parts[2:]] == [
        (0, 3, 4),
        (1, 0, 3),
        (1, 1, 3),
        (1, 2, 3),
    ]


def test_each_of_several_worlds_is_on_one_machine() -> None:
    parts = spread([2, 1, 3, 1], 2)
    assert [(part.machine, part.first, part.before, part.neighbours) for part in parts] == [
        (0, 0, 0, 5), (1, 2, 0, 2), (0, 3, 2, 5), (1, 6, 1, 2),
    ]  # fmt: skip
    assert [(part.before, part.neighbours) for part in spread([2, 1], 1)] == [(0, 3), (2, 3)]
    with pytest.raises(BadInput, match="nodes=3 exceeds the 2 Worlds, each of which is on one machine; use at most 2"):
        check_worlds([1, 1], 3, "127.0.0.1:4000")


def test_ssh_and_slurm_are_commands_for_each_other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [command.split()[-2:] for command in launch_commands("ssh:gpu1, me@gpu2", 3)] == [
        ["gpu1", "{command}"],
        ["me@gpu2", "{command}"],
    ]
    for name, text in (
        ("scontrol", "echo gpu1; echo gpu2; echo gpu3"),
        ("srun", "exit 1"),
    ):  # stand-ins for Slurm's own
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-3]")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu2")
    commands = launch_commands("slurm", 3)
    assert ["--nodelist=gpu1" in commands[0], "--nodelist=gpu3" in commands[1]] == [True, True]
    with pytest.raises(BadInput, match="this Slurm allocation has, beside this one, 2 machines, and nodes=2 needs 1"):
        launch_commands("slurm", 2)
    monkeypatch.setenv("SLURMD_NODENAME", "login.cluster")
    with pytest.raises(BadInput, match=re.escape("on a machine of the allocation (gpu[1-3]), and this one is login")):
        launch_commands("slurm", 3)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr("kit.world.launch.SCONTROL_S", 0.1)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-4]")
    with pytest.raises(BadInput, match=r"cannot ask scontrol for the machines: .*timed out"):
        launch_commands("slurm", 3)


# Neither has a machine to go to here. They pass on what they are given as the real ones do: ssh its last word, for a shell, without this
# environment; srun the words after its options.
STAND_INS = {
    "ssh": 'for last; do :; done\nexec env -i PATH="$PATH" GLOO_SOCKET_IFNAME=lo /bin/sh -c "$last"',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "scontrol": "printf 'gpu1\\ngpu2\\n'",
}


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "told"), [("ssh:gpu2", "ssh -o BatchMode=yes"), ("slurm", "srun --overlap")])
def test_stand_ins_for_ssh_and_srun_launch_the_other_machine(
    launch: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/told\n{text}\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", f"gpu[1-2],{tmp_path.name}")  # asked once in a process
    monkeypatch.setenv("SLURMD_NODENAME", "gpu1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    options: dict[str, Any] = {"device": "cpu", "logs": tmp_path / "logs", "env": {"OF_THE_WORLD": "a 'b' $c"}}
    with World(2, nodes=2, endpoint=f"127.0.0.1:{free_port()}", launch=launch, **options) as world:
        world.run("t = torch.ones(1) * (rank + 1); dist.all_reduce(t)")
        assert world.eval("[t.item(), __import__('os').environ['OF_THE_WORLD']]") == [[3.0, "a 'b' $c"]] * 2
        key = world._crew._key.hex()
    words = (tmp_path / "told").read_text()
    assert told in words
    assert "gpu2" in words
    assert key not in words


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


def test_the_folder_of_an_agent_that_was_killed_is_listed(nothing_left: None) -> None:
    key = secrets.token_bytes(32)
    certificate = make_certificate()
    listener = WorldListener(key, "127.0.0.1", certificate)
    where = ["--connect", listener.address, "--certificate", certificate.fingerprint]
    command = [sys.executable, "-m", "kit.world.agent", *where, "--node", "1"]
    env = {**os.environ, "KIT_KEY": key.hex(), "PYTHONPATH": os.pathsep.join(sys.path)}
    links: list[WorldLink] = []
    with subprocess.Popen(command, env=env, start_new_session=True) as process:
        assert wait_for(lambda: links or links.extend(listener.welcome()))
        process.kill()
    (folder,) = [path for path in leftovers.dead_folders(()) if path.name.startswith("node1-")]
    shutil.rmtree(folder)
    links[0].close()
    listener.close()
