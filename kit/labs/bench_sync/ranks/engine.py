"""The part of the bench of weight transfer whose receiver is a real engine: rank 0 sends, rank 1 hosts vLLM.

A sync is timed from the live weights of the sender until the engine has finished its update and dropped its prefix cache; its own load
takes tensors that lie in the memory of its process. After every sync the engine's tensors are compared with the sender's, outside of the
time. The sender's weights change before each sync. On both sides vLLM's linear layers keep their weights, as everywhere in the kit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.hosted import EngineContext, LoadedModel
from kit.engines.vllm import VllmModel
from kit.errors import KitError
from kit.labs.bench_sync.lab import LOADED, SYNCED
from kit.labs.bench_sync.ranks.ways import SENDER, TIMEOUT_S, Laid, Ways, seconds_together
from kit.measure.turns import turn_by_turn
from kit.megatron.config import Geometry
from kit.sync.hashes import algorithms, digest
from kit.train.plain import initial_weights

# Widths of a model of 0.5 to 1 billion parameters, and a vocabulary that leaves most bytes in the layers.
WIDTHS: dict[str, Any] = {"hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 4096, "vocab": 512, "seq": 64}
STEP = 1.0 + 2**-10  # by which all weights change before a sync


class EngineWays(Ways):
    """A rank's part: the weights on the sender, the engine on the receiver."""

    def __init__(self, geometry: Geometry, meeting: str, python: str) -> None:
        super().__init__({"count": 0, "size": 0}, 1, meeting)
        weights = {name: tensor.detach() for name, tensor in initial_weights(geometry, 1).items()}
        self.tensors = {(name, 0): tensor for name, tensor in weights.items()}
        self.total = sum(tensor.nbytes for tensor in weights.values())
        self.model: LoadedModel | None = None
        if self.rank:
            ctx = EngineContext(
                geometry=geometry,
                dtype=torch.float32,
                device=torch.device("cpu"),
                weights=weights,
                timeout_s=TIMEOUT_S,
                python=python,
                config=None,
            )
            self.engine = VllmModel(ctx)
            self.engine.call("keep")
            self.model = LoadedModel(self.engine, "vllm", ctx.device)

    def laid(self, size: int) -> Laid:
        """The engine's weights are bound anew in every version."""
        laid = super().laid(size)
        if self.model is None:
            return laid
        weights: Any = self.model.weights(self.model.destinations()).bind(laid.layout)
        return laid._replace(bound=weights)

    def work(self, name: str) -> Callable[[], None]:
        end = SENDER if self.rank else "receiver 1"
        bring = self.way("shm") if name == SYNCED else lambda: None

        def run() -> None:
            bring()
            if self.model is None:
                self.links[end].send({"kind": name})
                self.links[end].expect("loaded")
                return
            self.links[end].expect(name)
            if name == LOADED:
                self.engine.call("reload_kept")
            else:
                self.model.finalize()
            self.links[end].send({"kind": "loaded"})

        return run

    def digests(self) -> dict[str, str]:
        own = (
            self.model.full_tensors() if self.model else ((name, tensor) for (name, _), tensor in self.tensors.items())
        )
        return {name: digest(tensor, algorithms()[0]) for name, tensor in own}

    def close(self) -> None:
        super().close()
        if self.rank:
            self.engine.close()


def engine_seconds(*, layers: int, meeting: str, python: str, rounds: int) -> dict[str, Any]:
    """Seconds of a sync and of the engine's own load, turn by turn, as the sender saw them."""
    end = EngineWays(Geometry(layers=layers, **WIDTHS), meeting, python)
    works = {name: end.work(name) for name in (SYNCED, LOADED)}
    try:
        seconds = turn_by_turn([*works], rounds, lambda name, _: engine_turn(end, name, works[name]))
    finally:
        end.close()
    return {"bytes": end.total, "seconds": seconds}


def engine_turn(end: EngineWays, name: str, work: Callable[[], None]) -> float:
    for tensor in end.tensors.values() if name == SYNCED and not end.rank else ():
        tensor.mul_(STEP)
    taken = seconds_together(end, work)
    if name == SYNCED:
        tables: list[Any] = [None, None]
        dist.all_gather_object(tables, end.digests())
        if differ := [key for key in tables[0] if tables[0][key] != tables[1].get(key)]:
            raise KitError(
                f"{len(differ)} tensors in the engine differ from the sender's after a sync; first: {differ[0]}"
            )
    return taken
