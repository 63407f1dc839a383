"""Groups under a default group that is bound to a GPU, in this process: the device is only a name here, without a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from kit.megatron import groups


@pytest.fixture
def default() -> Iterator[Any]:
    dist.init_process_group("cpu:gloo", store=HashStore(), rank=0, world_size=1)
    groups.install()
    world: Any = dist.distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    yield world
    world.bound_device_id = None
    groups.uninstall()
    dist.destroy_process_group()


@pytest.mark.parametrize("how", [{"backend": "gloo"}, {"backend": dist.Backend.GLOO}, {"backend": "cpu:gloo"}])
def test_a_group_over_gloo_is_not_split_off_the_default_groups_communicator(default: Any, how: dict[str, Any]) -> None:
    made: Any = dist.new_group([0], **how)
    assert made.bound_device_id is None
    assert default.bound_device_id == torch.device("cuda", 0)
    dist.barrier(group=made)


def test_any_other_group_is_torchs_own_affair(default: Any) -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
        dist.new_group([0])
    assert default.bound_device_id == torch.device("cuda", 0)
