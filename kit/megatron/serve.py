"""Serving: a replica of the model without gradients or optimizer, which can sleep, its logits, and answers that it writes token by token.

A `Replica` is made inside `as_world(group)`, where the group has the ranks of this one replica, and its `logits` are asked for inside of it
too. Equal layouts give the same bits as the training job's `logits`, which gathers the whole vocabulary of the last position.

An `Engine` samples answers with a KV cache and stamps each token with the version of the weights. Every rank of a replica has one and makes
the same calls in the same order. Each request has one megatron-core `StaticInferenceContext`, and each forward has one row: its bits do not
depend on the other requests. One forward writes the KV of the whole prompt, and one forward per token writes the KV of the tokens after it.
An answer that is resumed, or that gets its cache recomputed, repeats exactly these forwards and gets the same bits. Sampling uses a hash of
(seed, prompt, sample, position) and float64 on the host, so that all ranks of a replica choose the same token.

Limits: pp=1. The same prompt with the same seed and sample draws the same numbers again. Recomputing a cache costs one forward per
written token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput, KitError
from kit.measure.host import huge_pages, trim
from kit.megatron import model, standin
from kit.megatron.config import LoraOptions, ModelConfig
from kit.megatron.handles import parallel_state
from kit.megatron.lora import AdapterNetwork, FrozenBase
from kit.megatron.shards import named_scales
from kit.train.draws import uniform


class ServingModel:
    """An inference model on this rank, with the first weights of a job of the same config. `chunks` holds it, as a job's do.

    `sleep` and `wake` alternate. After `wake` every weight is NaN, so that one that never arrives shows in the logits.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.pp != 1:
            raise BadInput(f"pp={config.pp} is not allowed for a replica: it must be 1")
        self.config = config
        self.device = model.initialise(config)
        self.chunks: list[Any] = [model.network(config, self.device).eval()]
        self.base: FrozenBase | None = None
        self.adapters: list[AdapterNetwork] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def adapt(self, options: LoraOptions, count: int) -> None:
        """Make room for this many low-rank adapters; the caller loads them."""
        self.base = FrozenBase(self.chunks[0], self.device)
        self.adapters = [AdapterNetwork(self.base, options) for _ in range(count)]

    def applying(self, adapter: int) -> contextlib.AbstractContextManager[None]:
        """Inside, forwards run with this adapter."""
        if adapter == NO_ADAPTER:
            return contextlib.nullcontext()
        if self.base is None or not 0 <= adapter < len(self.adapters):
            raise KitError(f"adapter {adapter} is not on this replica, which has {len(self.adapters)}")
        return self.base.applying(self.adapters[adapter])

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the base and of all adapters."""
        yield from self.chunks[0].named_parameters()
        for number, adapter in enumerate(self.adapters):
            yield from adapter.named_parameters(prefix=f"adapter{number}")

    @property
    def asleep(self) -> bool:
        return bool(self._away)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows the last of the tokens [rows, length]: float32 [rows, vocabulary], the same on every rank. Collective."""
        if self.asleep:
            raise KitError("this replica is asleep: wake it and fill its weights before it serves")
        tokens = tokens.to(self.device)
        return _last(self.chunks[0](tokens, _positions(tokens), None))

    def sleep(self) -> None:
        """Give the weights' memory back; parameters and their names stay."""
        if self.asleep:
            raise KitError("this replica is asleep already")
        storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for name, param in [*self.named_parameters(), *named_scales(self.chunks[0])]:
            storage = param.untyped_storage()
            if not storage.resizable():
                raise KitError(f"the storage of {name} cannot be resized, so it cannot be released")
            storages[storage._cdata] = (storage, storage.nbytes())
        self._away = [*storages.values()]
        for storage, _ in self._away:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim()

    def wake(self) -> None:
        """Take the weights' memory again, full of NaN."""
        if not self.asleep:
            raise KitError("this replica is awake already")
        for storage, size in self._away:
            storage.resize_(size)
            if self.device.type == "cpu":
                huge_pages(storage.data_ptr(), size)
        for _, param in self.named_parameters():
            param.data.fill_(float("nan"))
        self._away = []


@torch.no_grad()
def logits(job: model.Training, tokens: torch.Tensor) -> torch.Tensor | None:
    """A training job's logits as `Replica.logits` gives them, on the job's rank 0; None elsewhere. Collective.

    One microbatch of the tokens, the same on every rank, goes through Megatron's own schedule. The job stays as it was.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if job.mover.away:
        raise KitError(f"{', '.join(job.mover.away)} are off the device: restore them before asking for logits")
    tokens = tokens.to(job.device)

    def step(_: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        return chunk(tokens, _positions(tokens), None), lambda output, **_: output

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(()),
        model=job.chunks,
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    logits = _last(outputs[0]) if parallel_state().is_pipeline_last_stage() else None
    stages = parallel_state().get_pipeline_model_parallel_group()
    if 0 not in dist.get_process_group_ranks(stages):
        return None  # another replica, or another tensor rank
    if dist.get_world_size(stages) == 1:
        return logits
    if logits is not None:
        dist.send(logits, group=stages, group_dst=0)
    elif dist.get_rank() == 0:
        shape = (tokens.shape[0], job.config.geometry.vocab)
        logits = torch.empty(shape, dtype=torch.float32, device=job.device)
        dist.recv(logits, group=stages, group_src=dist.get_world_size(stages) - 1)
        return logits
    return None


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)


def _last(output: torch.Tensor) -> torch.Tensor:
    """The last position's logits from all tensor ranks, each of which has some columns."""
    group = parallel_state().get_tensor_model_parallel_group()
    last_logits = output[:, -1].float().contiguous()
    columns = [torch.empty_like(last_logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(columns, last_logits, group=group)
    return torch.cat(columns, dim=-1)


_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def as_world(group: Any) -> Iterator[None]:
    """Inside, the group of this rank's job is what torch and Megatron take for the whole world.

    Megatron's parallel state is made of all ranks of the default group. Where some ranks train and others serve, each job makes its own
    from the group of its ranks, numbered from 0; groups that were made inside keep these numbers. torch names a group by how many a
    process has made, and ranks of other jobs make more or fewer: inside has a count of its own, so that the World's ranks go on agreeing.
    Limits: it holds while the context is open, on the thread that opened it; a job that asks for the default group later asks the World.
    """
    world: Any = c10d._world
    if group not in world.pg_map:
        raise BadInput("as_world takes a process group that this rank belongs to and that was not destroyed")
    ranks = world.pg_group_ranks[group]
    plain, count = world.default_pg, world.group_count
    # The same number on all of its ranks, far from other groups' numbers.
    world.group_count = _counts.get(group, zlib.crc32(world.pg_names[group].encode()) * 10**6)
    world.default_pg = group
    world.pg_group_ranks[group] = {place: place for place in range(dist.get_world_size(group))}
    try:
        yield
    finally:
        _counts[group], world.group_count = world.group_count, count
        world.default_pg = plain
        world.pg_group_ranks[group] = ranks


# -- answers, token by token -------------------------------------------------------------------------------------------

NO_ADAPTER = -1
AtSync = Literal["keep", "recompute", "abort", "drain"]
Ended = Literal["end", "length", "cancelled", "aborted"]
KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, [length, 1, groups, head]
PREFIX_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """One sample of a prompt. `id` names it in calls and answers; nothing that is sampled depends on it."""

    id: str
    prompt: tuple[int, ...]
    sample: int
    seed: int
    end: int  # the token that ends an answer
    max_tokens: int
    min_tokens: int = 0  # `end` is masked for this many tokens
    temperature: float = 1.0
    adapter: int = NO_ADAPTER  # that its forwards run with

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadInput(f"request {self.id} has no prompt: it needs at least one token")
        if not self.temperature > 0:
            raise BadInput(f"temperature={self.temperature} is not allowed: it must be above 0")
        if not 0 <= self.min_tokens <= self.max_tokens or self.max_tokens < 1:
            raise BadInput(
                f"min_tokens={self.min_tokens}, max_tokens={self.max_tokens} is not allowed: use 0 <= min <= max and max >= 1"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerSpan:
    """Tokens `first` to `first + count - 1` of an answer, sampled from the weights of one version.

    `kept`: positions before the span have KV from earlier versions. Otherwise this version computed all KV.
    """

    version: int
    first: int
    count: int
    kept: bool = False

    @property
    def places(self) -> slice:
        """The indices of its tokens in the answer."""
        return slice(self.first, self.first + self.count)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The tokens written for a request, END included, and their log-probabilities under the distribution that was sampled from."""

    request: PromptRequest
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[AnswerSpan, ...]
    ended: Ended


@dataclasses.dataclass(kw_only=True, slots=True)
class Flight:
    """A request in flight. `context` holds its KV; if it is None, the next forward starts at the prompt."""

    request: PromptRequest
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    spans: list[AnswerSpan] = dataclasses.field(default_factory=list)
    context: Any = None
    kept: bool = False  # the context holds KV of an older version

    def write(self, token: int, logprob: float, version: int) -> None:
        last = self.spans[-1] if self.spans else None
        if last and (last.version, last.kept) == (version, self.kept):
            self.spans[-1] = dataclasses.replace(last, count=last.count + 1)
        else:
            self.spans.append(AnswerSpan(version, len(self.tokens), 1, self.kept))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    @property
    def ended(self) -> Ended | None:
        if self.tokens and self.tokens[-1] == self.request.end:
            return "end"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    def answer(self, ended: Ended) -> Answer:
        return Answer(self.request, tuple(self.tokens), tuple(self.logprobs), tuple(self.spans), ended)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """The KV of a prompt by layer, and the logits after it."""

    layers: dict[int, KV]
    logits: torch.Tensor

    @property
    def size(self) -> int:
        return self.logits.nbytes + sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)


class PrefixCache:
    """Prefixes by (version, adapter, tokens). Above `limit` bytes the least recently used is dropped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._kept: OrderedDict[tuple[int, int, tuple[int, ...]], Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, version: int, tokens: tuple[int, ...], adapter: int = NO_ADAPTER) -> Prefix | None:
        key = version, adapter, tokens
        prefix = self._kept.get(key)
        if prefix is not None:
            self._kept.move_to_end(key)
        return prefix

    def put(self, version: int, tokens: tuple[int, ...], prefix: Prefix, adapter: int = NO_ADAPTER) -> None:
        if prefix.size > self.limit:
            return
        self._kept[version, adapter, tokens] = prefix
        self.size += prefix.size
        while self.size > self.limit:
            self.size -= self._kept.popitem(last=False)[1].size

    def clear(self) -> None:
        self._kept.clear()
        self.size = 0


class Engine:
    """Decodes the requests of one replica, a few tokens per call. Between calls requests start and end, and weights change.

    Every rank of the replica makes the same calls in the same order. `version` is the version of the replica's weights.
    """

    def __init__(self, replica: ServingModel, *, version: int = 0, prefix_bytes: int = PREFIX_BYTES) -> None:
        self.replica = replica
        self.version = version
        self.prefixes = PrefixCache(prefix_bytes)
        self._flights: dict[str, Flight] = {}

    @property
    def in_flight(self) -> dict[str, int]:
        """Tokens written so far by request, in the order in which requests started."""
        return {name: len(flight.tokens) for name, flight in self._flights.items()}

    def start(self, request: PromptRequest, so_far: Answer | None = None) -> None:
        """Put a request in flight. `so_far`, its cancelled or aborted answer, is continued. No forward runs yet."""
        geometry = self.replica.config.geometry
        if request.id in self._flights:
            raise KitError(f"request {request.id} is already in flight")
        if (length := len(request.prompt) + request.max_tokens) > geometry.seq:
            raise BadInput(f"request {request.id} may reach {length} tokens; the model's limit is {geometry.seq}")
        if not all(0 <= token < geometry.vocab for token in (*request.prompt, request.end)):
            raise BadInput(f"request {request.id} holds a token outside of the vocabulary, which has {geometry.vocab}")
        flight = Flight(request=request)
        if so_far is not None:
            if so_far.request != request or so_far.ended in {"end", "length"}:
                raise BadInput(f"request {request.id} can only go on from an unfinished answer to the same request")
            flight.tokens, flight.logprobs, flight.spans = [*so_far.tokens], [*so_far.logprobs], [*so_far.spans]
        self._flights[request.id] = flight

    @torch.no_grad()
    def decode(self, n: int, ids: Container[str] | None = None) -> list[Answer]:
        """Write up to n tokens of each request in flight (of those in `ids`). Return the answers that ended. Collective."""
        if self.replica.asleep:
            raise KitError("this replica is asleep: wake it and fill its weights before it decodes")
        done = []
        for _ in range(n):
            for flight in [candidate for name, candidate in self._flights.items() if ids is None or name in ids]:
                self._sample(flight)
                if ended := flight.ended:
                    done.append(self._leave(flight.request.id, ended))
        return done

    def cancel(self, name: str) -> Answer:
        """End a request early and return its answer so far."""
        if name not in self._flights:
            raise KitError(f"request {name} is not in flight")
        return self._leave(name, "cancelled")

    def weights_changed(self, version: int, at_sync: AtSync) -> list[Answer]:
        """Call this when the replica has the weights of a later version. Return the answers that this ends. Requests in flight:

        keep: continue with the KV that they have. recompute: continue after the KV of all their positions is computed again, by
        the next `decode`. abort: end. drain: there must be none.
        """
        if version <= self.version:
            raise KitError(f"version {version} does not follow version {self.version}: versions only increase")
        if at_sync == "drain" and self._flights:
            raise KitError(
                f"{len(self._flights)} requests are in flight; with at_sync=drain decode them to their ends before a sync"
            )
        self.version = version
        self.prefixes.clear()
        if at_sync == "abort":
            return [self._leave(name, "aborted") for name in [*self._flights]]
        for flight in self._flights.values():
            if at_sync == "recompute":
                flight.context = None
            flight.kept = flight.context is not None
        return []

    def _sample(self, flight: Flight) -> None:
        """Write the next token of a request, stamped with the version of the weights that its forward runs with."""
        asked, version = flight.request, self.version
        after = distribution(self._feed(flight), asked, len(flight.tokens))
        position = len(asked.prompt) + len(flight.tokens)
        token = pick(after, uniform(asked.seed, asked.prompt, asked.sample, position))
        flight.write(token, float(after[token]), version)

    def _feed(self, flight: Flight) -> torch.Tensor:
        """Run the forwards of all positions that have no KV yet. Return the logits after the last token."""
        sequence = (*flight.request.prompt, *flight.tokens)
        logits = None
        if flight.context is None:
            flight.context, logits = self._prefill(flight.request)
            flight.kept = False
        for at in range(flight.context.sequence_len_offset, len(sequence)):
            logits = self._forward(flight.context, sequence[at : at + 1], flight.request.adapter)
        assert logits is not None  # the last token never has KV before its successor is sampled
        return logits

    def _prefill(self, request: PromptRequest) -> tuple[Any, torch.Tensor]:
        """A context with the KV of the prompt, and the logits after it, from the prefix cache or by a forward."""
        from megatron.core.inference.contexts import StaticInferenceContext

        length = len(request.prompt)
        context: Any = StaticInferenceContext(1, length + request.max_tokens)
        layers: dict[int, KV] = context.key_value_memory_dict
        prefix = self.prefixes.get(self.version, request.prompt, request.adapter)
        if prefix is not None:
            for layer, pair in prefix.layers.items():
                layers[layer] = tuple(_lengthened(tensor, context.max_sequence_length) for tensor in pair)  # type: ignore[assignment]
            context.increment_sequence_len_offset(length)
            context.enable_decode_mode()
            return context, prefix.logits
        logits = self._forward(context, request.prompt, request.adapter)
        kept = {layer: (keys[:length].clone(), values[:length].clone()) for layer, (keys, values) in layers.items()}
        self.prefixes.put(self.version, request.prompt, Prefix(kept, logits), request.adapter)
        return context, logits

    def _forward(self, context: Any, tokens: Sequence[int], adapter: int) -> torch.Tensor:
        """Append tokens to a context and return the logits after them: float32 [vocabulary], the same on every rank."""
        device, start = self.replica.device, context.sequence_len_offset
        ids = torch.tensor([[*tokens]], device=device)
        positions = torch.arange(start, start + len(tokens), device=device)[None]
        # After the prompt a forward creates nothing on a device that it names.
        with standin.off() if start else contextlib.nullcontext(), self.replica.applying(adapter):
            output: torch.Tensor = self.replica.chunks[0](
                ids, positions, None, inference_context=context, runtime_gather_output=True
            )
        logits = output[0, -1].float()
        if not bool(logits.isfinite().all()):  # neither this context nor the prefix cache takes this forward for done
            raise KitError("logits are not finite: the replica's weights are incomplete or broken")
        context.increment_sequence_len_offset(len(tokens))
        context.enable_decode_mode()
        return logits

    def _leave(self, name: str, ended: Ended) -> Answer:
        return self._flights.pop(name).answer(ended)


def distribution(logits: torch.Tensor, request: PromptRequest, written: int) -> torch.Tensor:
    """The log-probabilities that the token after `written` tokens is sampled from: float64 [vocabulary], on the host."""
    wide = logits.to("cpu", torch.float64, copy=True)
    if written < request.min_tokens:
        wide[request.end] = -torch.inf
    return (wide / request.temperature).log_softmax(-1)


def pick(logprobs: torch.Tensor, number: float) -> int:
    """The first token at which the cumulative probability exceeds a number in [0, 1)."""
    weights = logprobs.exp()
    heights = weights.cumsum(-1)
    index = int(torch.searchsorted(heights, heights[-1] * number, right=True))
    return min(index, int(weights.nonzero()[-1]))  # the product may round up to the total


def _lengthened(kept: torch.Tensor, length: int) -> torch.Tensor:
    longer = kept.new_empty((length, *kept.shape[1:]))
    longer[: len(kept)] = kept
    return longer
