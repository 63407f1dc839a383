"""Seeded schedules: answers in any order, replicas that come and go, and a failure at every command. None loses a permit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kit.loop.messages import Command, Event
from kit.stream.core import Controller
from kit.stream.settings import SAMPLERS, StreamSettings
from tests.loop.replaying import replay
from tests.stream.chaos import Chaos, Deadlock, run

SMALL = {"groups": 2, "group": 2, "train_global_batch_size": 4, "places": 4, "slots": 3, "steps": 2, "replicas": 2}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"sampler": "strict", "window": 0, "reference": "recomputed"},
    {"sampler": "in-order", "train_global_batch_size": 2},
    {"sampler": "in-order", "step_retries": 2, "on_dead_replica": "go-on"},
    {"sampler": "weight-fifo", "on_failed": "replace", "min_groups": 2},
    {"sampler": "windowed", "at_sync": "abort", "step_retries": 1, "places": 3},
    {"sampler": "ready-first", "on_failed": "shrink", "at_sync": "drain"},
    {"sampler": "capacity", "filter": True, "previous": "recorded"},
    {"sampler": "in-order", "on_failed": "replace", "filter": True, "at_sync": "abort", "on_dead_replica": "go-on"},
)


def settings(**more: Any) -> StreamSettings:
    return StreamSettings(**{**SMALL, **more})


def chaos_of(found: StreamSettings, seed: int, fail_at: int | None) -> Chaos:
    churn = 0.03 if found.on_dead_replica == "go-on" else 0.0
    prompts = (40, 40, 6, 4)[seed % 4]
    crash = 0.15 if found.on_failed != "stop" and seed % 2 else 0.0
    return Chaos(seed, prompts, fail_at=fail_at, churn=churn, flat=0.3 if found.filter else 0.1, empty=0.1, crash=crash)


def fail_everywhere(variant: dict[str, Any], seed: int) -> int:
    """Run one schedule without a failure, then one for each of its commands, with a failure at that command."""
    found = settings(**variant)
    plain = chaos_of(found, seed, None)
    run(found, plain)
    for number in range(plain.sent):
        try:
            run(found, chaos_of(found, seed, number))
        except Exception as error:
            raise AssertionError(f"{variant}, seed {seed}, failure at command {number}: {error!r}") from error
    return plain.sent + 1


@pytest.mark.drawn(2, of="failures")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: "-".join(map(str, one.values())))
def test_a_failure_at_every_command_loses_no_permit(variant: dict[str, Any]) -> None:
    assert sum(fail_everywhere(variant, seed) for seed in range(3)) >= 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_schedules_lose_no_permit() -> None:
    total, seed = 0, 100
    while total < 10_000:
        total += sum(fail_everywhere(variant, seed) for variant in VARIANTS)
        seed += 1


def drawn_settings(seed: int) -> StreamSettings:
    """Return drawn settings that are not refused."""
    draw = random.Random(seed)
    group, groups = draw.choice([2, 3]), draw.choice([1, 2, 4])
    sampler = draw.choice(sorted(SAMPLERS))
    window = 0 if sampler == "strict" else draw.choice([0, 1, 2])
    return StreamSettings(
        groups=groups,
        group=group,
        min_groups=draw.randint(1, groups),
        train_global_batch_size=group * draw.choice([one for one in (1, 2, 4) if groups % one == 0]),
        window=window,
        sampler=sampler,
        places=groups * (window + 1) + draw.choice([0, 0, 3]),
        slots=draw.randint(1, 9),
        steps=draw.randint(1, 4),
        replicas=draw.randint(1, 3),
        at_sync=draw.choice(["keep", "recompute", "abort", "drain"]),
        on_failed=draw.choice(["stop", "replace", "shrink"]),
        on_dead_replica=draw.choice(["stop", "go-on"]),
        step_retries=draw.choice([0, 0, 2]),
        filter=draw.choice([False, True]),
        previous=draw.choice(["recomputed", "recorded", "off"]),
        reference=draw.choice(["recomputed", "off"]),
    )


def check_drawn(seed: int) -> None:
    """Run a schedule with drawn settings, churn and perhaps a failure; replaying its events gives the same commands."""
    found = drawn_settings(seed)
    chaos = chaos_of(found, seed, random.Random(seed).choice([None, random.Random(seed).randint(0, 200)]))
    try:
        done = run(found, chaos)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {found}: {error!r}") from error
    assert replay(Controller(found), done.events)[1] == done.commands


@pytest.mark.parametrize("variant", VARIANTS[:4], ids=lambda one: "-".join(map(str, one.values())))
def test_other_names_for_groups_pipelines_and_replicas_change_nothing_else(variant: dict[str, Any]) -> None:
    found = settings(**variant)
    done = run(found, chaos_of(found, 1, None))
    shift = {"group": 1000, "by": 1000}

    def renamed(ids: dict[str, Any]) -> dict[str, Any]:
        moved = {name: value + shift[name] if name in shift else value for name, value in ids.items()}
        if "groups" in ids and isinstance(ids["groups"], tuple):
            moved["groups"] = tuple(number + 1000 for number in ids["groups"])
        return moved

    events = [Event(one.name, "b", **renamed(dict(one.ids))) for one in done.events]
    reported = [Command(one.name, one.to, "b", **renamed(dict(one.ids))) for one in done.commands]
    reported = [restated(new, old) for new, old in zip(reported, done.commands, strict=True)]
    assert replay(Controller(found, pipeline="b"), events)[1] == reported


def restated(new: Command, old: Command) -> Command:
    """Undo the renaming in metrics, where `groups` is a count (elsewhere a list of ids) and a sentence names groups."""
    if old.name == "metrics":
        return Command(old.name, old.to, "b", **dict(old.ids))
    return new


def test_a_deadlock_is_seen() -> None:
    class Deaf(Controller):
        def step(self, state: Any, event: Event) -> Any:
            return (state, ()) if event.name == "synced" else super().step(state, event)

    with pytest.raises(Deadlock):
        run(settings(), Chaos(0, 40), core=Deaf(settings()))
