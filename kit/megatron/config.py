"""What model to train and how it is spread over ranks, checked and weighed before anything is built. Only the standard library is
needed, so that a config can ask before any rank starts.

`ModelConfig` holds the choices, `GEOMETRIES` the sizes, `model_bytes` the arithmetic of what one rank will hold. `read_geometry` takes the
geometry from the config.json of a Hugging Face folder on this machine (Qwen2 with a tied head and plain rotary positions), and refuses what
the kit's model would silently compute in another way. Limits: the arithmetic leaves out activations and the padding of distributed buffers
(under 1 % for the larger sizes); Qwen2 with experts is another architecture.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal

from kit.errors import BadInput

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The shape of a GPT: RMSNorm, SwiGLU, grouped-query attention, RoPE, tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_base: int = 10_000
    qkv_bias: bool = True
    norm_eps: float = 1e-6
    seq: int = 128


GEOMETRIES = {
    "tiny": Geometry(hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=256, seq=32),
    "small": Geometry(hidden=128, layers=4, heads=4, kv_heads=2, ffn=256, vocab=512, seq=64),
    "125m": Geometry(
        hidden=768, layers=12, heads=12, kv_heads=12, ffn=2048, vocab=50_304, qkv_bias=False, norm_eps=1e-5
    ),
    "qwen2.5-0.5b": Geometry(hidden=896, layers=24, heads=14, kv_heads=2, ffn=4864, vocab=151_936, rope_base=1_000_000),
}


LoraTargets = Literal["all", "attention", "mlp"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """Low-rank adapters on the linear layers of attention, of the MLP, or on all: W x + (alpha / rank) B A x."""

    rank: int
    alpha: float
    targets: LoraTargets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A training job: the model, its parallelism, its batches. `None` means the size's own value.

    `size` names one of `GEOMETRIES`, or is a geometry itself: one read from a checkpoint folder, say.
    """

    size: str | Geometry = "tiny"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None  # virtual stages: model chunks of each pipeline rank
    cp: int = 1  # the job trains these ranks on sequences of their own: Megatron's local attention does not split one
    ep: int = 1
    etp: int | None = None
    experts: int = 0
    aux_loss: float = 0.0  # coefficient of the load-balancing loss of experts
    router_bias: bool = False  # routers balance experts by a bias that each step moves, and not by a loss
    order: str = "tp-cp-ep-dp-pp"
    gloo_groups: bool = True
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    sum_gradients: bool = False  # over data ranks, in place of the mean: the loss is divided by true counts then
    layers: int | None = None
    seq: int | None = None
    micro_batch: int = 1
    microbatches: int = 2
    seed: int = 1234
    dtype: str = "float32"
    dropout: float = 0.0
    timeout_minutes: int = 30
    odd_options: bool = False  # NCCL groups get options that are not the defaults, so that losing them shows

    @property
    def geometry(self) -> Geometry:
        """The size's geometry with this config's own layers and sequence length in it."""
        base = GEOMETRIES[self.size] if isinstance(self.size, str) else self.size
        return dataclasses.replace(base, layers=self.layers or base.layers, seq=self.seq or base.seq)


def dtype_on(dtype: str, device: str = "cpu") -> str:
    """A type's name, with `auto` as it is meant on a device."""
    return AUTO_DTYPE[device] if dtype == "auto" else dtype


def forced_tf32() -> str:
    """Why float32 cannot be computed as float32 on a GPU with this environment; empty where it can. cuBLAS obeys the variable, whatever
    torch asks it for."""
    if os.environ.get(TF32_OVERRIDE) != "1":
        return ""
    return f"{TF32_OVERRIDE}=1 makes float32 products TF32, about 1e-3 off; unset it or use dtype=bfloat16"


def check(config: ModelConfig, ranks: int) -> None:
    """Raise `BadInput` with one sentence if the config cannot run on this number of ranks."""
    if isinstance(config.size, str) and config.size not in GEOMETRIES:
        raise BadInput(f"size {config.size!r} is unknown: choose one of {', '.join(GEOMETRIES)}")
    if config.dtype not in DTYPE_BYTES:
        raise BadInput(f"dtype {config.dtype!r} is unknown: choose one of {', '.join(DTYPE_BYTES)}")
    for name in ("tp", "pp", "cp", "ep", "micro_batch", "microbatches"):
        if getattr(config, name) < 1:
            raise BadInput(f"{name}={getattr(config, name)} is not allowed: it must be at least 1")
    g = config.geometry
    for dimension, total, name, parts in (
        ("heads", g.heads, "tp", config.tp),
        ("key-value heads", g.kv_heads, "tp", config.tp),
        ("rows of the feed-forward layer", g.ffn, "tp", config.tp),
        ("rows of the vocabulary", g.vocab, "tp", config.tp),
        ("ranks", ranks, "tp*pp", config.tp * config.pp),
        ("ranks", ranks, "tp*pp*cp", config.tp * config.pp * config.cp),
        ("layers", g.layers, "pp*vpp" if config.vpp else "pp", config.pp * (config.vpp or 1)),
        ("ranks", ranks, "tp*pp*ep", config.tp * config.pp * config.ep),
        ("experts", config.experts, "ep", config.ep),
    ):
        if total % parts:
            if dimension == "ranks":
                alone = " ".join(f"{split}=1" for split in name.split("*") if getattr(config, split) > 1)
                raise BadInput(
                    f"{name}={parts} does not divide ranks={ranks}; use a multiple of {parts}, or set {alone}"
                )
            size = f" (size {config.size!r})" if isinstance(config.size, str) else ""
            raise BadInput(f"{name}={parts} does not divide {total} {dimension} of this job{size}")
    if config.vpp and config.pp == 1:
        raise BadInput(f"vpp={config.vpp} needs a pipeline: set pp=2 or more")
    if config.vpp and config.microbatches % config.pp:
        raise BadInput(f"vpp={config.vpp}: microbatches={config.microbatches} must be a multiple of pp={config.pp}")
    if config.experts and config.ep == 1 and config.etp not in {None, config.tp}:
        raise BadInput(
            f"etp={config.etp} with ep=1 is not supported: Megatron would average unlike shards of experts; set ep=2 or more"
        )
    if config.experts and config.tp > 1:
        raise BadInput(f"experts={config.experts} with tp={config.tp} is not supported: Megatron asks for tp=1 here")


def model_bytes(config: ModelConfig, *, ranks: int, stage: int = 0) -> dict[str, int]:
    """Bytes one rank of pipeline `stage` will hold as parameters, gradients and optimizer state; nothing is built."""
    g = config.geometry
    first, last = stage == 0, stage == config.pp - 1
    kv = 2 * g.kv_heads * (g.hidden // g.heads)
    attention = (g.hidden * (g.hidden + kv) + g.hidden * g.hidden) // config.tp
    attention += (g.hidden + kv) // config.tp if g.qkv_bias else 0
    mlp = 3 * g.hidden * g.ffn // config.tp
    layers = g.layers // config.pp  # of all its chunks
    expert = layers * mlp * config.experts // config.ep if config.experts else 0
    dense = layers * (attention + 2 * g.hidden + (g.hidden * config.experts if config.experts else mlp))
    dense += g.hidden if last else 0
    dense += g.hidden * g.vocab // config.tp if first or last else 0
    width = DTYPE_BYTES[config.dtype]
    state = 8 if width == 4 else 12  # exp_avg, exp_avg_sq, and a float32 master copy of what is narrower
    dp = ranks // (config.tp * config.pp) if config.distributed_optimizer else 1
    expert_dp = max(1, dp // config.ep)
    params, grads = (dense + expert) * width, (dense + expert) * 4
    optimizer = dense * state // dp + expert * state // expert_dp
    return {
        "parameters": dense + expert,
        "params": params,
        "grads": grads,
        "optimizer": optimizer,
        "total": params + grads + optimizer,
    }


CONFIG = "config.json"
# Key: what it must be. A key that config.json leaves out is refused in the first table and taken as good in the second.
MUST = {"model_type": "qwen2", "tie_word_embeddings": True, "hidden_act": "silu"}
MAY = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "attention_dropout": 0,
    "quantization_config": None,
}
SIZES = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "seq": "max_position_embeddings",
}


def read_geometry(folder: str | Path) -> Geometry:
    """The geometry of the model in this folder. Its `seq` is the longest text that config.json allows, not a batch's."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; a checkpoint folder has one") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is damaged: it is not valid JSON") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} is damaged: it is not a JSON object")
    for key, wanted in (MUST | MAY).items():
        value = config.get(key, None if key in MUST else wanted)
        if value != wanted:
            raise BadInput(f"{path} has {key} {json.dumps(value)}: the kit supports only {json.dumps(wanted)}")
    sizes = {name: _size(path, config, key) for name, key in SIZES.items()}
    _attention(path, config, sizes)
    return Geometry(
        **sizes,
        rope_base=_rope_base(path, config),
        qkv_bias=True,  # the architecture's own: config.json has no word for it
        norm_eps=_positive(path, config, "rms_norm_eps"),
    )


def _attention(path: Path, config: dict[str, Any], sizes: dict[str, int]) -> None:
    head, remainder = divmod(sizes["hidden"], sizes["heads"])
    if remainder or head % 2 or config.get("head_dim") not in (None, head):
        raise BadInput(
            f"{path} has hidden_size {sizes['hidden']}, num_attention_heads {sizes['heads']} and head_dim"
            f" {json.dumps(config.get('head_dim'))}: a head must be an even hidden_size / num_attention_heads wide"
        )
    if sizes["heads"] % sizes["kv_heads"]:
        raise BadInput(
            f"{path} has num_attention_heads {sizes['heads']} and num_key_value_heads {sizes['kv_heads']}:"
            " the second must divide the first"
        )
    kinds = config.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * sizes["layers"]:
        raise BadInput(
            f"{path} has layer_types {json.dumps(kinds)}: the kit supports only full_attention, in each layer"
        )


def _rope_base(path: Path, config: dict[str, Any]) -> int:
    """Older files say rope_theta and rope_scaling, newer ones put both into rope_parameters."""
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    for key, section in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if not isinstance(section, dict) or {
            name for name, value in section.items() if name != "rope_theta" and plain.get(name) != value
        }:
            raise BadInput(f"{path} has {key} {json.dumps(section)}: the kit supports only plain rotary positions")
    bases = {_positive(path, source, "rope_theta") for source in (config, rope, scaling) if "rope_theta" in source}
    if len(bases) != 1 or not next(iter(bases)).is_integer():
        raise BadInput(f"{path} has rope_theta {sorted(bases)}: it must have one, a whole number")
    return int(bases.pop())


def _size(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise BadInput(f"{path} has {key} {json.dumps(value)}: it must be a whole number of at least 1")
    return value


def _positive(path: Path, config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise BadInput(f"{path} has {key} {json.dumps(value)}: it must be a number above 0")
    return float(value)
