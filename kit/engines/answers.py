"""Answers that an engine writes itself, with its own sampling and KV cache: the engine of a replica in the lab `stream`.

The engine gets requests and gives the next token of each. This side counts tokens, stamps each with the version whose weights it was
sampled from, and ends requests. Around a sync the engine is paused. Limits: one rank; all requests take each step together.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Protocol

import torch

from kit.engines.hosted import LoadedModel
from kit.errors import BadInput, KitError
from kit.megatron.config import Geometry, ModelConfig
from kit.megatron.serve import Answer, AtSync, Ended, Engine, Flight, PromptRequest
from kit.train.plain import from_weights

Token = tuple[str, int, float]  # of a request, with its log-probability under the distribution that it was sampled from


class Writer(Protocol):
    """What an engine has that writes answers. `step` gives the next token of every request in flight. While it is paused, no request takes
    a step: with `keep` requests go on with their KV cache, with `recompute` it is dropped and computed again by later steps, with `abort`
    they end. `pause` may be followed by other weights, then by `resume`."""

    def start(self, request: PromptRequest) -> None: ...
    def step(self) -> list[Token]: ...
    def cancel(self, name: str) -> None: ...
    def pause(self, at_sync: AtSync) -> None: ...
    def resume(self) -> None: ...


PROMPTS = 16  # of the noise at rest, from one token to the longest
NEEDED = ("start", "step", "cancel", "pause", "resume")


class ServedModel:
    """A hosted model with the part of a `ServingModel` that an `Engine` asks."""

    def __init__(self, model: LoadedModel, config: ModelConfig) -> None:
        self.model = model
        self.config = config

    @property
    def asleep(self) -> bool:
        return self.model.asleep


class WritingEngine(Engine):
    def __init__(self, replica: Any, own: Writer, target: str) -> None:
        if lacking := [call for call in NEEDED if not hasattr(own, call)]:
            raise BadInput(f"serve={target}: the object it returned has no {lacking[0]}; it needs {', '.join(NEEDED)}")
        super().__init__(replica)
        self.own = own

    def start(self, request: PromptRequest, so_far: Answer | None = None) -> None:
        if so_far is not None:
            raise BadInput(f"request {request.id} starts at its prompt: an engine does not continue an answer")
        super().start(request)
        self.own.start(request)

    def decode(self, n: int, ids: Container[str] | None = None) -> list[Answer]:
        refuse_some(self._flights, ids)
        done = []
        for _ in range(n if self._flights else 0):
            for name, token, logprob in self.own.step():
                if (flight := self._flights.get(name)) is None:
                    raise KitError(
                        f"the engine wrote a token of request {name}, but it has no such request or has ended it"
                    )
                flight.context = self.own  # has its KV
                flight.write(token, logprob, self.version)
                if ended := flight.ended:
                    done.append(self._leave(name, ended))
        return done

    def _leave(self, name: str, ended: Ended) -> Answer:
        self.own.cancel(name)
        return super()._leave(name, ended)


def refuse_some(flights: dict[str, Flight], ids: Container[str] | None) -> None:
    if ids is not None and (waiting := [name for name in flights if name not in ids]):
        raise BadInput(f"request {waiting[0]} would wait while others take a step, which an engine cannot do")


def engine_noise(
    model: LoadedModel, geometry: Geometry, weights: Mapping[str, torch.Tensor], *, temperature: float, seed: int
) -> float:
    """The largest difference between log-probabilities of the model at rest and those of a plain float64 model with the same weights, over
    all tokens that may follow some prompts. The code that writes answers takes no part."""
    plain = from_weights(geometry, weights, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for number in range(PROMPTS):
        length = 1 + (geometry.seq - 2) * number // (PROMPTS - 1)
        tokens = torch.randint(0, geometry.vocab, (1, length), generator=generator)
        with torch.no_grad():
            exact = plain(tokens)[:, -1]
        own = model.logits(tokens).cpu().double()
        if own.isnan().any():
            raise KitError("logits of the engine at rest are NaN")
        pair = [(logits / temperature).log_softmax(-1) for logits in (own, exact)]
        worst = max(worst, float((pair[0] - pair[1]).abs().max()))
    return worst
