"""Ranks that route through torchcomms: torch's own routing code runs, with a stand-in for torchcomms that makes gloo groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.routing import FLAG
from kit.world import World
from kit.world.routing import changes, hints_of, qualified

STANDINS = Path(__file__).resolve().parents[1] / "standins"
OPTIONS = """
class Config:  # a stand-in for NCCL's, which torch has where it was built for CUDA
    cga_cluster_size, min_ctas, net_name, of_tomorrow = -1, -1, None, -1
class Options:
    def __init__(self):
        self.config, self.is_high_priority_stream, self._timeout, self.split_color = Config(), False, 600, 0
options = Options()
options.is_high_priority_stream, options.split_color = True, 5
options.config.cga_cluster_size, options.config.net_name, options.config.of_tomorrow = 2, "Socket", 7
"""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> Iterator[World]:
    monkeypatch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)
    with World(3, device="cpu", env={FLAG: "1"}) as made:
        yield made


def calls(world: World) -> list[list[dict[str, Any]]]:
    return world.call("torchcomms:calls")


def test_a_group_is_made_with_its_own_rank_size_and_timeout(world: World) -> None:
    assert [[one["rank"], one["size"]] for (one,) in calls(world)] == [[0, 3], [1, 3], [2, 3]]
    world.run("import datetime\npart = dist.new_group([1, 2], timeout=datetime.timedelta(seconds=77))")
    world.run("if rank: x = torch.ones(1) * rank; dist.all_reduce(x, group=part); assert x.item() == 3")
    first, second, third = calls(world)
    assert len(first) == 1  # no member makes a communicator
    assert [(made[1]["rank"], made[1]["size"], made[1]["timeout_s"]) for made in (second, third)] == [
        (0, 2, 77),
        (1, 2, 77),
    ]
    assert world.eval("[name for name in __import__('os').environ if name.startswith('TORCHCOMM_')]") == [[], [], []]
    timeout = "part._get_backend(torch.device('cpu')).options._timeout.total_seconds() if rank else 77.0"
    assert world.eval(timeout) == [77.0] * 3


def test_the_group_is_known_by_the_name_that_was_asked_for(world: World) -> None:
    world.run("part = dist.new_group([0, 1, 2], backend='gloo')")
    assert world.eval("[dist.get_backend(), dist.get_backend(part)]") == [["gloo", "gloo"]] * 3
    assert world.eval("[str(device) for device in part._device_types]") == [["cpu"]] * 3
    assert world.eval("len(dist.distributed_c10d._world.comms)") == [0] * 3


def test_what_torch_refuses_when_it_splits_is_made(world: World) -> None:
    world.run("part = dist.new_group([2, 0], use_local_synchronization=True, sort_ranks=False) if rank != 1 else None")
    assert world.eval("dist.get_rank(part) if rank != 1 else None") == [1, None, 0]


def test_options_go_as_hints_and_what_is_lost_is_told(world: World) -> None:
    world.run(f"{OPTIONS}\nmade = dist.new_group([0, 1, 2], backend='nccl', pg_options=options)")
    made = calls(world)[0][1]
    assert (made["backend"], made["device"]) == ("nccl", "cuda")
    hints = {name: value for name, value in made["hints"].items() if name != "persistent_store"}
    assert hints == {"is_high_priority_stream": "true", "cga_cluster_size": "2", "netName": "Socket"}
    assert world.call("kit.routing:describe")[0]["options_lost"] == ["config.of_tomorrow"]
    known = "[(s := __import__('kit.routing').routing.settings(made)).config.cga_cluster_size, s._timeout.total_seconds() > 0]"
    assert world.eval(known) == [[2, True]] * 3


def test_groups_tell_that_they_are_routed(world: World) -> None:
    world.run("part = dist.new_group([0, 1])")
    said = world.call("kit.routing:describe")
    assert [(one["requested"], one["importable"], one["effective"], one["why"]) for one in said] == [
        (True, True, True, None)
    ] * 3
    assert [(one["groups"], one["groups_effective"]) for one in said] == [(2, 2), (2, 2), (1, 1)]


def test_torchs_own_functions_come_back(world: World) -> None:
    world.run(
        "from kit.world import routing\nfirst = routing.c10d.new_comm\nrouting.install()\nassert routing.c10d.new_comm is first"
    )
    world.run("routing.uninstall()\nimport torchcomms\nassert routing.c10d.new_comm is torchcomms.new_comm")


def test_a_kept_group_of_another_package_is_not_called_routed(world: World) -> None:
    world.run("routing = __import__('kit.routing').routing\nassert routing.is_routed(dist.group.WORLD)")
    world.run("plain = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, __import__('datetime').timedelta(seconds=9))")
    assert world.eval("isinstance(plain, dist.distributed_c10d._BackendWrapper)") == [False] * 3


def test_options_of_another_kind_are_lost_as_a_whole() -> None:
    assert hints_of(None) == ({}, set())
    assert hints_of(SimpleNamespace(threads=2)) == ({}, {"SimpleNamespace"})
    assert changes(SimpleNamespace(a=1, b=2, _c=3), SimpleNamespace(a=1, b=1)) == {"b": 2}


def test_a_backend_is_named_with_its_device() -> None:
    assert [qualified(name) for name in ("gloo", "nccl", "cpu:gloo,cuda:nccl", "fake")] == [
        "cpu:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl", "fake",
    ]  # fmt: skip
