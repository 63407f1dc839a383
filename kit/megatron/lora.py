"""Low-rank adapters (LoRA) on the linear layers of a frozen Megatron GPT: W x + (alpha / rank) B A x.

A `FrozenBase` holds the one base network; an `AdapterNetwork` holds the A and B of one adapter and runs the base with them. Any number of
adapters share a base. `assemble_adapter` makes a training job of one: its own gradient buffers, optimizer and scheduler.

Query, key and value share A, and so do gate and up; each has its own B. With tensor parallelism B is cut by rows where the layer is
(linear_qkv, linear_fc1), A by columns where the layer is (linear_proj, linear_fc2); the other half is on every rank. `shards` knows the
full tensors by names such as `model.layers.0.self_attn.q_proj.lora_B`.

Limits: dense models, pp=1, gradients reduced at the end of a step; a batch has one adapter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kit.errors import BadInput
from kit.megatron import model, shards
from kit.megatron.config import Geometry, LoraOptions, LoraTargets, ModelConfig
from kit.megatron.tensors import Mover
from kit.train.options import DEFAULTS, Settings

# By target: the Megatron layer, whether it is cut by columns of its input, the names of its full A, and of its full weights.
LAYERS = {
    "attention": {
        "self_attention.linear_qkv": (
            False,
            "self_attn.qkv_proj",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ),
        "self_attention.linear_proj": (True, "self_attn.o_proj", ("self_attn.o_proj",)),
    },
    "mlp": {
        "mlp.linear_fc1": (False, "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        "mlp.linear_fc2": (True, "mlp.down_proj", ("mlp.down_proj",)),
    },
}


def layers_of(targets: LoraTargets) -> dict[str, tuple[bool, str, tuple[str, ...]]]:
    kinds = LAYERS if targets == "all" else (targets,)
    return {name: layer for kind in kinds for name, layer in LAYERS[kind].items()}


def refuse_unsupported(config: ModelConfig) -> None:
    for setting, words in (
        ("experts", "experts have linear layers of their own, which get no adapter"),
        ("overlap_grad_reduce", "the base has no gradients whose reduction could be overlapped"),
        ("vpp", "an adapter is one chunk"),
    ):
        if value := getattr(config, setting):
            raise BadInput(f"{setting}={value} is not allowed with adapters: {words}")
    if config.pp != 1:
        raise BadInput(f"pp={config.pp} is not allowed with adapters: it must be 1")


class FrozenBase:
    """The base network, without gradients. `adapter` is the one that its forwards apply; None: the base alone."""

    def __init__(self, network: Any, device: torch.device) -> None:
        self.network = network
        self.mover = Mover([network], None, device)
        self.adapter: AdapterNetwork | None = None
        for param in network.parameters():
            param.requires_grad_(False)
        for number, layer in enumerate(shards.unwrapped(network).decoder.layers):
            for name in layers_of("all"):
                layer.get_submodule(name).register_forward_hook(functools.partial(self._add, f"{number}.{name}"))

    @contextlib.contextmanager
    def applying(self, adapter: AdapterNetwork | None) -> Iterator[None]:
        before, self.adapter = self.adapter, adapter
        try:
            yield
        finally:
            self.adapter = before

    def _add(self, layer: str, _: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        pair = self.adapter and self.adapter.pairs.get(layer)
        return (outputs[0] + pair(inputs[0]), *outputs[1:]) if pair else None


@torch.no_grad()
def merge_into_base(base: FrozenBase, adapter: AdapterNetwork) -> None:
    """Change the base's own shards to W + (alpha / rank) B A. There is no way back but to load the base again."""
    layers = shards.unwrapped(base.network).decoder.layers
    for name, pair in adapter.pairs.items():
        number, _, linear = name.partition(".")
        layers[int(number)].get_submodule(linear).weight.add_(pair.scale * (pair.lora_B @ pair.lora_A))


class LowRankPair(nn.Module):
    """The A and B of one layer on this rank."""

    def __init__(self, layer: Any, options: LoraOptions, *, by_columns: bool) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        rows, columns = layer.weight.shape  # of this rank's shard
        self.by_columns = by_columns
        self.scale = options.scale
        self.lora_A = nn.Parameter(layer.weight.new_empty(options.rank, columns))
        self.lora_B = nn.Parameter(layer.weight.new_empty(rows, options.rank))
        cut, dim = (self.lora_A, 1) if by_columns else (self.lora_B, 0)
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=dim, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds to the layer's output. The collective makes the low-rank vector, or its gradient, whole."""
        from megatron.core import tensor_parallel

        low = functional.linear(x, self.lora_A)
        if self.by_columns:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low)
        return functional.linear(low, self.lora_B) * self.scale


class AdapterNetwork(nn.Module):
    """One adapter as a network: its parameters are the adapter's alone, its forward is that of the base with the adapter."""

    def __init__(self, base: FrozenBase, options: LoraOptions) -> None:
        super().__init__()
        network = shards.unwrapped(base.network)
        self.held = (base,)  # not a module of this one
        self.config = copy.copy(network.config)  # which has the hooks of this adapter's job
        self.model_type = network.model_type
        self.pairs: dict[str, LowRankPair] = {}
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()
        for number, layer in enumerate(network.decoder.layers):
            own = nn.Module()
            own.layer_number = layer.layer_number
            own.self_attention, own.mlp = nn.Module(), nn.Module()
            for name, (by_columns, _, _) in layers_of(options.targets).items():
                part, _, linear = name.partition(".")
                pair = self.pairs[f"{number}.{name}"] = LowRankPair(
                    layer.get_submodule(name), options, by_columns=by_columns
                )
                own.get_submodule(part).add_module(linear, pair)
            self.decoder.layers.append(own)

    def set_input_tensor(self, tensor: Any) -> None:
        self.held[0].network.set_input_tensor(tensor)

    def forward(self, *args: Any, **options: Any) -> Any:
        base = self.held[0]
        with base.applying(self):
            return base.network(*args, **options)


def assemble_adapter(
    base: FrozenBase,
    config: ModelConfig,
    options: LoraOptions,
    full: Mapping[str, torch.Tensor],
    settings: Settings = DEFAULTS,
) -> model.Training:
    """A training job of one adapter, which begins with these full tensors. Collective."""
    refuse_unsupported(config)
    job = model.job_of(config, [AdapterNetwork(base, options)], base.mover.device, settings)
    shards.load_full(job.chunks, full)
    job.optimizer.reload_model_params()
    return job


def initial_adapter(geometry: Geometry, options: LoraOptions, seed: int) -> dict[str, torch.Tensor]:
    """The full tensors of a new adapter: A is drawn from the seed, B is zero, so the adapter changes nothing yet."""
    hidden, narrow = geometry.hidden, geometry.hidden // geometry.heads * geometry.kv_heads
    inputs = {"mlp.down_proj": geometry.ffn}
    outputs = {
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), narrow),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), geometry.ffn),
    }
    generator = torch.Generator().manual_seed(seed)
    full: dict[str, torch.Tensor] = {}
    for layer in range(geometry.layers):
        for _, shared, names in layers_of(options.targets).values():
            width = inputs.get(shared, hidden)
            drawn = torch.rand(options.rank, width, generator=generator) * 2 - 1
            full[f"model.layers.{layer}.{shared}.lora_A"] = drawn / math.sqrt(width)
            full |= {
                f"model.layers.{layer}.{name}.lora_B": torch.zeros(outputs.get(name, hidden), options.rank)
                for name in names
            }
    return full


def merged_weights(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], options: LoraOptions
) -> dict[str, torch.Tensor]:
    """The full weights of a plain model that computes what base and adapter do: W + (alpha / rank) B A."""
    merged = {**base}
    for name in base:
        owner, _, kind = name.rpartition(".")
        if kind == "weight" and f"{owner}.lora_B" in adapter:
            low = adapter[shared_name(owner, options)]
            merged[name] = base[name].double() + options.scale * adapter[f"{owner}.lora_B"].double() @ low.double()
    return merged


def shared_name(owner: str, options: LoraOptions) -> str:
    """The name of the full A of a layer such as `model.layers.0.self_attn.q_proj`."""
    shared = next(
        shared
        for _, shared, names in layers_of(options.targets).values()
        if any(owner.endswith(f".{name}") for name in names)
    )
    return f"{'.'.join(owner.split('.')[:3])}.{shared}.lora_A"
