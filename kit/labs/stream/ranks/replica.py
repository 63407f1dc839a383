"""A replica of the lab `stream`: that of a loop. It also hashes the weights that it serves, where tokens are recomputed.

With `serve=` its model is an engine, which writes the answers itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kit.actors.common import DIGEST
from kit.actors.replica import ReplicaActor
from kit.engines.answers import ServedModel, WritingEngine, engine_noise
from kit.engines.hosted import ENGINES, EngineContext, LoadedModel
from kit.labs import rankside
from kit.labs.served import vllm_python
from kit.megatron import model
from kit.sync.buckets import Cut
from kit.target import load


class Replica(ReplicaActor):
    noise = 0.0  # of an engine's log-probabilities at rest

    def reset(self) -> float:  # type: ignore[override]
        super().reset()
        return self.noise

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        answer = super().sync(version, at_sync, replicas)
        if self.config.runs("verify"):
            table = self.digests(DIGEST)
            if self.first:
                self.ctx.record("served", None, text=rankside.digest_of_hashes(table), version=version)
        return answer


class EngineReplica(Replica):
    """A rank with a whole engine."""

    def make_model(self) -> None:
        settings, config = self.config, self.config.replica_model
        model.initialise(config)
        ctx = EngineContext(
            geometry=config.geometry,
            dtype=model.DTYPES[config.dtype],
            device=self.ctx.device,
            weights=self.base,
            timeout_s=settings.deadline_s,
            python=vllm_python(settings),
            config=settings,
            writes=True,
        )
        self.own = load(ENGINES.get(settings.serve, settings.serve))(ctx)
        self.scope.callback(getattr(self.own, "close", lambda: None))
        self.model = LoadedModel(self.own, settings.serve, ctx.device)
        if settings.measures_noise:
            self.noise = engine_noise(
                self.model, config.geometry, self.base, temperature=settings.temperature, seed=settings.seed
            )

    def load_base(self) -> None:
        for name in [*self.engine.in_flight] if hasattr(self, "engine") else ():
            self.engine.cancel(name)
        self.model.begin()
        for name, tensor in self.base.items():
            self.model.load(name, tensor)
        self.model.finalize()
        self.engine = WritingEngine(ServedModel(self.model, self.config.replica_model), self.own, self.config.serve)

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        self.own.pause(at_sync)
        try:
            return super().sync(version, at_sync, replicas)
        finally:
            self.own.resume()

    # -- the receiver's host --------------------------------------------------------------------------------------------

    def weights(self) -> Cut:
        return self.model.weights(self.model.destinations())

    def wake(self) -> None:
        if self.model.asleep:
            self.model.wake()

    def sleep(self) -> None:
        if not self.model.asleep:
            self.model.sleep()

    def finalize(self) -> None:
        self.model.finalize()

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.full_tensors()
