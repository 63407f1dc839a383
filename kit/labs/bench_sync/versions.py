"""The part of the bench of weight transfer about deltas: a trainer in bfloat16 sends every version by changed words, and whole."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterator
from typing import Any

from kit.labs.bench import Bench, Samples, ratios
from kit.machine import KIB
from kit.train.options import DEFAULTS

DELTAS = "kit.labs.bench_sync.ranks.deltas"
RATES = (DEFAULTS.lr, 3e-6)  # the kit's, and one that is usual for reinforcement learning


def changed_words(bench: Bench) -> Iterator[Samples]:
    """Bytes and time of both ways at two learning rates."""
    for lr in RATES:
        asked: dict[str, Any] = {"size": bench.config.delta_model, "lr": lr, "rounds": bench.config.rounds}
        with bench.world(
            2, device="cpu", env={"OMP_NUM_THREADS": "1"}, preload=("megatron.core",), timeout_s=1800
        ) as world:
            sent, arrived = world.call(f"{DELTAS}:delta_syncs", meeting=f"bench-{secrets.token_hex(8)}", **asked)
        turns = [{**one, **other} for one, other in zip(sent, arrived, strict=True)]
        columns = {name: [turn[name] for turn in turns] for name in turns[0]}
        title, ids = f"delta=word, {bench.config.delta_model} in bfloat16 at lr={lr:g}", {"lr": f"{lr:g}"}
        share = [100 * part for part in columns["share"]]
        yield Samples(what=f"{title}: share of changed words", values=share, metric="share", unit="%", ids=ids)
        note = f"{statistics.median(columns['bytes']) / KIB:.0f} KiB, {statistics.median(columns['needed']) / KIB:.0f} needed"
        words = f"{title}: bytes over what the changed words need"
        yield ratios("delta_over_needed", words, columns["bytes"], columns["needed"], note=note, ids=ids)
        yield Samples(what=f"{title}: a sync", values=columns["word"], ids=ids)
        yield Samples(what=f"{title}: a whole sync of the same weights", values=columns["off"], ids=ids)
        yield ratios("delta_over_whole", f"{title}: time over a whole sync", columns["word"], columns["off"], ids=ids)
