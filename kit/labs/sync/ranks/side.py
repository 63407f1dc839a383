"""What both ends of the sync lab have: their groups, their observer on the GPU, base weights, and how two results compare."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kit.actors.common import listen
from kit.engines.contents import listed_names
from kit.errors import KitError
from kit.labs import rankside
from kit.labs.bystander import Bystander
from kit.labs.sync.lab import SyncConfig
from kit.measure.phase import shared_memory
from kit.megatron import groups, ownership, serve, shards, standin
from kit.megatron.config import ModelConfig
from kit.megatron.model import DTYPES
from kit.sync import transports
from kit.sync.sender import SyncLog
from kit.train.plain import PlainModel

ROWS, LENGTH = 2, 8  # of a prompt; its logits are compared
REQUESTS = 2  # prompts that take turns, so that the answer to another request shows
CACHED_LENGTH = 48  # more than a block of vLLM's prefix cache


def beyond_garbage(count: Callable[[], int], most: float) -> int:
    """A count, taken again after a collection if it is above `most`: what only reference cycles hold does not count."""
    seen = count()
    if seen > most:
        gc.collect()
        seen = count()
    return seen


class Side:
    """One rank of the trainer or of a replica. Its job uses `self.group` as its whole world."""

    def __init__(self, ctx: rankside.Context) -> None:
        self.ctx = ctx
        self.config: SyncConfig = ctx.config
        self.scope = contextlib.ExitStack()
        if ctx.rank == 0:
            self.listener = self.scope.enter_context(listen(ctx, "sync"))
        self.group: Any = None
        self.bystander: Bystander | None = None
        self.leaving: set[str] = set()  # rehearsed failures after which more was open than before
        self.held_first = self.segments_first = math.inf  # bytes of tensors and segments when they were counted first
        gpu = ""
        if ctx.device.type == "cuda" and not transports.needs_permission():
            gpu = str(torch.cuda.get_device_properties(ctx.device).uuid)
        self.where = transports.RankPlace(host=ctx.machine_of(ctx.rank), world=ctx.world_of(ctx.rank), gpu=gpu)

    def enter(self) -> None:
        """Create the groups of the trainer and of each replica."""
        if self.ctx.device.type == "cuda":
            self.bystander = Bystander(str(self.ctx.device))
            self.scope.callback(self.bystander.close)
        self.scope.enter_context(ownership.as_found(timeout_s=self.config.deadline_s))
        groups.install()
        standin.install()
        self.group = self.new_group()

    def new_group(self) -> Any:
        """A new group of this rank's job. All ranks create those of all jobs in the same order."""
        own, before = None, sum(self.ctx.world_sizes[: self.ctx.world])
        own_world = range(before, before + self.ctx.world_sizes[self.ctx.world])
        for ranks in (range(self.config.trainer_ranks), *replica_ranks(self.config)):
            if ranks[0] in own_world:
                group = dist.new_group([rank - before for rank in ranks])
                own = group if self.ctx.rank in ranks else own
        return own

    def as_job(self) -> contextlib.AbstractContextManager[None]:
        return serve.as_world(self.group)

    def end(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.scope.close()

    def path_of(self, *, asleep: bool) -> str:
        """The path of a sync to sleeping replicas, or to the others."""
        return "expand" if asleep else "stream" if self.config.refresh == "paused" else "refresh"

    def record_log(self, log: SyncLog, began: float) -> None:
        for stage, seconds in log.seconds.items():
            self.ctx.record("stage_seconds", seconds, "s", stage=stage)
        for number, (name, when) in enumerate(log.events):
            self.ctx.record("event", when - began, "s", event=name, order=number)

    def held(self) -> set[Any]:
        """Shared memory on this rank that a sync should not leave behind."""
        return set(shared_memory())

    def waiting(self) -> int:
        """Connections of receivers that have called early."""
        return 0

    def count(self) -> None:
        held = beyond_garbage(lambda: len(self.held()), self.segments_first)
        self.segments_first = min(self.segments_first, held)
        self.ctx.record("segments", held)
        for metric, value in self.bystander.ask().items() if self.bystander else ():
            self.ctx.record(metric, value, "B")

    def tensor_bytes(self) -> int:
        """Of all tensors of this rank that count for it."""
        raise NotImplementedError

    def weigh_tensors(self) -> None:
        """Record the bytes of all tensors of this rank."""
        held = beyond_garbage(self.tensor_bytes, self.held_first)
        self.held_first = min(self.held_first, held)
        self.ctx.record("tensor_bytes", held, "B")

    def prompts(self, vocab: int) -> list[torch.Tensor]:
        return [self.prompt(vocab, number) for number in range(REQUESTS)]

    def prompt(self, vocab: int, number: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.config.seed + number)
        length = CACHED_LENGTH if self.config.serve == "vllm" else LENGTH
        return torch.randint(0, vocab, (ROWS, length), generator=generator)


def base_weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The same base weights for any layout: each full tensor is drawn from its name."""
    seed, dtype = config.seed, DTYPES[config.dtype]
    with torch.device("meta"):
        plain = PlainModel(config.geometry, experts=config.experts)
    for name, shape in ((name, param.shape) for name, param in plain.named_parameters()):
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        full = torch.randn(shape, generator=generator)
        yield name, (1 + 0.1 * full if full.dim() == 1 and "norm" in name else 0.05 * full).to(dtype)


def replica_ranks(config: SyncConfig) -> list[range]:
    """The ranks of each replica."""
    return [range(at, at + config.infer_tp) for at in range(config.trainer_ranks, config.ranks, config.infer_tp)]


def fill(chunks: Sequence[Any], config: ModelConfig) -> None:
    """Fill in the base weights for any layout."""
    places = shards.destinations(chunks)
    with torch.no_grad():
        for name, full in base_weights(config):
            for into, take in places.get(name, ()):
                into.copy_(take(full))


def plain_logits(config: ModelConfig, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last position from the plain model, which is loaded by tensor names only."""
    plain = PlainModel(config.geometry, experts=config.experts, dtype=DTYPES[config.dtype], device="meta")
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(shards.SCALES)}
    plain.load_state_dict(weights, assign=True)
    with torch.no_grad():
        logits: torch.Tensor = plain(tokens.to(next(iter(tensors.values())).device))
    return logits[:, -1].float()


def logits_error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference divided by the largest logit; infinite if it is no number."""
    error = float((logits.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    return error if math.isfinite(error) else math.inf


def worst_error(logits: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> float:
    """The largest `logits_error` of any prompt."""
    return max(itertools.starmap(logits_error, zip(logits, wanted, strict=True)))


def miscounted(words: str, tensors: Sequence[str], names: Iterable[str]) -> Iterator[str]:
    """What is wrong with the tensors in an error's words, which may name the first of them and count all or the others. `names`: of all
    tensors there are."""
    places = {name: re.search(rf"(?<![\w.]){re.escape(name)}(?!\.?\w)", words) for name in names}
    found = sorted((name for name in places if places[name]), key=lambda name: places[name].start())  # type: ignore[union-attr]
    if found[:1] != [*tensors[:1]] or not {*found} <= {*tensors}:
        yield f"the words name {listed_names(found) or 'no tensor'} instead of {listed_names(tensors)}"
    left = len(tensors) - len(found)
    counts = rf"\band {left} more\b|(?<![\w.-]){len(tensors)} (tensors|of)\b"
    if not re.search(counts, words) if left else re.search(r"and -?\d+ more", words):
        yield f"the words name {len(found)} of {len(tensors)} tensors, and count others"


EXPECTED = (KitError, OSError)
ANY = (Exception,)  # code under test may raise anything


def error_of(call: Callable[[], object], kinds: tuple[type[Exception], ...] = EXPECTED) -> Exception | None:
    """The error that the call raises, without its frames, which would keep tensors alive."""
    try:
        call()
    except kinds as error:
        link: BaseException | None = error
        while link is not None:
            link.__traceback__, link = None, link.__cause__ or link.__context__
        return error
    return None
