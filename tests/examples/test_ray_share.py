"""docs/examples/ray_share.py: the desk as an actor of Ray, and the virtual cluster. What needs Ray runs where it is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kit.errors import BadInput

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not here: make env-ray")


@pytest.fixture(scope="module")
def ray_share() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_share", EXAMPLES / "ray_share.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_bundle_for_each_device(ray_share: ModuleType) -> None:
    assert ray_share.device_bundles(2, gpus=True) == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert ray_share.device_bundles(1, gpus=False) == [{"CPU": 1.0}]


@pytest.mark.parametrize(
    ("mapping", "tp", "why"),
    [
        ([], 1, r"a device mapping is a list of device numbers, not \[\]"),
        ([0, True], 1, r"a device mapping is a list of device numbers, not \[0, True\]"),
        ([1, 4, -1], 1, r"names \[-1, 4\], but the cluster has 4 devices, numbered from 0"),
        ([1, 1], 1, r"the device mapping \[1, 1\] names a device twice"),
        ([1, 2, 3], 2, r"tp=2 does not divide the 3 devices of the mapping \[1, 2, 3\]"),
    ],
)
def test_a_mapping_that_the_cluster_cannot_have_is_refused(
    ray_share: ModuleType, mapping: list[int], tp: int, why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        ray_share.VirtualCluster(SimpleNamespace(bundle_specs=ray_share.device_bundles(4, gpus=False)), mapping, tp=tp)


def test_the_virtual_cluster_is_that_of_the_mapping(ray_share: ModuleType) -> None:
    group = SimpleNamespace(bundle_specs=ray_share.device_bundles(8, gpus=True))
    cluster = ray_share.VirtualCluster(group, [4, 5, 2, 3], tp=2, colocated=3)
    assert cluster.get_placement_groups() == [group]
    assert cluster.world_size() == 4
    assert cluster.bundle_indices == [(0, [4, 5]), (0, [2, 3])]  # in the order of the ranks
    assert (cluster.use_gpus, cluster.max_colocated_worker_groups) == (True, 3)
    assert not cluster.shutdown()


DRIVER = """
import os, signal, sys, time
import ray
from ray_share import *

ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
desk = start_desk(2, ["a", "b"])
generation = {"trainer": [0], GENERATION: [0, 1]}

def raised(ref):
    try:
        ray.get(ref)
    except Exception as error:
        return str(error)

assert "b has no actor 'coordinator' in the namespace 'kit-pipeline-b'" in raised(desk.register.remote("b", generation))
a, b = start_pipeline("a"), start_pipeline("b")  # equal names, and they do not meet
assert a._actor_id != b._actor_id
assert "names [2], but the cluster has 2 devices" in raised(desk.register.remote("a", {GENERATION: [1, 2]}))
group = ray.get(desk.register.remote("a", generation))
assert ray.get(desk.register.remote("b", generation)).id == group.id  # shared
cluster = VirtualCluster(group, [1, 0], colocated=2)
assert cluster.node_count() == 1
address, port = cluster.get_master_address_and_port()
assert address and port

@ray.remote
def bundle():
    return ray.get_runtime_context().get_placement_group_id()

places = ray.get([bundle.options(**cluster.options(rank)).remote() for rank in (0, 1)])
assert places == [group.id.hex()] * 2

ray.get(desk.acquire.remote("a", GENERATION, 8))
for _ in range(600):
    if ray.get(a.replicas_awake.remote()) == [0, 1]:
        break
    time.sleep(0.1)
assert ray.get(a.replicas_awake.remote()) == [0, 1]
assert ray.get(desk.idle.remote()) == []
release = desk.planned_release.remote("a")
if sys.argv[1] == "in a release":
    ray.kill(a)
    ray.get(release)  # is answered all the same
else:
    ray.get(release)
    assert ray.get(a.replicas_awake.remote()) == []
    ray.get(desk.acquire.remote("a", GENERATION, 8))
    ray.kill(a)
for _ in range(600):
    if ray.get(desk.registered.remote()) == ["b"]:
        break
    time.sleep(0.1)
assert ray.get(desk.registered.remote()) == ["b"]
assert ray.get(desk.idle.remote()) == [0, 1]
assert ray.get(desk.acquire.remote("b", "training")) == (0,)  # it goes on
ray.shutdown()
print("fine")
"""


@pytest.mark.slow
@needs_ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", ["in a release", "while it generates"])
def test_a_dead_coordinator_is_unregistered_and_the_others_go_on(dies: str) -> None:
    path = os.pathsep.join([str(EXAMPLES), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, dies], capture_output=True, text=True, env=env, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "fine"


@pytest.mark.slow
@needs_ray
@pytest.mark.timeout(300)
def test_the_example_runs() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    script = [sys.executable, str(EXAMPLES / "ray_share.py")]
    done = subprocess.run(script, capture_output=True, text=True, env=env, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "b generates with replicas [0, 1]" in done.stdout
