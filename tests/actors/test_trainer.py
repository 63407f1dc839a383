"""A trainer's rank without its job: the calls that every rank must make alike."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from kit.actors.samples import Key
from kit.actors.trainer import TrainerActor
from kit.megatron import split
from kit.stream.judge.backed import TO


class Counting(TrainerActor):
    """Counts the collectives of a sync."""

    def __init__(self, *, first: bool) -> None:
        self.first = first
        self.version = 0
        self.calls: list[str] = []
        self.sender: Any = types.SimpleNamespace(sync=self.send)
        self.ctx: Any = types.SimpleNamespace(roles={})

    def keep(self, version: int) -> None:
        self.version = version
        self.calls.append("keep")

    def gather(self) -> dict[Any, Any]:
        self.calls.append("gather")
        return {}

    def send(self, *_: object) -> types.SimpleNamespace:
        self.gather()
        return types.SimpleNamespace(bytes=0)


def test_a_version_that_is_sent_again_is_the_same_collectives_on_every_rank() -> None:
    first, other = Counting(first=True), Counting(first=False)
    for version in (0, 1, 1, 2):  # version 1 again: for a replica that joined, or after one died
        first.sync(version, "keep", [])
        other.sync(version, "keep", [])
    assert first.calls == other.calls == ["gather", "keep", "gather", "gather", "keep", "gather"]


def test_every_command_to_the_trainer_is_a_call_of_its_ranks() -> None:
    assert [name for name, port in TO.items() if port == "trainer" and not hasattr(TrainerActor, name)] == []


def test_samples_of_a_group_that_is_not_trained_are_dropped() -> None:
    trainer, dropped = Counting(first=True), []
    trainer.previous, trainer.reference = ({Key(group, 0): torch.zeros(1) for group in (1, 2)} for _ in range(2))
    trainer.inbox = types.SimpleNamespace(clear=lambda groups: dropped.append(groups) or 1)  # type: ignore[assignment]
    assert trainer.discard(2) == 1
    assert dropped == [{2}]
    assert trainer.previous.keys() == trainer.reference.keys() == {Key(1, 0)}
    assert trainer.clear(step=0, groups=[1]) == 1  # another core may clear the groups of all updates at once
    assert not trainer.previous.keys() | trainer.reference.keys()


class Doubles:
    """A trainer of somebody's own, which writes into what it gets, as it may."""

    def microbatch(self, data: dict[str, torch.Tensor]) -> None:
        data["advantages"] *= 2


def test_samples_are_noted_as_they_were_given_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, noted = Counting(first=True), []
    batch = {name: torch.ones(2, 3) for name in ("token_mask", "advantages")} | {"sample_mask": torch.ones(2)}
    trainer.step = Doubles()  # type: ignore[assignment]
    trainer.config = types.SimpleNamespace(train_pace_ms=0.0, group=2)  # type: ignore[assignment]
    trainer.inbox = types.SimpleNamespace(take=lambda _: [])  # type: ignore[assignment]
    trainer.on_samples = lambda _, given: noted.append(given["advantages"].sum().item())
    monkeypatch.setattr(trainer, "need", lambda *_: None)
    monkeypatch.setattr(trainer, "batch_of", lambda _: batch)
    monkeypatch.setattr(split, "rank_share", lambda given: given)
    trainer.microbatch(0, 0, [0])
    assert noted == [6.0]
