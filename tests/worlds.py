"""A World for all tests of a module, on the CPU; its ranks can import the tests' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.world import World

ROOT = Path(__file__).resolve().parent.parent


def world_of(ranks: int) -> Callable[..., Iterator[World]]:
    """The fixture `world` of a module: `world = world_of(2)`."""

    @pytest.fixture(scope="module")
    def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with World(ranks, device="cpu", env=environment, logs=tmp_path_factory.mktemp("logs")) as made:
            yield made

    return world
