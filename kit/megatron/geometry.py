"""The geometry of a Hugging Face checkpoint folder, read from its config.json: Qwen2 with a tied head and plain rotary positions.

What the kit's model would silently compute in another way is refused. Nothing of the weights is read, and only the standard library
is needed: a config can ask before any rank starts. Limits: a folder on this machine; Qwen2 with experts is another architecture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit.errors import BadInput
from kit.megatron.config import Geometry

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
        raise BadInput(f"{path} is damaged: it is no JSON text") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} is damaged: it is no JSON object")
    for key, wanted in (MUST | MAY).items():
        found = config.get(key, None if key in MUST else wanted)
        if found != wanted:
            raise BadInput(f"{path} has {key} {json.dumps(found)}: the kit's model holds {json.dumps(wanted)} only")
    sizes = {name: _size(path, config, key) for name, key in SIZES.items()}
    _attention(path, config, sizes)
    return Geometry(
        **sizes,
        rope_base=_rope_base(path, config),
        qkv_bias=True,  # the architecture's own: config.json has no word for it
        norm_eps=_positive(path, config, "rms_norm_eps"),
    )


def _attention(path: Path, config: dict[str, Any], sizes: dict[str, int]) -> None:
    head, rest = divmod(sizes["hidden"], sizes["heads"])
    if rest or head % 2 or config.get("head_dim") not in (None, head):
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
            f"{path} has layer_types {json.dumps(kinds)}: the kit's model holds full_attention only, in each layer"
        )


def _rope_base(path: Path, config: dict[str, Any]) -> int:
    """Older files say rope_theta and rope_scaling, newer ones put both into rope_parameters."""
    said = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    for key, found in (("rope_parameters", said), ("rope_scaling", scaling)):
        if not isinstance(found, dict) or {
            name for name, value in found.items() if name != "rope_theta" and plain.get(name) != value
        }:
            raise BadInput(f"{path} has {key} {json.dumps(found)}: the kit's model holds plain rotary positions only")
    bases = {_positive(path, each, "rope_theta") for each in (config, said, scaling) if "rope_theta" in each}
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
