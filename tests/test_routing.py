"""Whether torch can route through torchcomms, probed in a separate process with a test package on its path; and groups over `nccl2`.

Groups over nccl2 are splits of WORLD: Megatron's own calls for eight ranks in one process, over torch's fake backend. `assumed`: every rank
of WORLD enters `split_group` with the same ranks, and each gets its own group (torch/distributed/distributed_c10d.py of 2.13;
pytorch/pytorch#190943 for nccl2). No torch with nccl2 has run this: the split is a stand-in here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as module
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit import routing
from kit.megatron.handles import back_to
from kit.routing import FLAGS, NCCL2, TORCHCOMMS, GroupCall, partitions, requested

ROOT = Path(__file__).resolve().parents[1]
STANDINS = ROOT / "tests" / "standins"


def ask(path: Path, flag: str = "") -> dict[str, Any]:
    code = "import json; from kit.routing import probe; print(json.dumps(probe()))"
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", FLAGS[TORCHCOMMS]: flag}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def package(folder: Path, version: str, code: str) -> None:
    """Make a package with torchcomms' name."""
    (folder / "torchcomms").mkdir()
    (folder / "torchcomms" / "__init__.py").write_text(code)
    about = folder / f"torchcomms-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchcomms\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("flag", "asked"),
    [
        pytest.param("", False, marks=pytest.mark.slow),
        pytest.param("0", False, marks=pytest.mark.slow),
        ("1", True),
        pytest.param("true", True, marks=pytest.mark.slow),
    ],
)
def test_the_flag_is_read_as_torch_reads_it(flag: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAGS[TORCHCOMMS], flag)
    assert requested(TORCHCOMMS) is asked
    code = "import torch.distributed.config as config; print(bool(config.use_torchcomms))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(asked)


@pytest.mark.slow
def test_nothing_is_installed(tmp_path: Path) -> None:
    message = ask(tmp_path, "1")
    if message["importable"]:
        pytest.skip("torchcomms is installed here")
    why = "ModuleNotFoundError: No module named 'torchcomms'"
    assert message == {"requested": True, "importable": False, "effective": None, "why": why}
    assert ask(tmp_path, "0")["requested"] is False


def test_a_package_that_cannot_be_imported_is_reported_in_its_own_words(tmp_path: Path) -> None:
    """Such as the package index's placeholder."""
    package(tmp_path, "0.0.1", "raise ImportError('a name without code')\n")
    message = ask(tmp_path, "1")
    assert (message["requested"], message["importable"], message["effective"]) == (True, False, None)
    assert message["why"] == "ImportError: a name without code"


def test_one_that_lacks_what_torch_asks_for_is_not_importable(tmp_path: Path) -> None:
    package(tmp_path, "0.2.0", "def new_comm(): ...\n")
    message = ask(tmp_path, "1")
    assert (message["importable"], message["effective"]) == (False, None)
    assert "_backend_wrapper" in message["why"]


def test_a_group_tells_whether_it_is_routed() -> None:
    message = ask(STANDINS, "1")
    assert message == {"requested": True, "importable": True, "effective": True, "why": None}
    assert ask(STANDINS) == {"requested": False, "importable": True, "effective": None, "why": None}


def test_a_group_that_cannot_be_made_is_not_routed(tmp_path: Path) -> None:
    package(tmp_path, "0.3.0", "def new_comm(*_, **__): raise RuntimeError('no library')\n")
    (tmp_path / "torchcomms" / "_comms.py").write_text("class _BackendWrapper: ...\n")
    (tmp_path / "torchcomms" / "hooks.py").write_text("class FlightRecorderHook: ...\n")
    message = ask(tmp_path, "1")
    assert (message["importable"], message["effective"]) == (True, False)
    assert message["why"] == "a group cannot be made (RuntimeError: no library)"


# -- nccl2 -----------------------------------------------------------------------------------------------------------------

c10d: Any = module
RANKS = 8
Splits = list[tuple[list[list[int]], Any, Any]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Splits]]:
    """Return a function that makes this process one of eight ranks with groups split off WORLD, and returns the rank's list of splits."""
    from megatron.core import parallel_state

    plain, before = c10d.new_group, back_to(parallel_state)

    def become(rank: int) -> Splits:
        if dist.is_initialized():
            dist.destroy_process_group()
        before()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        splits: Splits = []

        def split_group(split_ranks: list[list[int]], **how: Any) -> Any:
            splits.append((split_ranks, how["group_desc"], how["backend"]))
            mine = [ranks for ranks in split_ranks if rank in ranks]
            return plain(mine[0], backend="fake") if mine else None

        monkeypatch.setattr(c10d, "split_group", split_group)
        return splits

    monkeypatch.setenv(FLAGS[NCCL2], "1")
    routing.install_routes()
    assert dist.new_group is c10d.new_group is not plain
    yield become
    if dist.is_initialized():
        dist.destroy_process_group()
    before()
    c10d.new_group = dist.new_group = plain
    routing.splits.plain = None


def megatron(**sizes: int) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)


def groups() -> dict[str, list[int]]:
    """The ranks of this rank's groups, by Megatron's names."""
    from megatron.core import parallel_state

    found = {name: group for name, group in vars(parallel_state).items() if isinstance(group, dist.ProcessGroup)}
    return {name: dist.get_process_group_ranks(group) for name, group in found.items()}


def noted(made: list[list[int]], ranks: list[int], **how: Any) -> Any:
    made.append(ranks)
    return routing.splits.plain(ranks, **how)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 4},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ],
)
def test_megatrons_groups_are_one_split_a_partition(fake: Callable[[int], Splits], sizes: dict[str, int]) -> None:
    """All ranks enter the same splits in the same order, and each gets the same groups as from torch's own new_group."""
    from megatron.core import parallel_state

    every: list[Splits] = []
    for rank in range(RANKS):
        made: list[list[int]] = []
        fake(rank)
        with pytest.MonkeyPatch.context() as torchs_own:
            torchs_own.setattr(dist, "new_group", partial(noted, made))
            megatron(**sizes)
        wanted = groups()
        every.append(fake(rank))
        routing.planned(partial(megatron, **sizes), back_to(parallel_state))
        assert groups() == wanted
        assert sorted(ranks for parts, *_ in every[rank] for ranks in parts) == sorted(map(sorted, made))
        assert len(every[rank]) < len(made)
    assert all(one == every[0] for one in every)
    for parts, *_ in every[0]:
        flat = [rank for ranks in parts for rank in ranks]
        assert len(flat) == len(set(flat))


def test_ranks_outside_of_a_partition_enter_its_split_and_get_nothing(fake: Callable[[int], Splits]) -> None:
    splits = fake(5)
    assert dist.new_group([0, 1], backend="nccl") is c10d.GroupMember.NON_GROUP_MEMBER
    assert isinstance(dist.new_group([4, 5]), dist.ProcessGroup)
    assert splits == [([[0, 1]], None, "cuda:nccl2"), ([[4, 5]], None, None)]


def test_groups_over_gloo_are_made_unbound_and_not_split(fake: Callable[[int], Splits]) -> None:
    splits = fake(0)
    default = c10d._get_default_group()
    default.bound_device_id = torch.device("cuda", 0)
    seen: list[Any] = []
    routing.splits.plain = lambda **given: seen.append((given["backend"], default.bound_device_id))
    dist.new_group([0, 1], backend="gloo")
    assert (seen, splits) == ([("gloo", None)], [])
    assert default.bound_device_id == torch.device("cuda", 0)
    default.bound_device_id = None


def test_a_call_that_was_not_rehearsed_is_reported(fake: Callable[[int], Splits]) -> None:
    fake(0)
    turns = iter([[0, 1], [0, 2]])
    with pytest.raises(RuntimeError, match=r"ranks \[0, 2\] was asked for where \[0, 1\] was rehearsed"):
        routing.planned(lambda: dist.new_group(next(turns)), lambda: None)
    assert routing.splits.expected == []


def test_a_partition_has_one_setting_and_every_rank_once() -> None:
    calls = [
        GroupCall((0, 1), ("pp",)), GroupCall((0,), ("embedding",)), GroupCall((2, 3), ("pp",)), GroupCall((2,), ("embedding",)),
        GroupCall((0, 1), ("pp",)), GroupCall((2, 3), ("dp",)),
    ]  # fmt: skip
    found = partitions(calls)
    assert [found.index(one) for one in found] == [0, 1, 0, 1, 4, 5]
    assert found[0].groups == [(0, 1), (2, 3)]


def test_without_the_flag_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLAGS[NCCL2], raising=False)
    before = c10d.new_group
    routing.install_routes()
    assert c10d.new_group is before


def test_what_is_in_effect_is_reported_by_the_types_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`assumed`: the type's name is that of its binding (torch/csrc/distributed/c10d/init.cpp in pytorch/pytorch#188587)."""

    class Group:
        def __init__(self, name: str) -> None:
            self.backends = {
                torch.device("cpu"): object(),
                **({torch.device("cuda"): type(name, (), {})()} if name else {}),
            }
            self._device_types = list(self.backends)
            self._get_backend = self.backends.__getitem__

    groups = [Group("ProcessGroupNCCL2"), Group("ProcessGroupNCCL"), Group("")]
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups), default_pg=groups[0]))
    reported = routing.routing_status(NCCL2)
    assert (reported["effective"], reported["groups"], reported["groups_effective"]) == (True, 2, 1)
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups), default_pg=groups[1]))
    reported = routing.routing_status(NCCL2)
    assert reported["effective"] is False
    assert reported["reason"] == "AttributeError: module 'torch.distributed' has no attribute 'ProcessGroupNCCL2'"
