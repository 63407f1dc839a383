"""Functions that test_generate.py calls on a replica's ranks: an engine's answers, alone, batched, across syncs and recomputed; JSON
results."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, cast

import torch

from kit.megatron import ownership, serve
from kit.megatron.config import GEOMETRIES, ModelConfig
from kit.megatron.serve import NO_ADAPTER, Answer, AtSync, Engine, Prefix, PrefixCache, PromptRequest
from kit.train.arithmetic import END, VOCAB, encode
from tests.megatron.ranks.common import attempt
from tests.megatron.ranks.recompute import verify

SMALL = dataclasses.replace(GEOMETRIES["tiny"], layers=2, vocab=VOCAB)
PROMPTS = ("3+4=", "9-2=", "8+8=")
PREFIX = 2**20


def made(tp: int, **settings: Any) -> serve.ServingModel:
    """Build a replica over the whole World, or one per rank (tp=1), with the weights of version 0."""
    replica = serve.ServingModel(ModelConfig(size=SMALL, tp=tp, **settings))
    load(replica, 0)
    return replica


def load(replica: serve.ServingModel, version: int) -> None:
    """Load a version's weights: large enough that answers differ from uniform noise, and different for each version."""
    generator = torch.Generator().manual_seed(5)
    later = torch.Generator().manual_seed(100 + version)
    for name, param in replica.chunks[0].named_parameters():
        if "norm" in name:
            param.data.fill_(1.0)
        else:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.2)
            param.data.add_(torch.randn(param.shape, generator=later) * 0.02)


def request(prompt: int, sample: int = 0, **settings: Any) -> PromptRequest:
    wanted: dict[str, Any] = {"max_tokens": 12, "min_tokens": 9, "temperature": 0.8} | settings
    return PromptRequest(
        id=f"{prompt}.{sample}",
        prompt=tuple(encode(PROMPTS[prompt])),
        sample=sample,
        seed=7,
        end=END,
        **wanted,
    )


def finish(engine: Engine, *more: Answer) -> dict[str, Answer]:
    """Decode to the end; return all answers by request id."""
    found = [*more]
    while engine.in_flight:
        found += engine.decode(3)
    return {answer.request.id: answer for answer in found}


def plain(answer: Answer) -> dict[str, Any]:
    return {
        "tokens": [*answer.tokens],
        "logprobs": [value.hex() for value in answer.logprobs],
        "spans": [[span.version, span.first, span.count, span.kept] for span in answer.spans],
        "ended": answer.ended,
    }


def company(tp: int, **settings: Any) -> dict[str, Any]:
    """Run the same two requests alone without a prefix cache, among other requests, and cancelled and resumed twice."""
    with ownership.as_found():
        replica = made(tp, **settings)
        wanted = [request(0), request(0, 3, min_tokens=0, temperature=1.0)]
        alone = {}
        for each in wanted:
            engine = Engine(replica, prefix_bytes=0)
            engine.start(each)
            alone |= finish(engine)

        engine = Engine(replica, prefix_bytes=PREFIX)
        engine.start(request(1))
        engine.start(request(2, max_tokens=20))
        some = engine.decode(2)
        engine.start(wanted[0])
        some += engine.decode(1, ids=(wanted[0].id,))
        engine.start(request(0, 1))
        engine.start(wanted[1])
        some += engine.decode(3)
        cancelled = engine.cancel(request(1).id)
        engine.start(request(1, 1))
        among = finish(engine, *some)

        engine = Engine(replica, prefix_bytes=PREFIX)
        for each in wanted:
            engine.start(each)
        some = engine.decode(2)
        stopped = [engine.cancel(name) for name in engine.in_flight]
        engine.start(request(2))
        some += engine.decode(1)
        for answer in stopped:
            engine.start(answer.request, answer)
        some += engine.decode(1)
        stopped = [engine.cancel(name) for name in engine.in_flight if name != request(2).id]
        for answer in stopped:
            engine.start(answer.request, answer)
        resumed = finish(engine, *some)
        return {
            "alone": [plain(alone[each.id]) for each in wanted],
            "among": [plain(among[each.id]) for each in wanted],
            "resumed": [plain(resumed[each.id]) for each in wanted],
            "samples": [plain(among[name])["tokens"] for name in ("0.0", "0.1", "0.3")],
            "cancelled": cancelled.ended,
        }


def recorded(tp: int) -> dict[str, Any]:
    """Compare recorded log-probabilities with recomputed ones for several distributions, also as if recorded under a wrong distribution."""
    with ownership.as_found():
        replica = made(tp)
        settings = [
            {"temperature": temperature, "min_tokens": least} for temperature in (1.0, 0.7, 1.6) for least in (0, 8)
        ]
        engine = Engine(replica)
        for sample, each in enumerate(settings):
            engine.start(request(sample % 3, sample, **each))
        answers = [*finish(engine).values()]
        errors = [max(each.stamped) for each in verify(replica, answers, [0], lambda version: load(replica, version))]
        wrong = []
        for answer in answers:
            asked = answer.request
            for other in (
                dataclasses.replace(asked, temperature=asked.temperature * 1.1),
                dataclasses.replace(asked, min_tokens=0 if asked.min_tokens else asked.max_tokens),
            ):
                claimed = dataclasses.replace(answer, request=other)
                wrong.append(max(verify(replica, [claimed], [0], lambda version: load(replica, version))[0].stamped))
        return {
            "errors": errors,
            "wrong": wrong,
            "short": [answer.request.id for answer in answers if END in answer.tokens[: answer.request.min_tokens]],
            "tokens": sum(len(answer.tokens) for answer in answers),
        }


def synced(tp: int, at_sync: str) -> dict[str, Any]:
    """Run three requests over two syncs; verify under the served versions, one never served and an unknown one; also with moved stamps."""
    with ownership.as_found():
        replica = made(tp)
        engine = Engine(replica)
        for sample in range(3):
            engine.start(request(sample % 2, sample))
        ended = []
        for version in (1, 2):
            ended += engine.decode(3)
            load(replica, version)
            aborted = engine.weights_changed(version, cast("AtSync", at_sync))
            ended += aborted
            for answer in aborted:
                engine.start(answer.request, answer)
        answers = [answer for answer in finish(engine, *ended).values() if answer.ended != "aborted"]
        versions = [0, 1, 2, 3]

        def judged(some: list[Answer]) -> list[Any]:
            return verify(replica, some, versions, lambda version: load(replica, version))

        before = [param.detach().clone() for param in replica.chunks[0].parameters()]
        found = judged(answers)
        restored = all(torch.equal(one, two) for one, two in zip(before, replica.chunks[0].parameters(), strict=True))
        moved = [
            dataclasses.replace(
                answer,
                spans=(
                    dataclasses.replace(answer.spans[0], count=answer.spans[0].count + 1),
                    dataclasses.replace(
                        answer.spans[1], first=answer.spans[1].first + 1, count=answer.spans[1].count - 1
                    ),
                    *answer.spans[2:],
                ),
            )
            for answer in answers
        ]
        at = [answer.spans[1].first for answer in answers]
        late = judged(moved)
        unknown = dataclasses.replace(answers[0], spans=(dataclasses.replace(answers[0].spans[0], version=9),))
        never = judged([unknown])[0]
        return {
            "answers": [plain(answer) for answer in answers],
            "stamped": [max(each.stamped) for each in found],
            "apart": [
                min(error for version, error in errors_of(each, place) if version != stamp(answer, place))
                for answer, each in zip(answers, found, strict=True)
                for place in range(len(answer.tokens))
            ],
            "other_cache": [
                list(each.other_cache[span.places])
                for answer, each in zip(answers, found, strict=True)
                for span in answer.spans
            ],
            "moved": [each.stamped[place] for each, place in zip(late, at, strict=True)],
            "unknown": str(never.stamped[0]),
            "unknown_true": max(never.others[0][:3]),
            "restored": restored,
        }


def errors_of(judged: Any, place: int) -> list[tuple[int, float]]:
    return [(version, errors[place]) for version, errors in judged.others.items()]


def stamp(answer: Answer, place: int) -> int:
    return next(span.version for span in answer.spans if span.first <= place < span.first + span.count)


def restarted() -> dict[str, Any]:
    """Compare a KV cache that is recomputed at a sync with a request that is cancelled and resumed there."""
    with ownership.as_found():
        replica = made(1)
        results = []
        for resumed in (False, True):
            load(replica, 0)
            engine = Engine(replica)
            engine.start(request(0))
            engine.decode(4)
            answer = engine.cancel(request(0).id) if resumed else None
            load(replica, 1)
            engine.weights_changed(1, "recompute")
            if answer is not None:
                engine.start(answer.request, answer)
            results.append(plain(finish(engine)[request(0).id]))
        return {"same": results[0] == results[1], "spans": results[0]["spans"]}


class Unsalted(PrefixCache):
    """A prefix cache with a bug: it ignores the version, and a sync does not clear it."""

    def get(self, version: int, tokens: tuple[int, ...], adapter: int = NO_ADAPTER) -> Any:
        return super().get(0, tokens, adapter)

    def put(self, version: int, tokens: tuple[int, ...], prefix: Any, adapter: int = NO_ADAPTER) -> None:
        super().put(0, tokens, prefix, adapter)

    def clear(self) -> None:
        pass


def prefixes() -> dict[str, Any]:
    """Count prefix hits within groups, across a sync and at a byte limit; recompute answers from a cache that wrongly survives a sync."""
    with ownership.as_found():
        replica = made(1)
        engine = Engine(replica)
        counts = []

        def counted(cache: PrefixCache) -> PrefixCache:
            """Make the cache count its hits and misses."""
            plain, tally = cache.get, [0, 0]

            def get(version: int, tokens: tuple[int, ...], adapter: int = NO_ADAPTER) -> Prefix | None:
                found = plain(version, tokens, adapter)
                tally[found is None] += 1
                return found

            cache.get, cache.tally = get, tally  # type: ignore[attr-defined, method-assign]
            return cache

        counted(engine.prefixes)

        def group(engine: Engine, prompt: int, samples: int) -> dict[str, Answer]:
            for sample in range(samples):
                engine.start(request(prompt, sample))
            found = finish(engine)
            cache = engine.prefixes
            counts.append([*cache.tally, len(cache)])  # type: ignore[attr-defined]
            return found

        group(engine, 0, 4)
        group(engine, 1, 4)
        size = engine.prefixes.size
        load(replica, 1)
        engine.weights_changed(1, "keep")
        emptied = engine.prefixes.size
        group(engine, 0, 4)

        load(replica, 0)
        tight = Engine(replica, prefix_bytes=size // 2)  # room for one prefix
        counted(tight.prefixes)
        group(tight, 0, 2)
        group(tight, 1, 2)
        group(tight, 0, 2)

        broken = Engine(replica)
        broken.prefixes = counted(Unsalted(PREFIX))
        group(broken, 0, 2)
        load(replica, 1)
        broken.weights_changed(1, "keep")
        stale = [*group(broken, 0, 2).values()]
        found = verify(replica, stale, [0, 1], lambda version: load(replica, version))
        return {
            "counts": counts,
            "emptied": emptied,
            "size": size,
            "tight": tight.prefixes.size,
            "stale": [statistics.median(each.stamped) for each in found],
        }


def refused() -> dict[str, str]:
    with ownership.as_found():
        replica = made(1)
        engine = Engine(replica, version=3)
        engine.start(request(0))
        done = engine.decode(12)
        engine.start(request(1))
        later = engine.in_flight
        found = {
            "twice": lambda: engine.start(request(1)),
            "long": lambda: engine.start(request(0, 1, max_tokens=40)),
            "token": lambda: engine.start(dataclasses.replace(request(0, 2), prompt=(3, VOCAB))),
            "below": lambda: engine.start(dataclasses.replace(request(0, 2), prompt=(3, -1))),
            "finished": lambda: engine.start(done[0].request, done[0]),
            "other": lambda: engine.start(request(2), done[0]),
            "cancel": lambda: engine.cancel("nobody"),
            "back": lambda: engine.weights_changed(3, "keep"),
            "drain": lambda: engine.weights_changed(4, "drain"),
        }
        result = {name: attempt(function) for name, function in found.items()}
        result["untouched"] = str(engine.in_flight == later and engine.version == 3)
        replica.sleep()
        result["asleep"] = attempt(lambda: engine.decode(1))
        replica.wake()
        result["nan"] = attempt(lambda: engine.decode(1))
        load(replica, 0)
        engine.start(request(1, 1))
        engine.decode(4)
        for param in replica.chunks[0].parameters():
            param.data.mul_(float("nan"))
        result["nan_later"] = attempt(lambda: engine.decode(1))
        load(replica, 0)
        after = finish(engine)
        alone = Engine(replica, version=3)
        for name in after:
            alone.start(after[name].request)
        result["recovered"] = str(after == finish(alone))
        return result
