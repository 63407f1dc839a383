"""`launch=ray`: the agents of other machines are tasks of a Ray cluster. `engine=ray`: ranks are its actors, and so is the controller of
`stream`. `make env-ray` makes an environment where these tests run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit
from kit.errors import BadInput, KitError, RankDied, RankError, RankTimeout
from kit.labs.bench_world.hosts import SecondHost
from kit.world import World, leftovers, warm
from kit.world.launch import launch_commands
from kit.world.raycluster import SLOWEST
from kit.world.world import Worlds
from tests.faults.test_nodes import LABS_OVER_HOSTS, command_of, free_port
from tests.holdings import wait_for
from tests.labs.parts import failed, why

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not here: make env-ray")
# By default it depends on whether this user has a token, and all that runs beside Ray's workers goes before them.
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
RAY_S = 240  # Ray starts slowly on a busy machine
pytestmark = pytest.mark.timeout(2 * RAY_S)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_the_launch_is_refused_with_the_command_that_installs_it() -> None:
    said = r"^launch='ray' needs Ray in the notebook's environment: .* -m pip install ray$"
    with pytest.raises(BadInput, match=said):
        World(2, nodes=2, endpoint="127.0.0.1:4000", launch="ray")
    with pytest.raises(BadInput, match=said):
        launch_commands("ray", 2)


@needs_ray
def test_what_an_agent_imports_while_the_cluster_starts_is_a_part_of_ray() -> None:
    code = f"import sys, ray; print({SLOWEST!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@needs_ray
def test_a_machine_gives_the_share_of_its_gpus_that_the_world_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray's import sets it
    from kit.world import raylaunch

    nodes = [
        {
            "Alive": True,
            "NodeID": str(gpus),
            "NodeManagerAddress": f"10.0.0.{gpus}",
            "Resources": {"CPU": 8, "GPU": gpus},
        }
        for gpus in (0, 2, 6)
    ]
    monkeypatch.setattr(raylaunch.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(raylaunch.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0"))

    def gpus_of(share: float) -> list[float | None]:
        return [bundle.get("GPU") for bundle in raylaunch.bundles_of(1, 2, share, joined=True)]

    assert gpus_of(1 / 3) == gpus_of(0.333333) == [0.667, 2.0]
    assert gpus_of(0.0) == [None, None]


@needs_ray
@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        (
            "10.0.0.9:6379",
            ConnectionError("no route\nand more"),
            "Ray could not join RAY_ADDRESS=10.0.0.9:6379: no route",
        ),
        ("", RuntimeError("another version"), "Ray could not join this machine's cluster: another version"),
        ("", ConnectionError("none is here"), "Ray did not start here within 0 s: it is too slow"),
    ],
)
def test_a_cluster_that_cannot_be_joined_or_started_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, address: str, error: Exception, said: str
) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray's import sets it, as a start sets the next two
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    from kit.world import raylaunch

    def init(where: str = "", **options: Any) -> None:
        raise error if "address" in options else RuntimeError("it is too slow")

    monkeypatch.setattr(raylaunch.ray, "init", init)
    monkeypatch.setattr(raylaunch, "START_S", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SystemExit, match=f"^{re.escape(said)}$"):
        raylaunch.join_cluster("/nowhere", 2)


@needs_ray
@pytest.mark.parametrize(
    ("machines", "said"),
    [
        (1, "the Ray cluster has 0 machines with a CPU beside this one, and the World needs 1"),
        (2, "the Ray cluster has had no room for node:10.0.0.1 with 1 CPU for 300 s; `ray status` shows its use"),
    ],
)
def test_a_cluster_without_room_is_one_sentence(monkeypatch: pytest.MonkeyPatch, machines: int, said: str) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")
    from kit.world import raylaunch

    nodes = [
        {"Alive": True, "NodeID": str(node), "NodeManagerAddress": f"10.0.0.{node}", "Resources": {"CPU": 8}}
        for node in range(machines)
    ]
    monkeypatch.setattr(raylaunch, "join_cluster", lambda *_: True)
    monkeypatch.setattr(raylaunch.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(raylaunch.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0"))
    monkeypatch.setattr(raylaunch, "placement_group", lambda _: SimpleNamespace(wait=lambda _: False))
    with pytest.raises(SystemExit, match=f"^{re.escape(said)}$"):
        raylaunch.launch(SimpleNamespace(command=["agent"], machine=1, share=0.0), "key", "/nowhere")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The temporary folder of these tests, where nobody else's processes have theirs."""
    warm.end_waiting()  # it would keep its folder in the other one
    with (
        tempfile.TemporaryDirectory(prefix="kr", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        warm.end_waiting()


@pytest.fixture
def alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No cluster is found here."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if set(processes("gcs_server")) - set(processes("gcs_server", "kit-ray-")):
        pytest.skip("a Ray cluster runs on this machine, and a launch would join it")
    return place


def left_folders() -> set[Path]:
    """Of agents and of Ray, in the temporary folder of these tests."""
    return {*leftovers.base().glob("node*"), *Path(tempfile.gettempdir()).glob("kit-ray-*")}


@contextlib.contextmanager
def agents_are_killed() -> Iterator[None]:
    """Remove what agents leave that had no time to end."""
    before = left_folders()
    yield
    for folder in left_folders() - before:
        shutil.rmtree(folder)


def processes(*words: str) -> list[int]:
    """Those with all of these words in their command lines."""
    running = {int(path.name): " ".join(command_of(path)) for path in Path("/proc").glob("[0-9]*")}
    return [pid for pid, command in running.items() if all(word in command for word in words)]


@pytest.mark.slow
@needs_ray
def test_without_a_cluster_a_small_one_plays_the_other_machines(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    printed: list[str] = []
    monkeypatch.setattr("kit.world.crew.print", printed.append, raising=False)
    options: dict[str, Any] = {"device": "cpu", "logs": tmp_path, "env": {"GLOO_SOCKET_IFNAME": "lo"}}
    options |= {"endpoint": f"127.0.0.1:{free_port()}", "launch": "ray", "start_timeout_s": RAY_S}
    with agents_are_killed(), World(3, nodes=3, **options) as world:
        assert "there is no Ray cluster here: this machine plays machine 1, 2" in printed
        world.run("t = torch.ones(1) * (rank + 1); dist.all_reduce(t)")
        assert world.eval("t.item()") == [6.0, 6.0, 6.0]
        assert [row["node"] for row in world.status()] == [0, 1, 2]
        with pytest.raises(RankDied, match=r"rank 1 .* was killed by SIGKILL"):
            world.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
        world.restart()
        assert world.eval("rank") == [0, 1, 2]
        (launched,) = world._crew._launched  # one for both machines
        launched.process.kill()
        said = r"is gone with the agent of machine [12]; the launch of machine 1, 2 was killed by SIGKILL"
        with pytest.raises(RankDied, match=said):
            world.run("dist.barrier()\nif rank: import time; time.sleep(100)", timeout_s=100)
        assert wait_for(lambda: not processes(f"{alone}/kit-ray-"), 60)
        (folder,) = alone.glob("kit-ray-*")
        assert folder in leftovers.dead_folders(())


@pytest.mark.slow
@needs_ray
def test_of_several_worlds_each_has_a_small_cluster_of_its_own(alone: Path, tmp_path: Path, nothing_left: None) -> None:
    options: dict[str, Any] = {"device": "cpu", "logs": tmp_path, "env": {"GLOO_SOCKET_IFNAME": "lo"}}
    options |= {"endpoint": f"127.0.0.1:{free_port()}", "launch": "ray", "start_timeout_s": RAY_S, "isolate": True}
    before = left_folders()
    with Worlds([1, 1, 1, 1], nodes=2, **options) as worlds:
        assert [row["node"] for row in worlds.status()] == [0, 1, 0, 1]
        worlds.worlds[1].close()
        assert worlds.worlds[3].eval("rank") == [0]  # the number in its own job
        assert {path.name for path in tmp_path.glob("machine*")} == {"machine1_rank1.log", "machine1_rank3.log"}
    assert not processes(f"{alone}/kit-ray-")
    assert left_folders() <= before


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("ended", ["the notebook", "its launch"])
def test_a_cluster_that_starts_here_leaves_nothing(alone: Path, ended: str, tmp_path: Path) -> None:
    start = f"World(2, nodes=2, endpoint='127.0.0.1:{free_port()}', launch='ray', logs={str(tmp_path)!r}, device='cpu')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    before = left_folders()
    with subprocess.Popen([sys.executable, "-c", f"from kit import World; {start}"], env=env) as notebook:
        assert wait_for(lambda: processes("gcs_server", f"{alone}/kit-ray-"), RAY_S)
        assert not set(alone.glob("kit-ray-*")) & set(leftovers.dead_folders(()))
        if ended == "the notebook":
            notebook.kill()
        else:
            (launch,) = processes("raylaunch.py", f"--notebook {notebook.pid} ")
            os.killpg(launch, signal.SIGTERM)
    assert wait_for(lambda: not processes(f"{alone}/kit-ray-") and left_folders() <= before, 60)


# -- engine=ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_ray
def test_ranks_are_actors_and_a_killed_one_is_named(alone: Path, tmp_path: Path, nothing_left: None) -> None:
    with World(2, engine="ray", device="cpu", logs=tmp_path) as world:
        world.run("t = torch.ones(1) * (rank + 1); dist.all_reduce(t)")
        assert world.eval("t.item()") == [3.0, 3.0]
        assert len(processes("gcs_server", f"{alone}/kit-ray-")) == 1
        assert len({path.read_text().split()[3] for path in (Path(f"/proc/{pid}/stat") for pid in world.pids)}) == 1
        assert world.eval("__import__('os').nice(0)") == [os.nice(0)] * 2  # Ray's own workers let others go before them
        with pytest.raises(RankDied, match=r"rank 1 \(pid \d+ on .*\) is gone") as died:
            world.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
        assert died.value.rank == 1
        world.restart()
        assert world.eval("rank") == [0, 1]
        assert len(processes("gcs_server", f"{alone}/kit-ray-")) == 1  # the same cluster, or one after the other
    assert not processes(f"{alone}/kit-ray-")
    assert left_folders() == set()


@pytest.mark.slow
@needs_ray
def test_a_start_that_fails_leaves_no_cluster(alone: Path, tmp_path: Path, nothing_left: None) -> None:
    with pytest.raises(RankError, match=r"rank \d could not start: ModuleNotFoundError: No module named 'no_such'"):
        World(2, engine="ray", device="cpu", logs=tmp_path, preload=["no_such"])
    assert wait_for(lambda: not processes(f"{alone}/kit-ray-"), 10)
    assert left_folders() == set()


DECISIONS = (
    *("next_prompt", "acquire", "generate", "selected", "logprobs", "begin", "microbatch", "finish", "trained"),
    *("clear", "hold", "sync", "resume", "release", "ended"),
)


def decisions(run: kit.Run) -> list[tuple[str, str]]:
    """What the controller did, in order."""
    frame = run.frame()
    rows = frame[(frame["phase"] == "lockstep") & frame["metric"].isin(DECISIONS) & (frame["rank"] == -1)]
    return list(zip(rows["metric"], rows["ids"], strict=True))


def weight_digests(run: kit.Run, phase: str = "lockstep") -> list[tuple[str, str]]:
    frame = run.frame()
    rows = frame[(frame["phase"] == phase) & (frame["metric"] == "digest")]
    return list(zip(rows["ids"], rows["text"], strict=True))


@pytest.mark.slow
@needs_ray
def test_without_staleness_the_controller_in_an_actor_decides_and_trains_the_same(
    alone: Path, tmp_path: Path, nothing_left: None
) -> None:
    small = {"phases": "plain,lockstep", "replicas": 1, "ranks": 2, "steps": 3, "warm": 5, "device": "cpu"}
    here = kit.run("stream", out=tmp_path / "here", **small)
    by_ray = kit.run("stream", out=tmp_path / "ray", engine="ray", **small)
    assert decisions(by_ray) == decisions(here)
    assert len(decisions(here)) > 50
    assert weight_digests(by_ray) == weight_digests(here)
    assert len({digest for _, digest in weight_digests(here)}) == 4
    assert {check: why(by_ray.verdict(), check) for check in failed(by_ray.verdict())} == {}
    assert not processes(f"{alone}/kit-ray-")


@pytest.mark.slow
@needs_ray
def test_pipelines_share_devices_under_a_desk_in_an_actor_and_train_the_same(
    alone: Path, tmp_path: Path, nothing_left: None
) -> None:
    small = {**LABS_OVER_HOSTS["share"], "device": "cpu"}
    here = kit.run("share", out=tmp_path / "here", rehearse=False, **small)
    with kit.lab("share", out=tmp_path / "ray", engine="ray", **small) as lab:
        lab.start()
        assert lab._controller is not None
        by_ray = lab.run()
    digests = dict(weight_digests(here, "shared"))
    assert dict(weight_digests(by_ray, "shared")) == digests
    assert len({*digests.values()}) == 6  # two pipelines with three versions each
    # Also of the phase in which a replica and a trainer are killed.
    assert {check: why(by_ray.verdict(), check) for check in failed(by_ray.verdict())} == {}
    assert not processes(f"{alone}/kit-ray-")


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGKILL, r"^the controller's actor ended: rank 2 \(pid \d+ .*is gone"),
        (signal.SIGSTOP, r"^no answer from rank 2 within 10 s"),
    ],
)
def test_a_controller_that_ends_or_is_silent_is_named(
    alone: Path, how: signal.Signals, said: str, tmp_path: Path, nothing_left: None
) -> None:
    small = {"phases": "stream", "replicas": 1, "ranks": 2, "steps": 50, "warm": 0, "device": "cpu", "timeout_s": 10.0}
    with kit.lab("stream", out=tmp_path / "run", engine="ray", **small) as lab:
        lab.step()
        assert lab._controller is not None
        (pid,) = lab._controller.world.pids
        records = lab.dir / "records.jsonl"

        def kill_once_it_works() -> None:
            wait_for(lambda: '"generate"' in records.read_text(), 60)
            os.kill(pid, how)

        killer = threading.Thread(target=kill_once_it_works)
        killer.start()
        with pytest.raises((RankDied, RankTimeout), match=said):
            lab.step()
        killer.join()
        assert isinstance(lab.world, Worlds)
        # At once, and not after those who were lent have been waited for and interrupted.
        assert {world.dead for world in lab.world.worlds} == {
            "its ranks were lent to a controller, which cannot give them back any more"
        }
    assert not processes(f"{alone}/kit-ray-")
    assert left_folders() == set()


# -- in a cluster that was there: last, because it stays until these tests end, and each launch of the others would join it ---


def start_ray(words: list[str], output: Path, **env: str) -> subprocess.Popen[bytes]:
    """A Ray node, once it runs. Ray gives itself 30 s, which a busy machine may exceed."""
    for _ in range(RAY_S // 30):
        with output.open("wb") as file:
            node = subprocess.Popen(
                words, stdout=file, stderr=file, start_new_session=True, env={**os.environ, **OPEN, **env}
            )
        wait_for(lambda node=node: node.poll() is not None or "runtime started" in output.read_text(), RAY_S)  # type: ignore[misc]
        if node.poll() is None:
            return node
    raise AssertionError(output.read_text())


@pytest.fixture(scope="module")
def cluster(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondHost]:
    """A Ray cluster of two nodes: this host, and a network namespace that claims two GPUs."""
    try:
        other = SecondHost()
    except KitError as error:
        pytest.skip(str(error))
    output = tmp_path_factory.mktemp("ray") / "output"
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=4"]
    ray += ["--object-store-memory=80000000"]
    head = [*ray, "--head", f"--node-ip-address={other.address}", "--include-dashboard=false"]
    worker = [*other.prefix, *ray, f"--address={other.address}:6379", f"--node-ip-address={other.far_address}"]
    started = []
    try:
        started.append(start_ray(head, output))
        started.append(start_ray([*worker, "--num-gpus=2"], output, GLOO_SOCKET_IFNAME=other.far))
        yield other
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)
        wait_for(lambda: not other.pids(), 60)
        other.remove()


ASKED = """
import json, ray
ray.init(logging_level="ERROR")
print(json.dumps({**ray.available_resources(), "nodes": sum(node["Alive"] for node in ray.nodes())}))
"""


def free_in(host: SecondHost) -> dict[str, float]:
    """What the cluster has free, and how many nodes."""
    env = {**os.environ, **OPEN, "RAY_ADDRESS": f"{host.address}:6379"}
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    resources: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return resources


@pytest.mark.slow
@needs_ray
def test_a_cluster_that_was_there_runs_the_agents_and_stays(
    cluster: SecondHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    for name, value in {**OPEN, "RAY_ADDRESS": f"{cluster.address}:6379"}.items():
        monkeypatch.setenv(name, value)
    options: dict[str, Any] = {"device": "auto", "logs": tmp_path, "env": {"GLOO_SOCKET_IFNAME": cluster.near}}
    options |= {"launch": "ray", "start_timeout_s": RAY_S}
    said = "the Ray cluster has 1 machines with a CPU beside this one, and the World needs 2"
    with pytest.raises(KitError, match=rf"the launch of machine 1, 2 exited with status 1 before .*{said}"):
        World(3, nodes=3, endpoint=cluster.free_endpoint(), **options)
    with agents_are_killed(), World(2, nodes=2, endpoint=cluster.free_endpoint(), **options) as world:
        over_there = set(cluster.pids())
        assert [pid in over_there for pid in world.pids] == [False, True]
        world.run("t = torch.ones(1) * (rank + 1); dist.all_reduce(t)")
        assert world.eval("t.item()") == [3.0, 3.0]
        assert "GPU" not in free_in(cluster)  # taken
        assert world.eval("__import__('os').environ.get('CUDA_VISIBLE_DEVICES')") == [None, None]  # as ranks count them
        (worker,) = [pid for pid in processes("ray::run_agent") if pid in over_there]
        os.kill(worker, signal.SIGKILL)
        said = r"is gone with the agent of machine 1; the launch of machine 1 exited with status 1: .*Ray lost the task"
        with pytest.raises(RankDied, match=said):
            world.run("dist.barrier()\nif rank: import time; time.sleep(100)", timeout_s=100)
    assert wait_for(lambda: free_in(cluster) == {**free_in(cluster), "nodes": 2, "GPU": 2.0, "CPU": 8.0}, 60)


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("lab", ["smoke", "stream", "share"])
def test_a_lab_passes_over_a_cluster(
    cluster: SecondHost, lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    for name, value in {**OPEN, "RAY_ADDRESS": f"{cluster.address}:6379"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", cluster.near)
    where = {"nodes": 2, "endpoint": cluster.free_endpoint(), "launch": "ray", "device": "cpu"}
    before = left_folders()
    run = kit.run(lab, out=tmp_path / "run", **where, **LABS_OVER_HOSTS[lab])
    assert left_folders() <= before
    verdict = run.verdict()
    assert {check: why(verdict, check) for check in failed(verdict)} == {}


@pytest.mark.slow
@needs_ray
def test_ranks_in_a_cluster_that_was_there_take_their_part_and_it_stays(
    cluster: SecondHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    for name, value in {**OPEN, "RAY_ADDRESS": f"{cluster.address}:6379"}.items():
        monkeypatch.setenv(name, value)
    with World(2, engine="ray", device="cpu", logs=tmp_path) as world:
        assert not set(world.pids) & set(cluster.pids())  # on this machine, whatever is free on others
        world.run("t = torch.ones(1) * (rank + 1); dist.all_reduce(t)")
        assert world.eval("t.item()") == [3.0, 3.0]
        assert free_in(cluster)["CPU"] == 6.0
    assert wait_for(lambda: free_in(cluster) == {**free_in(cluster), "nodes": 2, "CPU": 8.0}, 60)


@pytest.mark.slow
@needs_ray
def test_a_machine_of_the_cluster_that_is_lost_is_named_and_its_agent_ends(
    cluster: SecondHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: the cluster has lost the machine too."""
    for name, value in {**OPEN, "RAY_ADDRESS": f"{cluster.address}:6379"}.items():
        monkeypatch.setenv(name, value)
    options: dict[str, Any] = {"device": "cpu", "logs": tmp_path, "env": {"GLOO_SOCKET_IFNAME": cluster.near}}
    options |= {"launch": "ray", "start_timeout_s": RAY_S}
    try:
        with agents_are_killed(), World(2, nodes=2, endpoint=cluster.free_endpoint(), **options) as world:
            far = world.pids[1]
            pending = world.submit_code("import time\nif rank: time.sleep(600)\ndist.barrier()", timeout_s=3)
            cluster.cut()
            with pytest.raises(RankTimeout, match="no stack: its machine's agent does not answer") as late:
                pending.result()
            assert late.value.culprits == (1,)
        assert wait_for(lambda: far not in cluster.pids() and not processes("agent.py", "--node 1"), 30)
    finally:
        cluster.mend()
