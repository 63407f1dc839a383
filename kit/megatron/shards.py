"""Shards to names: a Megatron GPT's tensors merged under Hugging Face Qwen2 names, and full tensors cut back into any layout.

`merge` is collective and gives every rank all full tensors, in their own dtype, on the host; `full_tensors` gives them to rank 0 one by
one. `destinations` gives the places of full tensors on a rank; `load_full` puts all of them there. All know the dense model and
experts (under Qwen2-MoE names). `made_of`, `views`, `share` and `join` are the mapping itself and need no ranks. Limits: the local layer
spec of kit.megatron.model, tied embeddings, no padded vocabulary; a rank holds the whole model while it merges.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.megatron.groups.handle import parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]
Destination = tuple[torch.Tensor, "Callable[[torch.Tensor], torch.Tensor]"]

# How full tensors lie in one shard: the same everywhere; cut by rows or by columns; query, key and value by group; gate above up.
WHOLE, ROWS, COLUMNS, QKV, GATE_UP = "whole", "rows", "columns", "qkv", "gate-up"
EMBEDDING = (ROWS, ("model.embed_tokens.weight",))
MODEL = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "output_layer.weight": EMBEDDING,  # the last stage's own copy, where there is more than one stage
    "decoder.final_layernorm.weight": (WHOLE, ("model.norm.weight",)),
}
LAYER = {
    "input_layernorm.weight": (WHOLE, ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (QKV, tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": (QKV, tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.linear_proj.weight": (COLUMNS, ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": (WHOLE, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": (GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (COLUMNS, ("mlp.down_proj.weight",)),
    "mlp.router.weight": (WHOLE, ("mlp.gate.weight",)),
}
EXPERT = {
    "linear_fc1.weight": (GATE_UP, ("gate_proj.weight", "up_proj.weight")),
    "linear_fc2.weight": (COLUMNS, ("down_proj.weight",)),
}
IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)")
NAMED = 5  # tensors of each kind that a refusal names


class Place(NamedTuple):
    """What a cut needs to know: which of how many tensor ranks, the width of a head, and how many queries share a key."""

    rank: int
    size: int
    head: int
    queries: int


class Part(NamedTuple):
    """A parameter of this rank, the full tensors that it is a part of, which part, and the ranks that have the others."""

    name: str
    param: Any
    how: str
    full: tuple[str, ...]
    place: Place
    group: Any


def load_full(chunks: Sequence[Any], full: Mapping[str, torch.Tensor]) -> None:
    """Fill the shards of every rank, or refuse on every rank with nothing changed. Collective.

    A rank needs the tensors of its own stage and experts alone. An optimizer's master copies are the caller's to refresh
    (`reload_model_params`).
    """
    check_full(chunks, full)
    for name, places in destinations(chunks).items():
        for into, take in places:
            into.copy_(take(full[name]))


def destinations(chunks: Sequence[Any]) -> dict[str, list[Destination]]:
    """Where each full tensor that this rank needs goes: a view of a live parameter, and a function that takes what belongs there.

    Full tensors are applied one by one in any order: `into.copy_(take(full))`. What is taken is a view of the full tensor, in the
    shape of `into`; a full tensor of another shape is refused. Views outlive a storage that is resized away and back.
    """
    found: dict[str, list[Destination]] = {}
    for chunk in chunks:
        for part in parts(chunk):
            for (name, shape), into in zip(_shapes(part), views(part.how, part.param.data, part.place), strict=True):
                take = functools.partial(_taken, part, name, shape, into.shape)
                found.setdefault(name, []).append((into, take))
    return found


def check_full(chunks: Sequence[Any], full: Mapping[str, torch.Tensor]) -> None:
    """Refuse on every rank full tensors that `load_full` could not load, by names and shapes. Collective."""
    own = [part for chunk in chunks for part in parts(chunk)]
    wanted = {name: shape for part in own for name, shape in _shapes(part)}
    missing = wanted.keys() - full.keys()
    misshaped = {
        f"{name} is {tuple(full[name].shape)} and must be {shape}"
        for name, shape in wanted.items()
        if name in full and tuple(full[name].shape) != shape
    }
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (set(wanted), missing, misshaped, set(full)))
    known, missing, misshaped, given = (set[str]().union(*each) for each in zip(*said, strict=True))
    complaints = [
        f"missing: {_some(missing)}" if missing else "",
        f"wrong shape: {_some(misshaped)}" if misshaped else "",
        f"unknown to this model: {_some(given - known)}" if given - known else "",
    ]
    if any(complaints):
        raise BadInput(f"these tensors do not fill the model: {'; '.join(filter(None, complaints))}")


def merge(chunks: Sequence[Any], tensors: Callable[[Any], torch.Tensor] = lambda param: param.data) -> Tensors:
    """All full tensors, on every rank, on the host, sharing no memory with the job. Collective.

    `tensors` gives what to merge of a parameter, its gradient perhaps. What several ranks have is taken from one of them, the
    tied embedding too: in a gradient both copies hold the whole sum, once gradients are finalised.
    """
    own: Tensors = {}
    for chunk in chunks:
        for part in parts(chunk):
            own |= whole(part, tensors(part.param))
    if any(".experts." in name for name in own):
        own = _shared(own, parallel_state().get_expert_model_parallel_group())
    own = _shared(own, parallel_state().get_pipeline_model_parallel_group())
    return {name: value.to("cpu", copy=True) for name, value in sorted(own.items())}


def by_rank(chunks: Sequence[Any], tensors: Callable[[Any], torch.Tensor]) -> Tensors:
    """The parts of all model-parallel ranks, by rank and name, for a model whose whole tensors are not known. Collective."""
    group = parallel_state().get_model_parallel_group()
    named = [pair for chunk in chunks for pair in chunk.module.named_parameters()]
    own = {name: tensors(param).detach().cpu().clone() for name, param in named}
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, own, group=group)
    return {f"{rank}.{name}": value for rank, part in enumerate(everybody) for name, value in part.items()}


def full_tensors(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every full tensor on the job's rank 0, in its own dtype, one parameter's at a time; nothing elsewhere. Collective.

    Each comes from the first rank that has it, experts of all ranks too. Every rank runs it to its end: those that send wait. What
    no other tensor rank has a part of may be a view of the live weights.
    """
    own = [part for chunk in chunks for part in parts(chunk)]
    rank = dist.get_rank()
    said: list[Any] = [None] * dist.get_world_size()
    mine = [(dist.get_process_group_ranks(part.group), part.param.dtype, dict(_shapes(part))) for part in own]
    dist.all_gather_object(said, mine)
    seen: set[str] = set()
    for home, index in ((home, index) for home, each in enumerate(said) for index in range(len(each))):
        ranks, dtype, shapes = said[home][index]
        if shapes.keys() <= seen:
            continue  # another replica's, or the last stage's copy of the tied embedding
        seen |= shapes.keys()
        full = whole(own[index], own[index].param.data) if rank in ranks else {}
        if rank == home == 0:
            yield from full.items()
        elif rank == home:
            for value in full.values():
                dist.send(value.contiguous(), 0)
        elif rank == 0:
            for name, shape in shapes.items():
                value = torch.empty(shape, dtype=dtype, device=own[0].param.device)
                dist.recv(value, home)
                yield name, value


def whole(part: Part, tensor: torch.Tensor) -> Tensors:
    """The full tensors of which all ranks of a part's group have one, by name. Collective over that group."""
    return dict(zip(part.full, join(part.how, _gathered(tensor, part), part.place), strict=True))


def parts(chunk: Any) -> Iterator[Part]:
    """Every parameter of a chunk."""
    module = bare(chunk)
    config = module.config
    first_layer = module.decoder.layers[0].layer_number - 1
    first_expert = 0
    if config.num_moe_experts:
        local = config.num_moe_experts // parallel_state().get_expert_model_parallel_world_size()
        first_expert = parallel_state().get_expert_model_parallel_rank() * local
    for name, param in module.named_parameters():
        if ".experts." in name:
            group = parallel_state().get_expert_tensor_parallel_group()
        else:
            group = parallel_state().get_tensor_model_parallel_group()
        place = Place(
            rank=dist.get_rank(group),
            size=dist.get_world_size(group),
            head=config.kv_channels,
            queries=config.num_attention_heads // config.num_query_groups,
        )
        how, full = made_of(name, first_layer=first_layer, first_expert=first_expert)
        yield Part(name, param, how, full, place, group)


def made_of(name: str, *, first_layer: int = 0, first_expert: int = 0) -> tuple[str, tuple[str, ...]]:
    """How a Megatron parameter is made, and of which full tensors. Its rank's layers and experts start at these numbers."""
    if name in MODEL:
        return MODEL[name]
    found = IN_LAYER.fullmatch(name)
    table = EXPERT if found and found[2] else LAYER
    if not found or found[3] not in table:
        raise BadInput(f"{name} is no parameter of the models that the kit knows")
    how, full = table[found[3]]
    owner = f"model.layers.{first_layer + int(found[1])}."
    if found[2]:
        owner += f"mlp.experts.{first_expert + int(found[2])}."
    return how, tuple(owner + each for each in full)


def views(how: str, shard: torch.Tensor, place: Place) -> Sequence[torch.Tensor]:
    """The parts of a shard, or of all of them joined, that lie in each of the full tensors."""
    if how == GATE_UP:
        return shard.chunk(2)
    if how != QKV:
        return [shard]
    groups = shard.view(-1, (place.queries + 2) * place.head, *shard.shape[1:])
    ends = (0, place.queries * place.head, (place.queries + 1) * place.head, (place.queries + 2) * place.head)
    return [groups[:, start:end] for start, end in itertools.pairwise(ends)]


def share(how: str, full: torch.Tensor, place: Place) -> torch.Tensor:
    """What one rank has of a full tensor, as a view of it. The view of the shard where it belongs may have one dimension more."""
    return full if how == WHOLE else full.chunk(place.size, dim=1 if how == COLUMNS else 0)[place.rank]


def join(how: str, shards: Sequence[torch.Tensor], place: Place) -> list[torch.Tensor]:
    """The full tensors of the shards of all ranks in order; of a single shard they are views where that can be."""
    if how == WHOLE:
        return [shards[0]]
    if how == GATE_UP:
        return [_cat(half) for half in zip(*(views(how, shard, place) for shard in shards), strict=True)]
    joined = views(how, _cat(shards, dim=1 if how == COLUMNS else 0), place)
    return [each.flatten(0, 1) for each in joined] if how == QKV else [*joined]


def bare(chunk: Any) -> Any:
    """The GPTModel inside of what wraps it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _shapes(part: Part) -> Iterator[tuple[str, Shape]]:
    """The full tensors that a parameter asks for."""
    place, (rows, *rest) = part.place, part.param.shape
    if part.how == COLUMNS:
        rest[0] *= place.size
    elif part.how != WHOLE:
        rows *= place.size
    shares = {QKV: (place.queries, 1, 1), GATE_UP: (1, 1)}.get(part.how, (1,))
    for name, share in zip(part.full, shares, strict=True):
        yield name, (rows * share // sum(shares), *rest)


def _taken(part: Part, name: str, shape: Shape, into: Shape, full: torch.Tensor) -> torch.Tensor:
    if tuple(full.shape) != shape:
        raise BadInput(f"{name} is {tuple(full.shape)} and must be {shape}")
    return share(part.how, full, part.place).view(into)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(list(tensors), dim) if len(tensors) > 1 else tensors[0]


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + more


def _gathered(shard: torch.Tensor, part: Part) -> list[torch.Tensor]:
    shard = shard.detach().contiguous()
    if part.how == WHOLE or part.place.size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(part.place.size)]
    dist.all_gather(shards, shard, group=part.group)
    return shards


def _shared(own: Tensors, group: Any) -> Tensors:
    """What other ranks of a group have too: each tensor comes from the first rank that has it."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return own
    said: list[Any] = [None] * len(ranks)
    dist.all_gather_object(said, {name: (tuple(value.shape), value.dtype) for name, value in own.items()}, group=group)
    device = next(iter(own.values())).device
    shared: Tensors = {}
    for name in sorted(set().union(*said)):
        having = [rank for rank, names in enumerate(said) if name in names]
        if len(having) == len(ranks):
            shared[name] = own[name]
            continue
        shape, dtype = said[having[0]][name]
        value = own[name].contiguous() if name in own else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, ranks[having[0]], group=group)
        shared[name] = value
    return shared
