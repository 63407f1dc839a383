"""Ranks that route through torchcomms: torch's own routing code runs, with a stand-in for torchcomms that makes gloo groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.routing import FLAGS, TORCHCOMMS, changes, hints_of, qualified
from kit.world import World

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


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Three ranks shared by all tests here; each test makes its own groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)
        with World(3, device="cpu", env={FLAGS[TORCHCOMMS]: "1"}) as made:
            yield made


def calls(world: World) -> list[list[dict[str, Any]]]:
    """Each rank's recorded calls of torchcomms."""
    return world.call("torchcomms:calls")


def test_a_group_is_made_with_its_own_rank_size_and_timeout(world: World) -> None:
    before = calls(world)
    assert [(reported[0]["rank"], reported[0]["size"]) for reported in before] == [(0, 3), (1, 3), (2, 3)]  # WORLD
    world.run("import datetime\npart = dist.new_group([1, 2], timeout=datetime.timedelta(seconds=77))")
    world.run("if rank: x = torch.ones(1) * rank; dist.all_reduce(x, group=part); assert x.item() == 3")
    made = [after[len(reported) :] for reported, after in zip(before, calls(world), strict=True)]
    reported = [[(one["rank"], one["size"], one["timeout_s"]) for one in some] for some in made]
    assert reported == [[], [(0, 2, 77.0)], [(1, 2, 77.0)]]
    assert world.eval("[name for name in __import__('os').environ if name.startswith('TORCHCOMM_')]") == [[], [], []]
    timeout = "part._get_backend(torch.device('cpu')).options._timeout.total_seconds() if rank else 77.0"
    assert world.eval(timeout) == [77.0] * 3


def test_the_group_is_known_by_the_name_that_was_asked_for(world: World) -> None:
    world.run("part = dist.new_group([0, 1, 2], backend='gloo')")
    assert world.eval("[dist.get_backend(), dist.get_backend(part)]") == [["gloo", "gloo"]] * 3
    assert world.eval("[str(device) for device in part._device_types]") == [["cpu"]] * 3
    assert world.eval("len(dist.distributed_c10d._world.comms)") == [0] * 3


def test_what_torch_refuses_when_it_splits_is_made(world: World) -> None:
    world.run("part = dist.new_group([2, 0], sort_ranks=False)")
    assert world.eval("dist.get_rank(part)") == [1, -1, 0]


def test_options_go_as_hints_and_what_is_lost_is_reported(world: World) -> None:
    world.run(f"{OPTIONS}\nmade = dist.new_group([0, 1, 2], backend='nccl', pg_options=options)")
    made = calls(world)[0][-1]
    assert (made["backend"], made["device"]) == ("nccl", "cuda")
    hints = {name: value for name, value in made["hints"].items() if name != "persistent_store"}
    assert hints == {"is_high_priority_stream": "true", "cga_cluster_size": "2", "netName": "Socket"}
    assert world.call("kit.routing:routing_status", name=TORCHCOMMS)[0]["options_lost"] == ["config.of_tomorrow"]
    world.run("from kit import routing\nknown = routing.made_with(made)")  # what a rebuilt group needs
    assert world.eval("[known.config.cga_cluster_size, known._timeout.total_seconds() >= 600]") == [[2, True]] * 3


def test_groups_tell_whether_they_are_routed(world: World) -> None:
    before = world.call("kit.routing:routing_status", name=TORCHCOMMS)
    reported = [(one["requested"], one["importable"], one["effective"], one["why"]) for one in before]
    assert reported == [(True, True, True, None)] * 3
    assert all(one["groups_effective"] == one["groups"] for one in before)
    world.run("part = dist.new_group([0, 1])")
    world.run("torch.distributed.config.use_torchcomms = False\npast = dist.new_group([1, 2])")
    world.run("torch.distributed.config.use_torchcomms = True")
    after = world.call("kit.routing:routing_status", name=TORCHCOMMS)
    more = [
        [now[name] - was[name] for name in ("groups", "groups_effective")]
        for was, now in zip(before, after, strict=True)
    ]
    assert more == [[1, 1], [2, 1], [1, 0]]


def test_a_second_install_changes_nothing(world: World) -> None:
    world.run("from kit import routing\nimport torchcomms\nfirst = routing.c10d().new_comm\nrouting.install_routes()")
    assert world.eval("[routing.c10d().new_comm is first, first is torchcomms.new_comm]") == [[True, False]] * 3


def test_options_of_another_kind_are_lost_as_a_whole() -> None:
    assert hints_of(None) == ({}, set())
    assert hints_of(SimpleNamespace(threads=2)) == ({}, {"SimpleNamespace"})
    assert changes(SimpleNamespace(a=1, b=2, _c=3), SimpleNamespace(a=1, b=1)) == {"b": 2}


def test_a_backend_is_named_with_its_device() -> None:
    assert [qualified(name) for name in ("gloo", "nccl", "cpu:gloo,cuda:nccl", "fake")] == [
        "cpu:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl", "fake",
    ]  # fmt: skip
