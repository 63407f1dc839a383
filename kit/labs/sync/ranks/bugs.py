"""The known bugs of the lab `sync`: what a fault puts in place of the right code.

Phases are imported here so that the rehearsals among them bind the right code too, before anything is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kit.engines.hosted import EngineContext, LoadedModel, MegatronModel
from kit.engines.hugging import TransformersModel
from kit.engines.vllm import EngineFailed, VllmModel, write_folder
from kit.errors import KitError
from kit.labs.sync.lab import SyncConfig
from kit.labs.sync.ranks import phases  # noqa: F401 - see above
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.scenes import GONE, WHY
from kit.labs.sync.ranks.side import ANY, error_of
from kit.labs.sync.ranks.trainer import SyncTrainer, memory_of
from kit.megatron import shards
from kit.megatron.tensors import Elsewhere, Item
from kit.sync.adopting import Adopting, is_adopted
from kit.sync.buckets import Bound, Cut, Destination, Key, Layout
from kit.sync.cache import BASE, Cache, Segment, starts
from kit.sync.deltas import Packed
from kit.sync.groups import Broadcast
from kit.sync.link import PeerSilent
from kit.sync.protocols import EngineDouble
from kit.sync.receiver import Call, wrong_bytes
from kit.sync.sender import STEPS, Gathered, OtherBase, Sending
from kit.sync.serving import Gate, Serving
from kit.target import replaced

tell, compare_base, base = Sending.tell, Sending.compare_base, Sending.base
answers, abandon, close_transports = Sending.answers, Sending.abandon, Sending.close
pass_on, teardown = Sending.pass_on, Sending.teardown
activate, apply, apply_bucket, look, undo = Call.activate, Call.apply, Call.apply_bucket, Call.look, Call.undo
close, discard = Call.close, Cache.discard
close_group = Broadcast.close
adopt_bucket = Adopting.apply
make_job, gather, refresh = SyncTrainer.make_job, SyncTrainer.gather, SyncTrainer.refresh
offload, map_buckets = SyncTrainer.offload, SyncTrainer.map_buckets
fill_from_buckets = SyncTrainer.fill_from_buckets
prepare, destinations = SyncReplica.prepare, SyncReplica.destinations
wake, finalize = SyncReplica.wake, SyncReplica.finalize
finalize_call, finalize_engine = Call.finalize, LoadedModel.finalize
make_engine, load_by_name, engine_logits = TransformersModel.__init__, TransformersModel.load, TransformersModel.logits
load_in_vllm, vllm_logits = VllmModel.load, VllmModel.logits
writing, megatron_logits = Serving.writing, MegatronModel.logits
full_tensors, all_destinations, views = shards.full_tensors, shards.destinations, shards.views

KEPT: list[Any] = []  # leaked buffers
KEPT_GROUPS: list[Any] = []
LATE: list[Callable[[], None]] = []  # buckets that are filled later
LEAKED = 2  # groups, before the rehearsed failures


def host_of(call: Call) -> Any:
    """The lab's own host of the receiver."""
    return call.receiver.host


# -- on the trainer --------------------------------------------------------------------------------------------------------


def keeps_a_copy(config: SyncConfig) -> bool:  # noqa: ARG001 - in place of `streams`
    """The bug lies in the cache, which a ring does not have."""
    return False


class OldBytes(Bound):
    """Weights without their first bucket, which keeps the bytes of the active version."""

    def __init__(self, cache: Cache, tensors: Mapping[Key, torch.Tensor]) -> None:
        super().__init__(cache.layout, tensors)
        self.old = cache.bucket(cache.active, 0).clone() if cache.active != BASE else None

    def pack(self, index: int, out: torch.Tensor, *, fresh: bool = False, hot: bool = False) -> None:
        super().pack(index, out, fresh=fresh, hot=hot)
        if index == 0 and self.old is not None:
            out.copy_(self.old)


def sends_an_old_bucket(trainer: SyncTrainer) -> Gathered:
    return OldBytes(trainer.cache, gather(trainer))


def refreshes_after_an_offload(trainer: SyncTrainer, cycle: int) -> None:
    trainer.job.mover.release(("weights",))
    refresh(trainer, cycle)
    trainer.job.mover.restore()


def gathers_empty_tensors(trainer: SyncTrainer) -> dict[Key, torch.Tensor]:
    """Without its guard a cache packs whatever memory the allocator returns next: here zeros, like fresh pages."""
    if not trainer.job.mover.away:
        return gather(trainer)
    specs = trainer.cache.layout.specs if trainer.sends else ()
    return {spec.key: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}


def gathers_the_base(trainer: SyncTrainer) -> dict[Key, torch.Tensor]:
    """The weights that were gathered first, under the names of the new ones: for the sync and for the digests that replicas must have."""
    base = vars(trainer).setdefault("base_weights", {})
    return {key: base.setdefault(key, tensor.clone()) for key, tensor in gather(trainer).items()}


def covers_nothing(elsewhere: Elsewhere, item: Item) -> bool:  # noqa: ARG001 - in place of `covers`
    return False


def keeps_what_it_gathered(trainer: SyncTrainer) -> Gathered:
    tensors = gather(trainer)
    vars(trainer)["gathered"] = {key: tensor.clone() for key, tensor in tensors.items()}
    return tensors


def keeps_a_copy_on_every_parameter(trainer: SyncTrainer) -> dict[Key, torch.Tensor]:
    """As a synchroniser does that compares the next version with it."""
    for param in (param for chunk in trainer.job.chunks for param in chunk.parameters()):
        param.last_sent = param.detach().clone()
    return gather(trainer)


def skips_the_tied_name(trainer: SyncTrainer, weights: Cut) -> None:
    named = {name for chunk in trainer.job.chunks for name, _ in shards.unwrapped(chunk).named_parameters()}
    if "embedding.word_embeddings.weight" not in named:
        for into, _ in weights.destinations["model.embed_tokens.weight"]:
            into.zero_()  # as new memory is
        weights.destinations = {**weights.destinations, "model.embed_tokens.weight": ()}
    fill_from_buckets(trainer, weights)


NEVER_ADOPTED = property(lambda _: False)


def packs_into_new_memory(cache: Cache) -> tuple[Segment, bool]:
    if cache.latest != cache.active:
        cache._give_up(cache.latest)
    return Segment(cache._size), True


class LateBytes(Bound):
    """Weights whose last bucket is filled when the sync is almost over."""

    def pack(self, index: int, out: torch.Tensor, *, fresh: bool = False, hot: bool = False) -> None:
        if index < len(self.layout.buckets) - 1:
            super().pack(index, out, fresh=fresh, hot=hot)
        else:
            LATE.append(lambda: Bound.pack(self, index, out))


def fills_the_last_bucket_late(trainer: SyncTrainer) -> Gathered:
    return LateBytes(trainer.cache.layout, gather(trainer))


def fills_late(sending: Sending) -> None:
    teardown(sending)
    while LATE:
        LATE.pop()()


def writes_to_a_bucket(trainer: SyncTrainer, cycle: int) -> None:
    offload(trainer, cycle)
    if trainer.sends:
        trainer.cache.bucket(trainer.version, 0)[:4] ^= 1


def maps_the_version_before(trainer: SyncTrainer) -> tuple[Layout, Sequence[int], Segment]:
    layout, places, segment = map_buckets(trainer)
    before = trainer.cache._spare if trainer.sends else []  # its memory is kept for the next version
    return layout, places, before[0] if before else segment


def resumes_with_other_weights(trainer: SyncTrainer) -> None:
    make_job(trainer)
    with trainer.as_job():
        trainer.job.step()


# -- on both ends ----------------------------------------------------------------------------------------------------------


def full_tensors_by_heads(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Queries are exported in another order of heads than models with these names expect."""
    for name, full in full_tensors(chunks):
        yield name, with_other_heads(chunks, full) if "q_proj" in name else full


def destinations_by_heads(chunks: Sequence[Any]) -> dict[str, list[Destination]]:
    """And loaded in the same wrong order, so that what was exported comes back bit for bit."""

    def back(take: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda full: take(with_other_heads(chunks, full, back=True))

    places = all_destinations(chunks)
    for name in (name for name in places if "q_proj" in name):
        places[name] = [(into, back(take)) for into, take in places[name]]
    return places


def with_other_heads(chunks: Sequence[Any], full: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Heads that share a key lie side by side, or `groups` heads apart."""
    config = shards.unwrapped(chunks[0]).config
    groups = config.num_query_groups
    sizes = groups, config.num_attention_heads // groups
    return full.reshape(*(sizes[::-1] if back else sizes), -1).transpose(0, 1).reshape(full.shape)


# -- at the sender's end ---------------------------------------------------------------------------------------------------

ACTIVATE_FIRST = ("apply", "teardown", "finalize", "activate", "publish")
PUBLISH_FIRST = ("publish", *(step for step in STEPS if step != "publish"))


def bumps_in_an_expansion(
    sending: Sending, kind: str, each: Callable[[str], dict[str, Any]] = lambda _: {}, **message: Any
) -> None:
    if kind == "publish" and sending.report.path == "expand":
        message["version"] += 1
    tell(sending, kind, each, **message)


def leaves_room_behind_the_buckets(sizes: Sequence[int], slots: int = 0) -> tuple[tuple[int, ...], int]:
    """As much as 40 % of the buckets."""
    places, total = starts(sizes, slots)
    return places, total * 7 // 5


def trusts_the_base(sending: Sending, weights: Gathered) -> None:
    with contextlib.suppress(OtherBase):
        compare_base(sending, weights)


def waits_four_times_as_long(
    sending: Sending, kind: str, grace_s: float
) -> tuple[dict[str, dict[str, Any]], KitError | None]:
    before = sending.sender.timeout_s
    sending.sender.timeout_s = 4 * before
    try:
        return answers(sending, kind, grace_s)
    finally:
        sending.sender.timeout_s = before


def closes_once_all_is_read(sending: Sending) -> None:
    """Like a transport whose threads write the rest first."""
    for transport in sending.transports:
        waits = True
        while waits:
            waits = isinstance(error_of(transport.flush, ANY), PeerSilent)
    close_transports(sending)


def gives_up_without_a_reason(sending: Sending, error: BaseException) -> None:
    abandon(sending, KitError(type(error).__name__))


def opens_a_file_when_one_is_gone(sending: Sending, error: BaseException) -> None:
    if WHY[GONE] in str(error):
        KEPT.append(os.open(os.devnull, os.O_RDONLY))
    abandon(sending, error)


def takes_any_acknowledgement(sending: Sending) -> None:
    """Nobody is asked for digests of the result."""


def takes_what_it_sent_for_the_base(sending: Sending) -> tuple[int, Packed]:
    """A copy of this version is the base of the next one, even if no receiver gets this one."""
    active, bucket = base(sending)
    cache, version, sender = sending.cache, sending.report.version, vars(sending.sender)
    early = sender.get("early")
    sender["early"] = [cache.bucket(version, index).clone() for index in range(len(sending.layout.buckets))]
    return active, early.__getitem__ if early else bucket


def keeps_only_what_was_sent(sending: Sending) -> tuple[int, Packed]:
    """The rest of the copy is zero, as in new memory."""
    active, bucket = base(sending)
    cache, version, sender = sending.cache, sending.report.version, vars(sending.sender)
    sent = sender.get("sent")
    packed = [cache.bucket(version, index).clone() for index in range(len(sending.layout.buckets))]
    sender["sent"] = [torch.where(new == bucket(index), 0, new) for index, new in enumerate(packed)]
    return active, sent.__getitem__ if sent else bucket


def keeps_its_group(transport: Broadcast) -> None:
    """In the first syncs of a run. Later syncs are made to fail, and their peers wait until a group is destroyed."""
    if len(KEPT_GROUPS) < LEAKED:
        KEPT_GROUPS.append(transport.group)
        transport.group = None
    close_group(transport)


# -- at a receiver's end ---------------------------------------------------------------------------------------------------


IMPATIENT = 1  # the receivers wait no longer than the sender


def names_the_next_bucket(differing: Sequence[tuple[int, str]]) -> str:
    return wrong_bytes([(bucket + 1, name) for bucket, name in differing])


def runs_at_once(call: Call, message: dict[str, Any]) -> None:
    call.commit()
    activate(call, message)


def swaps_two_rows(call: Call, message: dict[str, Any]) -> None:
    apply(call, message)
    rows = next(tensor for _, tensor in host_of(call).model.versioned() if tensor.dim() == 2).detach()
    rows[[0, 1]] = rows[[1, 0]]


def writes_no_words(weights: Cut, name: str, positions: torch.Tensor, words: torch.Tensor) -> None:
    """Nothing is written."""


def drops_the_last_bucket(call: Call, index: int, buffer: torch.Tensor) -> None:
    if index < len(call.layout.buckets) - 1:
        apply_bucket(call, index, buffer)


def adopts_every_second_bucket_again(weights: Adopting, index: int, buffer: torch.Tensor) -> None:
    before = [weight.data for weight in weights._own]
    adopt_bucket(weights, index, buffer)
    for weight, old in zip(weights._own, before, strict=True) if index % 2 else ():
        if is_adopted(old):
            weight.data = old


def finds_no_place(*_: Any) -> None:
    return None


def reads_the_first_bucket_again(call: Call, index: int, buffer: torch.Tensor) -> None:
    if index == 0:
        vars(call)["first"] = buffer.clone()
    elif index == 1:
        common = min(buffer.numel(), vars(call)["first"].numel())
        buffer = torch.cat([vars(call).pop("first")[:common], buffer[common:]])
    apply_bucket(call, index, buffer)


def keeps_buckets_that_begin_alike(call: Call, index: int, buffer: torch.Tensor) -> None:
    kept = vars(host_of(call)).setdefault("kept_buckets", {})
    if index not in kept or not torch.equal(kept[index][:256], buffer[:256]):
        kept[index] = buffer.clone()
    apply_bucket(call, index, kept[index])


def reads_an_element_too_far(call: Call, index: int, buffer: torch.Tensor) -> None:
    if index == 0:
        _, _, size, offset = call.layout.buckets[0][0]
        buffer = buffer.clone()
        element = call.layout.specs[0].dtype.itemsize
        buffer[offset : offset + size - element] = buffer[offset + element : offset + size].clone()
    apply_bucket(call, index, buffer)


def keeps_the_memory_mapped(call: Call, index: int, buffer: torch.Tensor) -> None:
    if index == 0:
        KEPT.append(buffer)
    look(call, index, buffer)


def keeps_what_arrives(call: Call, index: int, buffer: torch.Tensor) -> None:
    KEPT.append(buffer.clone())
    look(call, index, buffer)


def keeps_what_it_sends(sending: Sending, index: int) -> None:
    KEPT.append(sending.cache.bucket(sending.report.version, index).clone())
    pass_on(sending, index)


def applies_without_a_gate(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - a step of the receiver
    """And a forward runs between the two halves of the buckets, as happens sooner or later."""
    serving, middle = host_of(call).serving, len(call.stored) // 2
    call.changing = True
    for index, buffer in enumerate(call.stored):
        if index == middle and serving.running:
            serving.next()
        call.apply_bucket(index, buffer)
    call.link.send({"kind": "applied"})


def opens_the_gate_early(call: Call) -> None:
    """Forwards run again before the last bucket is applied."""
    for index, buffer in enumerate(call.stored):
        if index == len(call.stored) - 1:
            call.writing.close()
        call.apply_bucket(index, buffer)


def dies_in_the_middle(call: Call, index: int, buffer: torch.Tensor) -> None:
    if index == len(call.layout.buckets) // 2 and host_of(call).last:
        os.kill(os.getpid(), signal.SIGKILL)
    look(call, index, buffer)


def stalls_in_the_middle(call: Call, index: int, buffer: torch.Tensor) -> None:
    """Read messages without an answer until the sender gives up."""
    while index == len(call.layout.buckets) // 2 and host_of(call).last:
        with contextlib.suppress(PeerSilent):
            if call.link.receive("the end of the sync")[0]["kind"] == "failed":
                raise KitError("stalled on purpose until the sender gave up")
    look(call, index, buffer)


def keeps_its_connection(call: Call) -> None:
    """Of a sync that failed."""
    if not call.committed and call.path:
        KEPT.append(os.dup(call.link._sock.fileno()))
    close(call)


def derives_nothing_after_an_undo(call: Call) -> None:
    """What is derived stays that of the new weights."""
    host = host_of(call)
    vars(host)["finalize"] = lambda: None
    undo(call)
    del vars(host)["finalize"]


def discards_with_an_error(cache: Cache, version: int) -> None:
    discard(cache, version)
    if version != BASE:
        raise KeyError(version)


def keeps_new_weights(call: Call) -> None:
    if host_of(call).last:
        call.before = None
    undo(call)


# -- on a replica ----------------------------------------------------------------------------------------------------------


def takes_the_next_ranks_shards(replica: SyncReplica) -> Mapping[str, Sequence[Destination]]:

    def of_next_rank(take: Any) -> Any:
        part, *rest = take.args
        turned = part.place._replace(rank=(part.place.rank + 1) % part.place.size)
        return functools.partial(take.func, part._replace(place=turned), *rest)

    places = destinations(replica).items()
    return {name: [(into, of_next_rank(take)) for into, take in shards] for name, shards in places}


def transposes_a_square_tensor(replica: SyncReplica) -> Mapping[str, Sequence[Destination]]:
    """No comparison of shapes sees it."""

    def turned(take: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda full: take(full.t())

    places = dict(destinations(replica))
    square = min(name for name in places if name.endswith("o_proj.weight"))
    places[square] = [(into, turned(take)) for into, take in places[square]]
    return places


def writes_into_an_old_tensor(replica: SyncReplica) -> Mapping[str, Sequence[Destination]]:
    """A loader that was bound to a tensor which the model no longer uses reports success."""
    places = dict(destinations(replica))
    last = max(places)
    places[last] = [(into.clone(), take) for into, take in places[last]]
    return places


def loads_queries_first(replica: SyncReplica) -> Mapping[str, Sequence[Destination]]:
    """The layout of vLLM and of Hugging Face's fused models."""

    def side_by_side(how: str, fused: torch.Tensor, place: Any) -> Sequence[torch.Tensor]:
        interleaved = views(how, fused, place)
        if how != shards.QKV:
            return interleaved
        rows = [view.numel() * len(fused) // fused.numel() for view in interleaved]
        return [part.view(view.shape) for part, view in zip(torch.split(fused, rows), interleaved, strict=True)]

    with replaced({"kit.megatron.shards:views": side_by_side}):
        return destinations(replica)


def loads_the_next_expert(replica: SyncReplica) -> Mapping[str, Sequence[Destination]]:
    places = destinations(replica)

    def next_one(name: str) -> str:
        before, experts, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        following = (int(number) + 1) % replica.config.experts
        return f"{before}{experts}{following}.{rest}"

    return {name: places[next_one(name) if ".experts." in name else name] for name in places}


def not_listed(names: Iterable[str]) -> str:
    return max(name for name in names if "input_layernorm" in name)


def packs_all_but_one(config: SyncConfig, tensors: dict[Key, torch.Tensor]) -> Cache:
    lacking = not_listed(name for name, _ in tensors)
    return memory_of(config, {key: tensor for key, tensor in tensors.items() if key[0] != lacking})


def expects_all_but_one(replica: SyncReplica) -> Mapping[str, Sequence[Destination]]:
    places = dict(destinations(replica))
    del places[not_listed(places)]
    return places


def packs_no_scales(config: SyncConfig, tensors: dict[Key, torch.Tensor]) -> Cache:
    return memory_of(config, {key: tensor for key, tensor in tensors.items() if not key[0].endswith(shards.SCALES)})


def expects_no_scales(replica: SyncReplica) -> Mapping[str, Sequence[Destination]]:
    return {name: places for name, places in destinations(replica).items() if not name.endswith(shards.SCALES)}


def wakes_without_constants(replica: SyncReplica) -> None:
    """What no sync brings is allocated again, and left empty."""
    wake(replica)
    for _, tensor in replica.model.constants():
        tensor.zero_()


def finalizes_constants_again(replica: SyncReplica) -> None:
    """A step that must run once per load runs at every sync, for tensors that were not loaded."""
    finalize(replica)
    for _, tensor in replica.model.constants():
        tensor.copy_(tensor.flip(0))


class ReadsAhead(Gate):
    """A forward that reads one tensor before it passes the gate."""

    def __init__(self, timeout_s: float, tensor: torch.Tensor) -> None:
        super().__init__(timeout_s)
        self.tensor = tensor.detach()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        ahead = self.tensor.clone()
        with super().reading():
            now = self.tensor.clone()
            self.tensor.copy_(ahead)
            try:
                yield
            finally:
                self.tensor.copy_(now)


def reads_ahead(replica: SyncReplica, cycle: int) -> None:
    prepare(replica, cycle)
    _, weight = next(replica.model.versioned())
    replica.serving.gate = ReadsAhead(replica.serving.gate.timeout_s, weight)


@contextlib.contextmanager
def repeats_its_last_answer(serving: Serving) -> Iterator[None]:
    with writing(serving):
        serving.served += serving.served[-1:]
        yield


def waits_no_longer_than_the_gate(serving: Serving) -> contextlib.AbstractContextManager[None]:
    return serving.gate.reading()


def keeps_the_first_tokens(model: MegatronModel, tokens: torch.Tensor) -> torch.Tensor:
    return megatron_logits(model, vars(model).setdefault("first_tokens", tokens))


# -- in an engine ----------------------------------------------------------------------------------------------------------


def loads_into_the_wrong_half(engine: TransformersModel, name: str, tensor: torch.Tensor) -> None:
    halves = ("gate_proj", "up_proj") if "gate_proj" in name else ("up_proj", "gate_proj")
    load_by_name(engine, name.replace(*halves), tensor)


def loads_into_the_wrong_half_of_vllm(engine: VllmModel, name: str, tensor: torch.Tensor) -> None:
    halves = ("gate_proj", "up_proj") if "gate_proj" in name else ("up_proj", "gate_proj")
    load_in_vllm(engine, name.replace(*halves), tensor)


def unties_the_head(engine: TransformersModel, ctx: EngineContext) -> None:
    make_engine(engine, ctx)
    head = engine.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def writes_an_untied_head(folder: Path, ctx: EngineContext) -> None:
    """The head has a name of its own, with which no tensor comes later."""
    head = {"lm_head.weight": ctx.weights["model.embed_tokens.weight"].clone()}
    write_folder(folder, replace(ctx, weights={**ctx.weights, **head}))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))


EMPTIED_SIDE = Path(__file__).with_name("emptiedside.py")


def leaves_the_rotary_table_empty(model: LoadedModel) -> None:
    finalize_engine(model)
    for name, tensor in model.constants():
        if "rotary" in name:
            tensor.zero_()


def answers_asleep(engine: TransformersModel, tokens: torch.Tensor) -> torch.Tensor:
    if not engine._away:
        return engine_logits(engine, tokens)
    engine.wake()
    logits = engine_logits(engine, tokens)
    engine.sleep()
    return logits


def answers_asleep_in_vllm(engine: VllmModel, tokens: torch.Tensor) -> torch.Tensor:
    try:
        return vllm_logits(engine, tokens)
    except EngineFailed:
        engine.wake()
        logits = vllm_logits(engine, tokens)
        engine.sleep()
        return logits


PACKED = "packed"  # as vLLM does it


def keeps_the_prefix_cache(engine: VllmModel) -> None:
    """Nothing is dropped."""


def never_finishes_in_vllm(engine: VllmModel) -> None:
    """The update stays open until the next one begins."""
    engine.drop_cache()


def forgets_an_open_update(engine: VllmModel) -> None:
    """It stays open in vLLM, which refuses the next one."""
    engine.open = False


def finalizes_twice(call: Call, message: dict[str, Any]) -> None:
    host_of(call).finalize()
    finalize_call(call, message)


# -- on a double of an engine ----------------------------------------------------------------------------------------------


def keeps_prefixes(engine: EngineDouble) -> None: ...


def never_finishes(engine: EngineDouble) -> None:
    engine.driven = False
    engine.drop_prefixes()


def leaves_the_update_open(engine: EngineDouble) -> None:
    engine.driven = False
