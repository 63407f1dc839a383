"""Runs of the sync lab for all tests of a module, on ranks that stay alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import kit
from tests.holdings import nothing_added

SMALL = {"layers": 2, "cycles": 2, "sweep": False, "deadline_s": 10}


@pytest.fixture(scope="module", autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put runs in a folder of the module; nothing may be left behind."""
    folder = tmp_path_factory.mktemp("sync")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        with nothing_added():
            yield


@pytest.fixture(scope="module")
def sync(_places: None) -> Iterator[Callable[..., kit.Run]]:
    """sync(**config) returns a finished small run, the same one for equal arguments. Runs with equally many ranks share a World."""
    made: dict[str, kit.Run] = {}
    worlds: dict[int, kit.World] = {}

    def run(fault: str | None = None, **config: object) -> kit.Run:
        given = {**SMALL, **config}
        key = repr((fault, sorted(given.items())))
        if key not in made:
            shared = {"world": on(int(str(given.get("ranks", 5))))} if given.get("worlds") != "two" else {}
            made[key] = kit.run("sync", fault=fault, **shared, **given)
        return made[key]

    def on(ranks: int) -> kit.World:
        if ranks not in worlds:
            for other in worlds.values():
                other.close()
            worlds.clear()
            worlds[ranks] = kit.World(ranks, env={"OMP_NUM_THREADS": "1"}, preload=("megatron.core",))
        return worlds[ranks]

    yield run
    for world in worlds.values():
        world.close()
