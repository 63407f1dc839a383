"""A Hugging Face model as the engine of a replica: Qwen2 or Llama of the package transformers, made from the kit's own geometry.

Nothing is downloaded. It writes answers with the kit's random numbers. Limit: one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from kit.engines.contents import ModuleTensors, Named, constants
from kit.engines.hosted import EngineContext
from kit.errors import KitError
from kit.megatron.config import Geometry
from kit.megatron.serve import PromptRequest, distribution, pick
from kit.train.draws import uniform


class TransformersModel:
    def __init__(self, ctx: EngineContext) -> None:
        import transformers

        config = transformers.AutoConfig.for_model(**served_config(ctx.geometry))
        self.model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=ctx.dtype).to(ctx.device).eval()
        self.model.load_state_dict({**ctx.weights}, strict=False)  # without a name for the tied head
        self.model.requires_grad_(requires_grad=False)
        self.device = ctx.device
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._written: dict[str, tuple[PromptRequest, list[int]]] = {}  # requests in flight, with their tokens
        self._caches: dict[str, Any] = {}  # keys and values, by request

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

    # -- answers ----------------------------------------------------------------------------------------------------------

    def start(self, request: PromptRequest) -> None:
        self._written[request.id] = request, []

    @torch.no_grad()
    def step(self) -> list[tuple[str, int, float]]:
        if self._away:
            raise KitError("this model is asleep: wake it and load its weights before it serves")
        return [(name, *self._next(name)) for name in self._written]

    def cancel(self, name: str) -> None:
        self._written.pop(name, None)
        self._caches.pop(name, None)

    def pause(self, at_sync: str) -> None:
        """Between two calls nothing runs here."""
        if at_sync in ("abort", "drain"):
            self._written = {}
        if at_sync != "keep":
            self._caches = {}

    def resume(self) -> None: ...

    def _next(self, name: str) -> tuple[int, float]:
        """Each request has its own forward, so its bits do not depend on other requests."""
        request, written = self._written[name]
        logits = self._last_logits(name, (*request.prompt, *written))
        number = uniform(request.seed, request.prompt, request.sample, len(request.prompt) + len(written))
        token = pick(distribution(logits, request, len(written)), number)
        written.append(token)
        return token, float(self.recorded(logits, request, len(written) - 1)[token])

    def recorded(self, logits: torch.Tensor, request: PromptRequest, written: int) -> torch.Tensor:
        """The log-probabilities that are recorded: those that the token was sampled from."""
        return distribution(logits, request, written)

    def _last_logits(self, name: str, tokens: tuple[int, ...]) -> torch.Tensor:
        import transformers

        cache = self._caches.setdefault(name, transformers.DynamicCache(config=self.model.config))
        new = torch.tensor([tokens[cache.get_seq_length() :]], device=self.device)
        output = self.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits


def served_config(geometry: Geometry) -> dict[str, Any]:
    """The config.json of a model of this geometry: Llama has the same layers as Qwen2, without biases of query, key and value."""
    name = "Qwen2" if geometry.qkv_bias else "Llama"
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "intermediate_size": geometry.ffn,
        "vocab_size": geometry.vocab,
        "max_position_embeddings": geometry.seq,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(geometry.rope_base)},
        "hidden_act": "silu",
        "rms_norm_eps": geometry.norm_eps,
        "tie_word_embeddings": True,
    }
