"""The catalogue: the setups in which mutants run, the mutants written by hand. Others are drawn by a
library (`mechanical.py`).

To add one: a `Mutant(setup, module, function, old=..., new=..., check=..., bug=...)` in `offload.py`, `split.py` or `sync.py`. `old` must
occur exactly once in the function's body. `check` is the check that should fail, `bug` is what a reviewer would call the mistake. A mutant
with `origin="docs"` breaks a promise of the docs; its author knew the code, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.mutants import offload, split, sync
from tests.mutants.mutant import Mutant


@dataclass(frozen=True, slots=True)
class Setup:
    """A lab with the smallest config that runs a part of the code under test and every check about it."""

    name: str
    ranks: int
    config: Mapping[str, Any]
    alone: bool = False  # slow: only for mutants that name it, not for survivors of the lab's other setups

    @property
    def lab(self) -> str:
        return self.name.partition(":")[0]

    @property
    def key(self) -> str:
        return f"{self.name} {json.dumps(self.config, sort_keys=True)}"

    def changed(self, settings: Mapping[str, Any]) -> Setup:
        ranks = settings.get("ranks", self.ranks)
        return replace(self, ranks=ranks, config={**self.config, **settings}) if settings else self


OFFLOAD = {"cycles": 2, "steps": 1, "timeout_s": 30, "meet_timeout_s": 5}
SPLIT = {"chunks": [1, 2], "microbatches": 4, "steps": 2, "dtype": "float32", "timeout_s": 120}
TOKENS = {**SPLIT, "level": "tokens"}
SYNC = {"cycles": 2, "sweep": False, "tp": 1, "replicas": 2, "timeout_s": 60, "deadline_s": 10}
APART = {**SYNC, "placement": "apart"}
PARALLEL = {"tp": 1, "distributed_optimizer": True, "overlap_grad_reduce": True}

SETUPS = {
    setup.name: setup
    for setup in (
        Setup("offload", 2, OFFLOAD),
        Setup("offload:data", 2, {**OFFLOAD, **PARALLEL, "include_world": True}),
        Setup("offload:stages", 2, {**OFFLOAD, "tp": 1, "pp": 2, "mode": "abort"}),
        Setup("offload:experts", 2, {**OFFLOAD, "tp": 1, "ep": 2, "experts": 4}),
        Setup("offload:cycles", 2, {**OFFLOAD, "cycles": 8}, alone=True),
        Setup("offload:heavy", 2, {**OFFLOAD, "size": "125m", "layers": 1, "seq": 16}, alone=True),
        Setup("split", 2, SPLIT),
        Setup("split:tensor", 2, {**TOKENS, "tp": 2}),
        Setup("split:stages", 2, {**TOKENS, "pp": 2}),
        Setup("split:overlap", 2, {**TOKENS, **PARALLEL}),
        Setup("split:experts", 2, {**SPLIT, "level": "sequences", "ep": 2, "experts": 4, "reduce": "mean"}),
        Setup("split:empty", 2, {**SPLIT, "masks": "empty-rank"}),
        *(
            Setup(f"split:{recipe}", 2, {**SPLIT, "recipe": recipe})
            for recipe in ("dapo", "cispo", "tis", "icepop", "seq-mask-tis", "on-policy", "nll")
        ),
        Setup("split:gspo", 2, {**SPLIT, "recipe": "gspo", "level": "sequences"}),
        Setup("sync", 3, SYNC),
        Setup("sync:buckets", 3, {**SYNC, "bucket_mib": 0.05}),
        Setup("sync:sweep", 3, {**SYNC, "sweep": True, "sweep_mib": 2}, alone=True),
        Setup("sync:paused", 3, {**APART, "refresh": "paused"}),
        Setup("sync:rendezvous", 3, {**SYNC, "transport": "rendezvous"}),
        Setup("sync:serialize", 3, {**SYNC, "transport": "serialize"}),
        Setup("sync:broadcast", 4, {**APART, "tp": 2, "transport": "broadcast"}),
        Setup("sync:per-tensor", 4, {**APART, "tp": 2, "transport": "per-tensor"}),
        Setup("sync:stages", 4, {**APART, "pp": 2}),
        Setup("sync:shards", 6, {**SYNC, "tp": 2, "infer_tp": 2}),
    )
}


def others(name: str) -> list[str]:
    """The names of the lab's other setups, without those that run alone."""
    lab = SETUPS[name].lab
    return [each for each, setup in SETUPS.items() if setup.lab == lab and each != name and not setup.alone]


CATALOGUE: tuple[Mutant, ...] = (*offload.MUTANTS, *split.MUTANTS, *sync.MUTANTS)
