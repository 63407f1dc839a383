"""Runs of the lab `stream`: simulated ones without ranks, and those on ranks that stay alive for all tests of a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kit
from kit.errors import KitError
from kit.labs.discover import find_fault
from kit.labs.stream.lab import LAB
from kit.results import Verdict
from kit.world.world import Worlds
from tests.holdings import holdings, wait_for
from tests.labs.simulated import run

SMALL = {"ranks": 2, "replicas": 1, "steps": 3, "groups": 2, "group": 2}


def simulated(fault: str | None = None, **config: Any) -> tuple[Verdict, str]:
    return run(LAB, find_fault(LAB, fault), **{"ranks": 1, **config})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put runs in a folder of the module; nothing may be left behind."""
    folder = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        before = holdings(os.getpid())
        yield
        wait_for(lambda: holdings(os.getpid()) == before, 5.0)
        assert holdings(os.getpid()) == before


@pytest.fixture(scope="module")
def on_ranks(places: None) -> Iterator[Callable[..., kit.Run]]:
    """on_ranks(**config) returns a finished small run on two ranks, the same one for equal arguments. Runs share their Worlds."""
    made: dict[str, kit.Run] = {}
    worlds: list[Worlds] = []

    def once(fault: str | None = None, **config: object) -> kit.Run:
        given = {**SMALL, **config}
        key = repr((fault, sorted(given.items())))
        if key not in made:
            try:
                made[key] = kit.run("stream", fault=fault, world=shared(), **given)
            except KitError:
                shared().restart()  # the next run must not meet what a broken run left
                raise
        return made[key]

    def shared() -> Worlds:
        if not worlds:
            env = {"OMP_NUM_THREADS": "1"}
            worlds.append(Worlds((1, 1), isolate=True, env=env, preload=("megatron.core",)))
        return worlds[0]

    yield once
    for world in worlds:
        world.close()
