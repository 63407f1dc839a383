"""A Hugging Face model as the engine of a replica: Qwen2 of the package transformers, made from the kit's own geometry.

Nothing is downloaded. Limits: one rank; a geometry with biases of query, key and value, as Qwen2 has.
"""

from __future__ import annotations

from typing import Any

import torch

from kit.engines.contents import ModuleTensors, Named, constants
from kit.engines.hosted import EngineContext
from kit.errors import KitError
from kit.megatron.config import Geometry


class TransformersModel:
    def __init__(self, ctx: EngineContext) -> None:
        import transformers

        config = transformers.Qwen2Config(**qwen2_settings(ctx.geometry))
        self.model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=ctx.dtype).to(ctx.device).eval()
        self.model.load_state_dict({**ctx.weights}, strict=False)  # without a name for the tied head
        self.model.requires_grad_(requires_grad=False)
        self.device = ctx.device
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def full_tensors(self) -> Named:
        """The tied head counts where it has a memory of its own."""
        seen: set[int] = set()
        for name, tensor in ModuleTensors([self.model]).versioned():
            place = tensor.untyped_storage()._cdata
            if place not in seen:
                seen.add(place)
                yield name, tensor

    def constants(self) -> Named:
        return constants([self.model])

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.model.get_parameter(name).copy_(tensor)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows the last of the tokens [rows, length]: float32 [rows, vocabulary]."""
        if self._away:
            raise KitError("this model is asleep: wake it and load its weights before it serves")
        output = self.model(tokens.to(self.device), use_cache=False, logits_to_keep=1)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def sleep(self) -> None:
        storages = {param.untyped_storage()._cdata: param.untyped_storage() for param in self.model.parameters()}
        self._away = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._away:
            storage.resize_(0)

    def wake(self) -> None:
        for storage, size in self._away:
            storage.resize_(size)
        self._away = []


def qwen2_settings(geometry: Geometry) -> dict[str, Any]:
    """What config.json says about a model of this geometry."""
    return {
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "intermediate_size": geometry.ffn,
        "vocab_size": geometry.vocab,
        "max_position_embeddings": geometry.seq,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(geometry.rope_base)},
        "rms_norm_eps": geometry.norm_eps,
        "tie_word_embeddings": True,
    }
