"""Shards to names: a Megatron GPT's tensors merged under Hugging Face Qwen2 names, and full tensors cut back into any layout.

`merge` is collective and gives every rank all full tensors, in their own dtype, on the host; `full_tensors` gives them to rank 0 one by
one. `destinations` gives the places of full tensors on a rank; `load_full` puts all of them there. All know the dense model and
experts (under Qwen2-MoE names). `made_of`, `views`, `share` and `join` are the mapping itself and need no ranks. Limits: the local layer
spec of kit.megatron.model, tied embeddings, no padded vocabulary; a rank holds the whole model while it merges.

`load` and `export` do so with a Hugging Face checkpoint folder. A rank that loads reads the bytes of its own shards; an export passes one
parameter at a time to rank 0, which writes. An export straight after a load gives the folder's files byte for byte;
docs/checkpoint.md says when not. The package safetensors reads and checks the files. Limits: dense Qwen2 with a tied head; every rank
must reach the folder that it loads, or that an export is to be like; a rank 0 that is killed while it exports leaves a hidden
`.NAME.PID.partial` beside the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.megatron.config import read_geometry
from kit.megatron.handles import parallel_state

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
    "self_attention.core_attention.k_scale": (WHOLE, ("self_attn.attn.k_scale",)),
    "self_attention.core_attention.v_scale": (WHOLE, ("self_attn.attn.v_scale",)),
    "pre_mlp_layernorm.weight": (WHOLE, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": (GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (COLUMNS, ("mlp.down_proj.weight",)),
    "mlp.router.weight": (WHOLE, ("mlp.gate.weight",)),
    # The low-rank adapters of kit.megatron.lora.
    "self_attention.linear_qkv.lora_A": (WHOLE, ("self_attn.qkv_proj.lora_A",)),
    "self_attention.linear_qkv.lora_B": (QKV, tuple(f"self_attn.{x}_proj.lora_B" for x in "qkv")),
    "self_attention.linear_proj.lora_A": (COLUMNS, ("self_attn.o_proj.lora_A",)),
    "self_attention.linear_proj.lora_B": (WHOLE, ("self_attn.o_proj.lora_B",)),
    "mlp.linear_fc1.lora_A": (WHOLE, ("mlp.gate_up_proj.lora_A",)),
    "mlp.linear_fc1.lora_B": (GATE_UP, ("mlp.gate_proj.lora_B", "mlp.up_proj.lora_B")),
    "mlp.linear_fc2.lora_A": (COLUMNS, ("mlp.down_proj.lora_A",)),
    "mlp.linear_fc2.lora_B": (WHOLE, ("mlp.down_proj.lora_B",)),
}
SCALES = ("k_scale", "v_scale")  # buffers of an attention layer, where a model has them (kit.megatron.scales)
EXPERT = {
    "linear_fc1.weight": (GATE_UP, ("gate_proj.weight", "up_proj.weight")),
    "linear_fc2.weight": (COLUMNS, ("down_proj.weight",)),
}
IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)")
NAMED = 5  # tensors of each kind that a refusal names


class ShardPlace(NamedTuple):
    """What a cut needs to know: which of how many tensor ranks, the width of a head, and how many queries share a key."""

    rank: int
    size: int
    head: int
    queries: int


class ShardPart(NamedTuple):
    """A parameter of this rank, the full tensors that it is a part of, which part, and the ranks that have the others."""

    name: str
    param: Any
    how: str
    full: tuple[str, ...]
    place: ShardPlace
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
    destinations: dict[str, list[Destination]] = {}
    for chunk in chunks:
        for part in parts_of_chunk(chunk):
            for (name, shape), into in zip(_shapes(part), views(part.how, part.param.data, part.place), strict=True):
                take = functools.partial(_taken, part, name, shape, into.shape)
                destinations.setdefault(name, []).append((into, take))
    return destinations


def check_full(chunks: Sequence[Any], full: Mapping[str, torch.Tensor]) -> None:
    """Refuse on every rank full tensors that `load_full` could not load, by names and shapes. Collective."""
    own = [part for chunk in chunks for part in parts_of_chunk(chunk)]
    wanted = {name: shape for part in own for name, shape in _shapes(part)}
    missing = wanted.keys() - full.keys()
    misshaped = {
        f"{name} is {tuple(full[name].shape)} and must be {shape}"
        for name, shape in wanted.items()
        if name in full and tuple(full[name].shape) != shape
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (set(wanted), missing, misshaped, set(full)))
    known, missing, misshaped, names_given = (set[str]().union(*names) for names in zip(*gathered, strict=True))
    complaints = [
        f"missing: {_some(missing)}" if missing else "",
        f"wrong shape: {_some(misshaped)}" if misshaped else "",
        f"unknown to this model: {_some(names_given - known)}" if names_given - known else "",
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
        for part in parts_of_chunk(chunk):
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

    Each comes from the first rank that has it, experts of all ranks too. Every rank must exhaust the iterator; senders block until rank 0
    receives. What no other tensor rank has a part of may be a view of the live weights.
    """
    own = [part for chunk in chunks for part in parts_of_chunk(chunk)]
    rank = dist.get_rank()
    gathered: list[Any] = [None] * dist.get_world_size()
    own_parts = [(dist.get_process_group_ranks(part.group), part.param.dtype, dict(_shapes(part))) for part in own]
    dist.all_gather_object(gathered, own_parts)
    seen: set[str] = set()
    for home, index in (
        (home, index) for home, parts_of_rank in enumerate(gathered) for index in range(len(parts_of_rank))
    ):
        ranks, dtype, shapes = gathered[home][index]
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


def whole(part: ShardPart, tensor: torch.Tensor) -> Tensors:
    """The full tensors of which all ranks of a part's group have one, by name. Collective over that group."""
    return dict(zip(part.full, join(part.how, _gathered(tensor, part), part.place), strict=True))


def parts_of_chunk(chunk: Any) -> Iterator[ShardPart]:
    module = unwrapped(chunk)
    config = module.config
    first_layer = module.decoder.layers[0].layer_number - 1
    first_expert = 0
    if config.num_moe_experts:
        local = config.num_moe_experts // parallel_state().get_expert_model_parallel_world_size()
        first_expert = parallel_state().get_expert_model_parallel_rank() * local
    for name, param in [*module.named_parameters(), *named_scales(module)]:
        if ".experts." in name:
            group = parallel_state().get_expert_tensor_parallel_group()
        else:
            group = parallel_state().get_tensor_model_parallel_group()
        place = ShardPlace(
            rank=dist.get_rank(group),
            size=dist.get_world_size(group),
            head=config.kv_channels,
            queries=config.num_attention_heads // config.num_query_groups,
        )
        how, full = made_of(name, first_layer=first_layer, first_expert=first_expert)
        yield ShardPart(name, param, how, full, place, group)


def named_scales(module: Any) -> list[tuple[str, torch.Tensor]]:
    return [named for named in module.named_buffers() if named[0].endswith(SCALES)]


def made_of(name: str, *, first_layer: int = 0, first_expert: int = 0) -> tuple[str, tuple[str, ...]]:
    """How a Megatron parameter is made, and of which full tensors. Its rank's layers and experts start at these numbers."""
    if name in MODEL:
        return MODEL[name]
    match = IN_LAYER.fullmatch(name)
    table = EXPERT if match and match[2] else LAYER
    if not match or match[3] not in table:
        raise BadInput(f"{name} is not a parameter of a supported model")
    how, full = table[match[3]]
    owner = f"model.layers.{first_layer + int(match[1])}."
    if match[2]:
        owner += f"mlp.experts.{first_expert + int(match[2])}."
    return how, tuple(owner + suffix for suffix in full)


def views(how: str, shard: torch.Tensor, place: ShardPlace) -> Sequence[torch.Tensor]:
    """The parts of a shard, or of all of them joined, that lie in each of the full tensors."""
    if how == GATE_UP:
        return shard.chunk(2)
    if how != QKV:
        return [shard]
    groups = shard.view(-1, (place.queries + 2) * place.head, *shard.shape[1:])
    ends = (0, place.queries * place.head, (place.queries + 1) * place.head, (place.queries + 2) * place.head)
    return [groups[:, start:end] for start, end in itertools.pairwise(ends)]


def part_of_tensor(how: str, full: torch.Tensor, place: ShardPlace) -> torch.Tensor:
    """What one rank has of a full tensor, as a view of it. The view of the shard where it belongs may have one dimension more."""
    return full if how == WHOLE else full.chunk(place.size, dim=1 if how == COLUMNS else 0)[place.rank]


def join(how: str, shards: Sequence[torch.Tensor], place: ShardPlace) -> list[torch.Tensor]:
    """The full tensors of the shards of all ranks in order; of a single shard they are views where that can be."""
    if how == WHOLE:
        return [shards[0]]
    if how == GATE_UP:
        return [_cat(half) for half in zip(*(views(how, shard, place) for shard in shards), strict=True)]
    joined = views(how, _cat(shards, dim=1 if how == COLUMNS else 0), place)
    return [tensor.flatten(0, 1) for tensor in joined] if how == QKV else [*joined]


def unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _shapes(part: ShardPart) -> Iterator[tuple[str, Shape]]:
    place, (rows, *more_dims) = part.place, part.param.shape
    if part.how == COLUMNS:
        more_dims[0] *= place.size
    elif part.how != WHOLE:
        rows *= place.size
    shares = {QKV: (place.queries, 1, 1), GATE_UP: (1, 1)}.get(part.how, (1,))
    for name, share in zip(part.full, shares, strict=True):
        yield name, (rows * share // sum(shares), *more_dims)


def _taken(part: ShardPart, name: str, shape: Shape, into: Shape, full: torch.Tensor) -> torch.Tensor:
    if tuple(full.shape) != shape and not (full.dim() == 0 and shape == (1,)):  # as many systems have a scale
        raise BadInput(f"{name} is {tuple(full.shape)} and must be {shape}")
    return part_of_tensor(part.how, full, part.place).view(into)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(list(tensors), dim) if len(tensors) > 1 else tensors[0]


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    omitted = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + omitted


def _gathered(shard: torch.Tensor, part: ShardPart) -> list[torch.Tensor]:
    shard = shard.detach().contiguous()
    if part.how == WHOLE or part.place.size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(part.place.size)]
    dist.all_gather(shards, shard, group=part.group)
    return shards


def _shared(own: Tensors, group: Any) -> Tensors:
    """Give every rank of a group the tensors that any of them has, each from the first rank that has it."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return own
    gathered: list[Any] = [None] * len(ranks)
    dist.all_gather_object(
        gathered, {name: (tuple(value.shape), value.dtype) for name, value in own.items()}, group=group
    )
    device = next(iter(own.values())).device
    shared: Tensors = {}
    for name in sorted(set().union(*gathered)):
        having = [rank for rank, names in enumerate(gathered) if name in names]
        if len(having) == len(ranks):
            shared[name] = own[name]
            continue
        shape, dtype = gathered[having[0]][name]
        value = own[name].contiguous() if name in own else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, ranks[having[0]], group=group)
        shared[name] = value
    return shared


# -- checkpoint folders ------------------------------------------------------------------------------------------------

Made = TypeVar("Made")
WEIGHTS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH_BYTES = 8  # of the header, at the beginning of a file
BESIDE = (".json", ".txt", ".jinja", ".model")  # config, tokenizer and index; no weights of other formats


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint folder: of model.safetensors, or of the files that model.safetensors.index.json lists. Only the bytes of
    tensors that are asked for are read."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        single, index = self.path / SINGLE, self.path / INDEX
        if single.exists() == index.exists():
            have = "both" if single.exists() else "neither"
            raise BadInput(f"{self.path} has {have} of {SINGLE} and {INDEX}: a checkpoint folder has one of them")
        listed = {} if single.exists() else _read_index(index)
        self.files = {name: _opened(self.path / name) for name in sorted(set(listed.values()) or {SINGLE})}
        # The file that each tensor is in.
        self.home = {tensor: name for name, file in self.files.items() for tensor in file.keys()}  # noqa: SIM118
        if listed and (unlike := sorted(name for name, _ in listed.items() ^ self.home.items())):
            raise BadInput(f"{index} is damaged: it and the files beside it do not agree about {unlike[0]}")

    def kind(self, name: str) -> str:
        return str(self.files[self.home[name]].get_slice(name).get_dtype())

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.files[self.home[name]].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.home)

    def __len__(self) -> int:
        return len(self.home)


def _read_index(path: Path) -> dict[str, str]:
    listed = None
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        listed = json.loads(path.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise BadInput(f"{path} is damaged: it has no weight_map of tensors to files")
    for name in sorted(set(listed.values())):
        if Path(name).name != name:
            raise BadInput(f"{path} is damaged: {json.dumps(name)} is not the name of a file beside it")
        if not (path.parent / name).is_file():
            raise BadInput(f"{path.parent} is not complete: {INDEX} lists {name}, which is missing")
    return listed


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise BadInput(
            f"{path} cannot be read: the ranks' Python lacks the package safetensors. Install it there: pip install safetensors"
        ) from None
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise BadInput(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None


class Writer:
    """A copy of a file's header, and room for its tensors, which come in any order; leaving the context without an error asks that none
    was left out."""

    def __init__(self, path: Path, like: Path) -> None:
        self.path = path
        with like.open("rb") as file:
            first = file.read(LENGTH_BYTES)
            raw = first + file.read(int.from_bytes(first, "little"))
        places = json.loads(raw[LENGTH_BYTES:])
        places.pop("__metadata__", None)
        self.left = {name: len(raw) + entry["data_offsets"][0] for name, entry in places.items()}
        self._file = path.open("xb")
        try:
            os.posix_fallocate(self._file.fileno(), 0, like.stat().st_size)  # a full disk fails here, not later
            self._file.write(raw)
        except OSError as error:
            self._file.close()
            raise KitError(f"{path} cannot be written: {error.strerror}") from None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._file.seek(self.left.pop(name))
        if tensor.numel():
            self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if kind is None and self.left:
            raise KitError(f"{self.path} is not complete: {min(self.left)} was never written")


def load(chunks: Sequence[Any], folder: str | Path) -> None:
    """Fill the job from a checkpoint folder, or refuse on every rank with nothing changed. Collective.

    Weights take the job's dtype. An optimizer's master copies are the caller's to refresh (`reload_model_params`).
    """
    load_full(chunks, _together(lambda: _fitting(chunks, folder)))


def export(chunks: Sequence[Any], *, like: str | Path, to: str | Path) -> None:
    """Write the job's weights to a new folder: the same files as in `like`, with the same headers, dtypes and order. Collective.

    The folder `to` must be absent or empty. It appears at once, when it is complete.
    """
    source = _together(lambda: _fitting(chunks, like))
    check_full(chunks, source)
    first, target = dist.get_rank() == 0, Path(to)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as files:
        writers: dict[str, Writer] = {}
        if first:
            cleanup.callback(shutil.rmtree, partial, ignore_errors=True)
        _together(lambda: writers.update(_prepared(files, source, target, partial)) if first else None)

        def finish() -> None:
            _receive(full_tensors(chunks), source, writers)
            files.close()  # raises if a file lacks a tensor
            if first:
                partial.rename(target)

        _together(finish)


def _fitting(chunks: Sequence[Any], folder: str | Path) -> Folder:
    """Open the folder if it holds a model like the job's."""
    geometry = read_geometry(folder)
    module = unwrapped(chunks[0])
    config = module.config
    if config.num_moe_experts:
        raise BadInput(f"{folder} has a dense model, and this job has {config.num_moe_experts} experts in a layer")
    job = {
        "hidden": config.hidden_size,
        "layers": config.num_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups,
        "ffn": config.ffn_hidden_size,
        "vocab": module.vocab_size,
        "rope_base": module.rotary_base,
        "qkv_bias": config.add_qkv_bias,
        "norm_eps": config.layernorm_epsilon,
    }
    theirs = dataclasses.asdict(geometry)
    if unlike := [f"{name} {theirs[name]} and the job {has}" for name, has in job.items() if theirs[name] != has]:
        raise BadInput(f"{folder} has {', '.join(unlike)}: build the job with its geometry")
    source = Folder(folder)
    for name in source:
        if source.kind(name) not in WEIGHTS:
            raise BadInput(f"{folder} has {name} in {source.kind(name)}: weights are one of {', '.join(WEIGHTS)}")
    return source


def _prepared(files: contextlib.ExitStack, source: Folder, target: Path, partial: Path) -> dict[str, Writer]:
    """Prepare the new folder under a hidden name, with everything but the weights; return each tensor's writer."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} is there and not empty: an export goes to a new folder")
    partial.mkdir(parents=True)
    for path in source.path.iterdir():
        if path.suffix in BESIDE and path.is_file():
            shutil.copyfile(path, partial / path.name)
    writers = {name: files.enter_context(Writer(partial / name, source.path / name)) for name in source.files}
    return {name: writers[source.home[name]] for name in source}


def _receive(arriving: Iterator[tuple[str, torch.Tensor]], source: Folder, writers: Mapping[str, Writer]) -> None:
    """Write all that arrives, in the folder's dtypes. After an error the rest is still received, because its senders wait."""
    failed: OSError | KitError | None = None
    for name, value in arriving:
        try:
            if failed is None:
                # A copy: the writer's numpy() would mark a live storage as never to be resized again.
                writers[name].put(name, value.to(WEIGHTS[source.kind(name)], copy=True))
        except (OSError, KitError) as error:
            failed = error
    if failed is not None:
        raise failed


def _together(work: Callable[[], Made]) -> Made:
    """Return the work's result on this rank if it succeeded on all ranks; otherwise every rank raises the same error. Collective."""
    made: list[Made] = []
    error: KitError | None = None
    try:
        made.append(work())
    except KitError as refused:
        error = refused
    except OSError as failed:
        error = KitError(str(failed))
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, rank_error in enumerate(errors):
        if rank_error is not None:
            where = f"rank {rank}: " if len({str(another) for another in errors}) > 1 else ""
            raise type(rank_error)(f"{where}{rank_error}")
    return made[0]
