"""What a handle says of itself, and how a module gets its globals back: no ranks are needed for these."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit.megatron import groups
from kit.megatron.handles import GroupReleased, Handle, back_to, redirect_defaults


@pytest.fixture
def handle() -> Iterator[Handle]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    assert dist.group.WORLD is not None
    yield Handle(dist.group.WORLD, ranks=[4, 6], maker="a test")
    dist.destroy_process_group()


def test_the_text_of_a_handle_says_whether_it_is_released(handle: Handle) -> None:
    living = repr(handle)
    assert "ranks [4, 6]" in living
    assert "released" not in living
    handle.kit_inner = None
    assert repr(handle) == living.replace(">", ": released, reload the groups before using it>")
    with pytest.raises(GroupReleased, match="is released: reload the groups before using it"):
        handle.size()


def test_globals_that_came_later_go_and_the_others_have_their_values_again() -> None:
    module = ModuleType("mine")
    vars(module).update(kept=[1], number=1)
    undo = back_to(module)
    module.kept.append(2)
    vars(module).update(number=2, later=3)
    undo()
    assert (module.kept, module.number, hasattr(module, "later")) == ([1], 1, False)


def test_a_group_of_one_rank_has_the_right_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "initialised", lambda: True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        (said,) = groups.talk([dist.group.WORLD])
    finally:
        dist.destroy_process_group()
    assert (said["ranks"], said["sum"], said["exact"]) == ([0], 1.0, True)


LATE = """
import functools

class Layer:
    def reduced(self, group=GROUP): ...

def wrapped(group=GROUP): ...

def plain(group=GROUP): ...

@functools.wraps(wrapped)
def outer(*args): ...

plain.__wrapped__ = plain  # a walk along wrappers must end
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_functions_that_hold_a_group_are_found_where_collections_pass_over_them(
    monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    module = ModuleType("came_late")
    vars(module)["GROUP"] = group = object()
    exec(LATE, vars(module))
    monkeypatch.setitem(sys.modules, "came_late", module)
    (gc.freeze if frozen else gc.unfreeze)()
    redirect_defaults(group, "new")
    for function in (module.Layer.reduced, module.outer.__wrapped__, module.plain):
        assert function.__defaults__ == ("new",)
