"""Functions that test_shards.py calls: each runs on all ranks and returns JSON."""

from __future__ import annotations

import dataclasses
import random as randoms
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from kit.errors import BadInput
from kit.megatron import model, ownership, shards
from kit.megatron.config import GEOMETRIES, Geometry, ModelConfig
from kit.megatron.split import reduced
from kit.train.plain import Mlp, PlainModel
from tests.megatron.ranks.common import attempt

Tensors = dict[str, torch.Tensor]
TOPK = 2  # as kit.megatron.model sets it
# Three query heads per key head, no biases, sizes that are not powers of two.
GEOMETRIES["odd"] = dataclasses.replace(
    GEOMETRIES["tiny"], hidden=96, layers=2, heads=12, kv_heads=4, ffn=88, vocab=130, qkv_bias=False
)


class Experts(nn.Module):
    """Experts in plain torch with Qwen2-MoE's names: the gate's top experts, weighted by a softmax over those."""

    def __init__(self, geometry: Geometry, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(geometry.hidden, count, bias=False)
        self.experts = nn.ModuleList([Mlp(geometry) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.gate(x).topk(TOPK)
        shares = torch.zeros_like(self.gate(x)).scatter(-1, chosen, best.softmax(-1))
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


def plain(config: ModelConfig) -> PlainModel:
    made = PlainModel(config.geometry)
    if config.experts:
        for layer in made.model.layers:
            layer.mlp = Experts(config.geometry, config.experts)
    return made


def counted(config: ModelConfig) -> Tensors:
    """Weights in which every element of the whole model is a distinct number that the dtype holds exactly."""
    full, start = {}, 0
    for name, param in plain(config).named_parameters():
        full[name] = torch.arange(start, start + param.numel(), dtype=torch.float32).view(param.shape)
        start += param.numel()
    assert start < 2**24
    return full


def random(config: ModelConfig) -> Tensors:
    generator = torch.Generator().manual_seed(8)
    return {
        name: torch.randn(param.shape, generator=generator) * (0.1 if param.dim() == 2 else 0.5)
        for name, param in plain(config).named_parameters()
    }


def unequal(found: Tensors, wanted: Tensors) -> list[str]:
    """Return names whose tensors differ in any bit, and names that only one side has."""
    return sorted(
        name
        for name in found.keys() | wanted.keys()
        if name not in found
        or name not in wanted
        or found[name].dtype != wanted[name].dtype
        or not torch.equal(found[name], wanted[name])
    )


def survey(**settings: Any) -> dict[str, Any]:
    """Collect all results of one layout from one job."""
    config = ModelConfig(**settings)
    with ownership.as_found():
        job = model.build(config)
        full = counted(config)
        shards.load_full(job.chunks, full)
        merged = shards.merge(job.chunks)
        kept = {name: value.clone() for name, value in merged.items()}
        full = random(config)
        shards.load_full(job.chunks, full)
        result = {
            "unequal": unequal(merged, counted(config)),
            "changed_later": unequal(merged, kept),
            "unequal_again": unequal(shards.merge(job.chunks), full),
            "devices": sorted({value.device.type for value in merged.values()}),
            **_streamed(job, full),
            **_applied(job, full),
        }
        tokens, labels = torch.randint(0, config.geometry.vocab, (2, 2, 16), generator=torch.Generator().manual_seed(4))
        reference = plain(config)
        reference.load_state_dict(full)
        wanted = reference(tokens)
        functional.cross_entropy(wanted.flatten(0, 1), labels.flatten()).backward()
        result["logits"] = [_far(each, wanted.detach()) for each in _logits(job, tokens)]
        found = _gradients(job, tokens, labels)
        exact = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
        result["gradient_names"] = found.keys() == exact.keys()
        result["gradients"] = {name: _far(found[name], value) for name, value in exact.items() if name in found}
        result["bfloat16"] = _rounded(job, full)
    return result


def _streamed(job: model.Training, full: Tensors) -> dict[str, Any]:
    """Compare the streamed full tensors with `full`, and assert that each name arrives once."""
    arrived = list(shards.full_tensors(job.chunks))
    once = dict(arrived)
    assert len(once) == len(arrived)
    return {"streamed": unequal(once, full), "streamed_count": len(arrived)}


def _applied(job: model.Training, full: Tensors) -> dict[str, Any]:
    """Empty the weights and fill them again in a rank-specific order; count them, and list those that differ from before."""
    params = dict(job.named_parameters())
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in params.values():
        param.data.fill_(float("nan"))
    emptied = sum(bool(param.isnan().all()) for param in params.values())
    where = [(name, *each) for name, places in shards.destinations(job.chunks).items() for each in places]
    randoms.Random(dist.get_rank()).shuffle(where)
    not_views = []
    for name, into, take in where:
        taken = take(full[name])
        assert taken.shape == into.shape
        if taken.untyped_storage().data_ptr() != full[name].untyped_storage().data_ptr():
            not_views.append(name)
        into.copy_(taken)
    after = {name: param.detach() for name, param in params.items()}
    return {"emptied": emptied, "applied": unequal(after, before), "not_views": not_views}


def misapplied(**settings: Any) -> str:
    """Return a destination's error for a full tensor that could only be broadcast into it."""
    with ownership.as_found():
        places = shards.destinations(model.build(ModelConfig(**settings)).chunks)
        for _, take in places.get("model.norm.weight", []):
            return attempt(lambda take=take: take(torch.ones(1)))
    return "no such tensor here"


def _far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value. An expert that no token chose has no gradient; then it must be exactly zero."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    apart = float((found.double() - wanted.double()).abs().max())
    return apart / (float(wanted.abs().max()) or 1.0)


def _logits(job: model.Training, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits on the last stage's ranks, with the columns of all tensor ranks joined; empty on other ranks."""
    from megatron.core import parallel_state

    mine = _schedule(job, tokens, None)
    if not mine:
        return []
    group = parallel_state.get_tensor_model_parallel_group()
    columns = [torch.empty_like(mine[0]) for _ in range(dist.get_world_size(group))]
    dist.all_gather(columns, mine[0].contiguous(), group=group)
    return [torch.cat(columns, dim=-1)]


def _gradients(job: model.Training, tokens: torch.Tensor, labels: torch.Tensor) -> Tensors:
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    _schedule(job, tokens, labels)
    return shards.merge(job.chunks, reduced(job.chunks[0]))


def _schedule(job: model.Training, tokens: torch.Tensor, labels: torch.Tensor | None) -> list[Any]:
    """Run one microbatch through Megatron's own schedule: logits if there are no labels, else forward and backward."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)

    def step(_: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        def out_of(output: torch.Tensor, *, non_loss_data: bool = False) -> Any:
            return output.detach() if non_loss_data else (output.float().mean(), {})

        return chunk(tokens, positions, None, labels=labels), out_of

    data: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(()),
        model=job.chunks,
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=labels is None,
        collect_non_loss_data=labels is None,
    )
    return data


def _rounded(job: model.Training, full: Tensors) -> list[str]:
    """A merge keeps the dtype of its input."""
    narrow = shards.merge(job.chunks, lambda param: param.data.bfloat16())
    return unequal(narrow, {name: value.bfloat16() for name, value in full.items()})


def mixed(name: str, like: str, **settings: Any) -> list[str]:
    """Swap the rows of two weights, and return the names that differ after a merge: the comparison must notice the swap."""
    config = ModelConfig(**settings)
    full = counted(config)
    with ownership.as_found():
        job = model.build(config)
        shards.load_full(job.chunks, full | {name: full[like], like: full[name]})
        return unequal(shards.merge(job.chunks), full)


def refused(case: str, **settings: Any) -> dict[str, Any]:
    """Return this rank's error of a load, and the tensors that the load changed although it was refused."""
    config = ModelConfig(**settings)
    gate, up = (f"model.layers.3.mlp.{kind}_proj.weight" for kind in ("gate", "up"))
    with ownership.as_found():
        job = model.build(config)
        before = shards.merge(job.chunks)
        full = counted(config)
        if case == "missing" or (case == "missing-on-one" and dist.get_rank() == dist.get_world_size() - 1):
            del full[gate]
        elif case == "unknown":
            full["lm_head.weight"] = torch.zeros(1)
        elif case == "turned":
            full[gate] = full[gate].T
        elif case == "same-together":  # gate and up have wrong sizes, but together the size of their shard
            full[gate], full[up] = torch.zeros(126, 64), torch.zeros(130, 64)
        elif case == "longer-vocabulary":
            full["model.embed_tokens.weight"] = torch.zeros(257, 64)
        elif case == "many":
            full = {name: value for name, value in full.items() if ".layers.3." not in name}
        message = ""
        try:
            shards.load_full(job.chunks, full)
        except BadInput as error:
            message = str(error)
        return {"message": message, "changed": unequal(shards.merge(job.chunks), before)}


def own_alone(**settings: Any) -> list[str]:
    """A rank can load with only the full tensors that its shards need."""
    config = ModelConfig(**settings)
    full = counted(config)
    with ownership.as_found():
        job = model.build(config)
        needed = {name for chunk in job.chunks for part in shards.parts_of_chunk(chunk) for name in part.full}
        shards.load_full(job.chunks, {name: full[name] for name in needed})
        assert len(needed) < len(full)
        return unequal(shards.merge(job.chunks), full)
