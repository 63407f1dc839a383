"""The split lab over the whole grid: each layout, reduction, optimizer, mask and batching, cut in every way at both levels.

A World of each size is shared by all configs that want it; one that breaks costs its ranks, which are started anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.bench.rows import Row, first_line, progress, row
from kit.bench.session import Session
from kit.errors import KitError
from kit.world import World

Config = dict[str, Any]
# Every layout is small: it is cut in four ways at two levels, and each way is a run of its own.
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
    "ep2": {"ranks": 2, "ep": 2, "experts": 4, "reduce": "mean"},
    "tp2 pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "dp4": {"ranks": 4},
}
FSDP2: dict[str, Config] = {"dp2": {"ranks": 2}, "dp4": {"ranks": 4}}
BATCHING = {"fixed": {}, "dynamic": {"token_budget": 48}, "packed": {"token_budget": 48}}
SWITCHES = ("overlap", "distributed optimizer")
FEW = ("megatron dp2, ragged", "fsdp2 dp2, ragged, packed")
GRID_S = 300.0


def every_config() -> dict[str, Config]:
    """Every config by its name, those of fewer ranks first."""
    found = {}
    for layout, config in MEGATRON.items():
        for masks in masks_of(config):
            for overlap in (False, True):
                for sharded in (False, True):
                    words = [word for word, on in zip(SWITCHES, (overlap, sharded), strict=True) if on]
                    found[", ".join([f"megatron {layout}", masks, *words])] = {
                        **config,
                        "masks": masks,
                        "overlap_grad_reduce": overlap,
                        "distributed_optimizer": sharded,
                    }
    for layout, config in FSDP2.items():
        for masks in masks_of(config):
            for batching, budget in BATCHING.items():
                name = f"fsdp2 {layout}, {masks}, {batching}"
                found[name] = {**config, "backend": "fsdp2", "masks": masks, "batching": batching, **budget}
    return dict(sorted(found.items(), key=lambda each: each[1]["ranks"]))


def masks_of(config: Config) -> tuple[str, ...]:
    data_ranks = config["ranks"] // (config.get("tp", 1) * config.get("pp", 1))
    return ("ragged", "full", "empty-rank") if data_ranks > 1 else ("ragged", "full")


def on_grid(session: Session, *, ranks: int, wanted: Mapping[str, Config]) -> Iterator[Row]:
    """Every config that is for so many ranks, on one World."""
    here = {name: config for name, config in wanted.items() if config["ranks"] == ranks}
    if not here:
        return
    with session.world(ranks, preload=("megatron.core",), timeout_s=GRID_S) as world:
        for number, (name, config) in enumerate(here.items(), start=1):
            progress(f"grid on {ranks} ranks, {number} of {len(here)}: {name}")
            yield judged(session, name, config, world, session.logs / f"grid{ranks}-{number}")


def judged(session: Session, name: str, config: Config, world: World, out: Path) -> Row:
    """One config on ranks that are there: how many checks failed, and its largest errors."""
    what = f"grid: {name}"
    try:
        run = session.lab("split", out, world=world, **{**COMMON, **config}, timeout_s=GRID_S)
    except KitError as error:
        world.restart()
        return Row(what=what, unit="failed", limit=0.0, note=f"broke: {first_line(error)}")
    verdict = run.verdict()
    failed = [one.check for one in verdict.failed if "/" not in one.check]
    silent = sorted({one.check for one in verdict if one.passed is None})

    def worst(check: str) -> float:
        return max((one.measured for one in verdict if one.check == check and one.measured is not None), default=0.0)

    passed = sum(one.passed is True for one in verdict)
    words = [f"{passed} passed", *(f"FAILED {check} {worst(check):.3g}" for check in failed)]
    words.append(f"gradients {worst('grad_parity'):.1e} off, metrics {worst('metric_parity'):.1e}")
    words += [f"not measured: {', '.join(silent)}"] * bool(silent)
    return row(what, [float(len(failed))], unit="failed", limit=0.0, note="; ".join(words))
