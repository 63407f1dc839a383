"""Recompute the log-probabilities that an engine recorded, under the weights of each version.

One forward over prompt and answer yields all log-probabilities of a span, without a KV cache and without the engine's code. If a span kept
the KV of earlier versions, a hook before each core attention replaces the keys and values before the span with those that the earlier
version computed. Limits: float32 only; in bfloat16 a forward with a cache and one without differ by more than 1e-5.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kit.megatron.serve import KV, Answer, AnswerSpan, ServingModel


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """For each token of an answer, the absolute difference between the recorded and a recomputed log-probability.

    `stamped`: under the stamped version; infinite if that version is unknown. `others`: under each known version, as if the token's whole
    span had that stamp (the stamped version included). `other_cache`: under the stamped version with the opposite KV policy: recomputed if
    the span says kept, kept if it says recomputed; None in an answer's first span.
    """

    stamped: list[float]
    others: dict[int, list[float]]
    other_cache: list[float | None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A span of an answer, and the KV that it kept."""

    answer: Answer
    span: AnswerSpan
    into: Verified
    before: list[KV]


def verify(
    replica: ServingModel, answers: Iterable[Answer], versions: Sequence[int], load: Callable[[int], object]
) -> list[Verified]:
    """Compare every token of the answers with the known versions. Collective over the replica; its weights are restored at the end.

    `load(version)` puts the weights of a version into the replica.
    """
    params = [*replica.chunks[0].parameters()]
    original = [param.detach().clone() for param in params]
    try:
        with torch.no_grad():
            return _verify(replica, answers, versions, load)
    finally:
        for param, value in zip(params, original, strict=True):
            param.data.copy_(value)


def _verify(
    replica: ServingModel, answers: Iterable[Answer], versions: Sequence[int], load: Callable[[int], object]
) -> list[Verified]:
    results, jobs = [], []
    loaded = None
    for answer in answers:
        count = len(answer.tokens)
        result = Verified([math.inf] * count, {version: [0.0] * count for version in versions}, [None] * count)
        results.append(result)
        before: list[KV] = []  # KV of the previous span
        for span in answer.spans:
            job = _Job(answer, span, result, before if span.kept else [])
            jobs.append(job)
            if span.version not in versions:
                continue
            if span.version != loaded:
                load(span.version)
                loaded = span.version
            errors, used = _errors(replica, job)
            result.stamped[span.places] = errors
            result.others[span.version][span.places] = errors
            if before:
                other = dataclasses.replace(job, before=[] if span.kept else before)
                result.other_cache[span.places] = _errors(replica, other)[0]
            before = used
    for version in versions:
        load(version)
        for job in jobs:
            if job.span.version != version:
                job.into.others[version][job.span.places] = _errors(replica, job)[0]
    return results


def _errors(replica: ServingModel, job: _Job) -> tuple[list[float], list[KV]]:
    """Return the errors of a span's tokens under the replica's weights, and the KV that the forward used."""
    asked, span = job.answer.request, job.span
    prompt = len(asked.prompt)
    logits, used = _forward(
        replica, (*asked.prompt, *job.answer.tokens[:-1]), job.before, kept=prompt + span.first - 1 if job.before else 0
    )
    errors = []
    for place in range(span.first, span.first + span.count):
        after = logits[prompt + place - 1].double() / asked.temperature
        if place < asked.min_tokens:
            after[asked.end] = -math.inf
        logprob = after[job.answer.tokens[place]] - torch.logsumexp(after, dim=0)
        errors.append(abs(float(logprob) - job.answer.logprobs[place]))
    return errors, used


def _forward(
    replica: ServingModel, sequence: tuple[int, ...], before: list[KV], kept: int
) -> tuple[torch.Tensor, list[KV]]:
    """Return the logits after each token [length, vocabulary], with `before` as KV of the first `kept` positions, and the KV used."""
    used: list[KV] = []

    def replace(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *rest = args
        if before:
            theirs = before[len(used)]
            key, value = (torch.cat([old[:kept], new[kept:]]) for old, new in zip(theirs, (key, value), strict=True))
        used.append((key, value))
        return query, key, value, *rest

    model = replica.chunks[0]
    cores = [module for name, module in model.named_modules() if name.endswith("core_attention")]
    hooks = [core.register_forward_pre_hook(replace) for core in cores]
    try:
        ids = torch.tensor([[*sequence]], device=replica.device)
        positions = torch.arange(len(sequence), device=replica.device)[None]
        output = model(ids, positions, None, runtime_gather_output=True)
    finally:
        for hook in hooks:
            hook.remove()
    return output[0].float(), used
