"""The part of the bench of weight transfer with a real engine: a sync compared with the engine's own load from memory."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterator

from kit.labs.bench import KIT, Bench, Samples, ratios, unmeasured
from kit.labs.bench_sync.lab import LOADED, SYNCED
from kit.labs.served import vllm_python
from kit.machine import MIB
from kit.world.asked import python_has

RANKS = "kit.labs.bench_sync.ranks.engine"
START_S = 600.0  # for the engine, and all turns, on a busy machine


def engine_sync(bench: Bench) -> Iterator[Samples]:
    python = vllm_python(None)
    if not python or not python_has(python, "vllm"):
        yield unmeasured("vLLM as receiver", "KIT_VLLM_PYTHON names no interpreter with vLLM: make env-vllm")
        return
    asked = {"layers": bench.config.engine_layers, "rounds": bench.config.engine_rounds, "python": python}
    with bench.world(2, device="cpu", env={"OMP_NUM_THREADS": "1"}, timeout_s=START_S) as world:
        answer = world.call(f"{RANKS}:engine_seconds", meeting=f"bench-{secrets.token_hex(8)}", **asked)[0]
    title, seconds = f"vLLM as receiver, {answer['bytes'] / MIB:.0f} MiB", answer["seconds"]
    for name in (SYNCED, LOADED):
        note = f"{answer['bytes'] / statistics.median(seconds[name]) / 1e9:.2f} GB/s"
        yield Samples(what=f"{title}: {name}", values=seconds[name], who=KIT if name == SYNCED else "vllm", note=note)
    words = f"{title}: {SYNCED} over {LOADED}, time"
    yield ratios(
        "engine_sync_over_load", words, seconds[SYNCED], seconds[LOADED], note="digests equal after every sync"
    )
