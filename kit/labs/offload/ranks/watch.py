"""What the offload lab sees of groups, tensors and random numbers around a release, whatever code releases them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kit.measure.observers import births, tensors
from kit.megatron import observe


@dataclass(frozen=True, slots=True)
class After:
    """What is not as it was before a release, in words."""

    moved: list[str]
    options: list[str]
    stale: list[str]


class Watch:
    """One job's groups, tensors and generators, before each release and after each reload. It keeps no group alive, and no tensor
    across a release."""

    def __init__(self, born: births.Births) -> None:
        self.born = born
        self.old: list[observe.Old] = []
        self.standing = False
        self.mute = False  # a group of Megatron's did not talk: training on would wait for it
        self.hashed = 0
        self._ranks: dict[str, list[int]] = {}
        self._seen = observe.Seen()
        self._prints: tuple[dict[str, tensors.Print], dict[str, tensors.Print]] = ({}, {})
        self._random: dict[str, str] = {}
        self._world: weakref.ref[Any] | None = None

    def first_talk(self) -> list[str]:
        """Over every group of the new job; which ranks answer now is what must answer ever after."""
        self._ranks, wrong = observe.talk()
        self.standing = bool(observe.standing())
        return wrong

    def before(self, state: tensors.State, *, hashed: bool, **roots: Any) -> None:
        self._prints = (state.prints() if hashed else {}, {})
        self._seen = observe.look(self._whole(), **roots)
        self._seen.ranks = self._ranks
        self.old = observe.remember()
        self._world = weakref.ref(births.world())
        self._random = observe.random_state()

    def alive(self) -> list[str]:
        """Groups that were made since the job was begun and that something still holds."""
        return [str(group.group_desc) for group in self._whole()]

    def _whole(self) -> list[Any]:
        """The groups of the job that are there, without the backends inside of them."""
        return [group for group in self.born.alive() if type(group) is dist.ProcessGroup]

    def usable(self, *, but_gloo: bool) -> list[str]:
        """Old groups over which a collective would still run. The right answer is an error that names the group."""
        return observe.usable(self.old, but_gloo=but_gloo)

    def world_left(self) -> bool:
        """Whether the default group of before is still there."""
        return dist.is_initialized() or (self._world is not None and self._world() is not None)

    def talk(self) -> tuple[int, list[str]]:
        """How many groups answered, and what is wrong: a collective that failed, or ranks that are not those of before."""
        answered, wrong = observe.talk()
        self.mute = bool(wrong)
        if not wrong:
            wrong = [
                f"{name}: {f'ranks {answered[name]}' if name in answered else 'no ranks'} answer in place of {ranks}"
                for name, ranks in self._ranks.items()
                if answered.get(name) != ranks
            ]
        if name := births.taken_name():
            wrong.append(f"the next group that anybody makes would be named {name!r}, as another one is")
        self._answered = answered
        return len(answered), wrong

    def random_moved(self) -> list[str]:
        """Generators that are not where they were before the release."""
        now = observe.random_state()
        return [name for name in {**self._random, **now} if self._random.get(name) != now.get(name)]

    def after(self, state: tensors.State, *, hashed: bool, **roots: Any) -> After:
        now = observe.look(self._whole(), **roots)
        now.ranks = self._answered
        if hashed:
            self._prints = (self._prints[0], state.prints())
            self.hashed = len(self._prints[1])
        return After(observe.moved(self._seen, now), observe.changed(self._seen, now), observe.stale(self._seen, now))

    def tensors(self, *, zeroed: bool) -> list[tensors.Difference]:
        """Tensors that are not as they were. `zeroed`: gradients may come back as zeros."""
        return tensors.differences(*self._prints, zeroed=zeroed)

    def forget(self) -> None:
        """Let go of what was kept to compare."""
        self._prints = ({}, {})


def any_rank(value: bool) -> bool:
    """Whether it is so on any rank; over the default group."""
    flag = torch.tensor([int(value)])
    if "nccl" in dist.get_backend():
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def differing(one: Any, other: Any) -> int:
    """How many entries are not exactly the same, those that only one has included. NaN is never the same."""
    if isinstance(one, list):
        return sum(bool(a != b) for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
    return sum(bool(one.get(key) != other.get(key)) for key in {*one, *other})


def departs(log: list[dict[str, float]], control: list[dict[str, float]]) -> tuple[int, str] | None:
    """The first step, counted from 1, at which training is not what it is without a release, and how."""
    for number, (mine, theirs) in enumerate(zip(log, control, strict=False), 1):
        if mine != theirs:
            names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            return number, ", ".join(f"{name} {mine.get(name)} vs {theirs.get(name)}" for name in names)
    if len(log) != len(control):
        return min(len(log), len(control)) + 1, f"{len(log)} steps vs {len(control)}"
    return None
