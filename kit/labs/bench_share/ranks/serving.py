"""Rows of a replica with several adapters, and rows of its base. Rank side."""

from __future__ import annotations

import time

from kit.megatron import lora, ownership, shards
from kit.megatron.config import LoraOptions, ModelConfig
from kit.megatron.serve import NO_ADAPTER, Engine, PromptRequest, ServingModel

OPTIONS = LoraOptions(rank=4, alpha=8.0, targets="all")  # as the lab `share` has them by default
TOKENS = 4


def serve(*, size: str, adapters: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a row for each adapter, all in flight at once, and of as many rows of the base alone. In turns."""
    config = ModelConfig(size=size)
    with ownership.as_found():
        replica = ServingModel(config)
        replica.adapt(OPTIONS, adapters)
        for seed, network in enumerate(replica.adapters):
            shards.load_full([network], lora.initial_adapter(config.geometry, OPTIONS, seed))
        engine = Engine(replica, prefix_bytes=0)  # each row computes its prompt
        rows_of = {"base": [NO_ADAPTER] * adapters, "adapters": [*range(adapters)]}
        seconds: dict[str, list[float]] = {name: [] for name in rows_of}
        for turn in range(rounds + 1):  # the first one warms up
            for name, rows in [*rows_of.items()][:: -1 if turn % 2 else 1]:
                took = answer(engine, rows, turn)
                seconds[name] += [took] if turn else []
    return seconds


def answer(engine: Engine, rows: list[int], turn: int) -> float:
    begun = time.perf_counter()
    for number, adapter in enumerate(rows):
        about = {"sample": number, "seed": turn, "end": 0, "max_tokens": TOKENS, "min_tokens": TOKENS}
        engine.start(PromptRequest(id=str(number), prompt=(1, 2, 3, 4), adapter=adapter, **about))
    while engine.in_flight:
        engine.decode(TOKENS)
    return time.perf_counter() - begun
