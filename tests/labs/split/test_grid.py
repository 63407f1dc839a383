"""The split lab over layouts, masks, switches and batchings: a few configs that cover every pair; each test run takes some of them."""

import itertools
from collections import Counter
from typing import Any

import pytest

import kit
from kit.labs.discover import configure
from kit.labs.split.lab import LAB
from kit.world import World

Config = dict[str, Any]
# Layouts are small because each one is cut in four ways at two levels, and each way runs separately.
COMMON: Config = {
    "size": "tiny",
    "layers": 2,
    "length": 24,
    "micro_batch": 1,
    "microbatches": 6,
    "steps": 2,
    "chunks": [1, 2, 5, 0],
    "level": "both",
}
MEGATRON: dict[str, Config] = {
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "ep2": {"ranks": 2, "ep": 2, "experts": 4, "reduce": "mean", "micro_batch": 2},  # rows of different lengths
    "tp2 pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "dp4": {"ranks": 4},
}
FSDP2: dict[str, Config] = {
    "dp2": {"ranks": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "dp4": {"ranks": 4},
    "cp2 dp2": {"ranks": 4, "cp": 2},
}
BATCHING = {"fixed": {}, "dynamic": {"token_budget": 48}, "packed": {"token_budget": 48}}
SWITCHES = ("overlap", "distributed optimizer")


def every_config() -> dict[str, Config]:
    """Every config by its name, those with the fewest ranks first."""
    found = {}
    for layout, config in MEGATRON.items():
        for masks, overlap, sharded in itertools.product(masks_of(config), (False, True), (False, True)):
            words = [word for word, on in zip(SWITCHES, (overlap, sharded), strict=True) if on]
            switches = {"overlap_grad_reduce": overlap, "distributed_optimizer": sharded}
            found[", ".join([f"megatron {layout}", masks, *words])] = {**config, "masks": masks, **switches}
    for layout, config in FSDP2.items():
        for masks, (batching, budget) in itertools.product(masks_of(config), BATCHING.items()):
            name = f"fsdp2 {layout}, {masks}, {batching}"
            found[name] = {**config, "backend": "fsdp2", "masks": masks, "batching": batching, **budget}
    return dict(sorted(found.items(), key=lambda each: each[1]["ranks"]))


def masks_of(config: Config) -> tuple[str, ...]:
    data_ranks = config["ranks"] // (config.get("tp", 1) * config.get("pp", 1) * config.get("cp", 1))
    return ("ragged", "full", "empty-rank") if data_ranks > 1 else ("ragged", "full")


def covering() -> list[str]:
    """A small set of configs, chosen greedily, in which every layout meets every mask, switch and batching."""
    left = {pair for name in GRID for pair in pairs(name)}
    chosen: list[str] = []
    while left:
        chosen.append(max(GRID, key=lambda name: len(pairs(name) & left)))
        left -= pairs(chosen[-1])
    return [name for name in GRID if name in chosen]


def pairs(name: str) -> set[tuple[str, str]]:
    """The pairs of a config's layout with each of its other choices; switches that are off count too."""
    layout, *words = name.split(", ")
    words += [f"no {switch}" for switch in SWITCHES if switch not in words]
    return {(layout, word) for word in words}


GRID = every_config()
PART = covering()


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    with World(request.param, logs=tmp_path_factory.mktemp("logs"), preload=("megatron.core",)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.drawn(1, of="grid")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "name"), [(GRID[name]["ranks"], name) for name in PART], indirect=["world"])
def test_no_check_fails_on_the_grid(world, name, tmp_path):
    config = {**COMMON, **GRID[name], "device": world.device, "timeout_s": 300.0}
    verdict = kit.run("split", out=tmp_path / "run", world=world, **config).verdict()
    assert verdict.passed, verdict
    silent = {row.check for row in verdict if row.passed is None}
    unasked = {"backends_agree", "oracle"} if "ep2" in name else {"backends_agree"}
    regrouped = (
        {"means_averaged", "one_pass"} if GRID[name].get("batching", "fixed") != "fixed" else set()
    )  # over other microbatches than the plain step's
    assert silent == (regrouped if "fsdp2" in name else unasked)


def test_the_part_that_is_run_here_has_every_pair():
    assert set().union(*map(pairs, PART)) == set().union(*map(pairs, GRID))
    assert len(PART) < len(GRID) / 2


def test_the_grid_is_every_combination():
    assert len(GRID) == 3 * 3 * 4 + 3 * 2 * 4 + 3 * 3 * 3 + 2 * 3
    configs = [configure(LAB, {**COMMON, **config}, None) for config in GRID.values()]
    assert len(set(configs)) == len(GRID)
    assert {config.chunks for config in configs} == {(1, 2, 5, 0)}
    assert {config.levels for config in configs} == {("tokens", "sequences")}
    megatron = [config for config in configs if config.backend == "megatron"]
    switches = Counter((config.overlap_grad_reduce, config.distributed_optimizer) for config in megatron)
    assert switches == dict.fromkeys(itertools.product((False, True), repeat=2), 15)
