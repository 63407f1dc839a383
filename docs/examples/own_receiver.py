"""A receiving side that finds the place of each tensor by its Hugging Face name, in the layout of Megatron's fused layers.
kit run sync --set receiver=docs.examples.own_receiver:ByName"""

from typing import Any

import torch

WHOLE = {
    "model.norm": "decoder.final_layernorm",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
}
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class ByName:
    """Writes each tensor into the rows or columns that this rank holds of it."""

    def __init__(self, ctx: Any) -> None:
        self.model = getattr(ctx.chunks[0], "module", ctx.chunks[0])  # bfloat16 models are wrapped
        self.rank, self.size = ctx.rank, ctx.world_size
        self.heads_per_group = self.model.config.num_attention_heads // self.model.config.num_query_groups
        self.head = self.model.config.kv_channels

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's part; the tensor may be overwritten afterwards."""
        path, _, kind = name.rpartition(".")
        layer = "decoder.layers." + path.split(".")[2] + "." if path.startswith("model.layers.") else ""
        module = path.rpartition(".")[2]
        if module == "embed_tokens":
            self.copy(f"embedding.word_embeddings.{kind}", self.part(tensor, 0))
        elif module == "o_proj":
            self.copy(f"{layer}self_attention.linear_proj.{kind}", self.part(tensor, 1))
        elif module == "down_proj":
            self.copy(f"{layer}mlp.linear_fc2.{kind}", self.part(tensor, 1))
        elif module in QUERY_KEY_VALUE:
            self.place_heads(f"{layer}self_attention.linear_qkv.{kind}", QUERY_KEY_VALUE.index(module), tensor)
        elif module in GATE_UP:
            halves = self.model.get_parameter(f"{layer}mlp.linear_fc1.{kind}").chunk(2)
            halves[GATE_UP.index(module)].copy_(self.part(tensor, 0))
        else:
            self.copy(f"{layer}{WHOLE[module if layer else path]}.{kind}", tensor)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(self.size, dim)[self.rank]

    def copy(self, name: str, part: torch.Tensor) -> None:
        self.model.get_parameter(name).copy_(part)

    def place_heads(self, fused: str, kind: int, tensor: torch.Tensor) -> None:
        """Megatron keeps each group's queries, then its key, then its value."""
        weight = self.model.get_parameter(fused)
        rows = (self.heads_per_group * self.head, self.head, self.head)
        groups = weight.view(-1, sum(rows), *weight.shape[1:])
        groups.split(rows, dim=1)[kind].copy_(self.part(tensor, 0).view(len(groups), rows[kind], *tensor.shape[1:]))


class ByNameWithQueriesFirst(ByName):
    """The layout of vLLM and of Hugging Face's fused models: all queries, then all keys, then all values."""

    def place_heads(self, fused: str, kind: int, tensor: torch.Tensor) -> None:
        weight = self.model.get_parameter(fused)
        key = len(weight) // (self.heads_per_group + 2)
        weight.split((self.heads_per_group * key, key, key))[kind].copy_(self.part(tensor, 0))


class ByNameWithAPackedHead(ByName):
    """A forward over a packed copy of the head, which is made anew when all weights of a version are in place."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.finalize()

    def finalize(self) -> None:
        """After every load, and after a failure when the old weights are back: derive again from the weights in the model."""
        self.packed = self.model.shared_embedding_or_output_weight().detach().t().contiguous()

    def sleep(self) -> None:
        self.packed = torch.empty(0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows the last token: logits of the whole vocabulary, the same on every rank of the replica."""
        tokens = tokens.to(self.packed.device)
        self.model.post_process = False
        try:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            hidden = self.model(tokens, positions, None)  # [length, rows, hidden]
        finally:
            self.model.post_process = True
        return hidden[-1] @ self.packed  # for replicas of one rank


class ByNameWithAStaleHead(ByNameWithAPackedHead):
    """The packed copy is made once: a reload answers without an error and leaves the old layer."""

    def finalize(self) -> None:
        if not hasattr(self, "packed"):
            super().finalize()

    def sleep(self) -> None: ...
