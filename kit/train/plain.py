"""A GPT in plain torch with the shape of the Megatron job and Hugging Face's Qwen2 names for its parameters.

RMSNorm, SwiGLU, grouped-query attention, rotary positions (the two halves of a head turned), tied head. With experts, a token goes to the
two with the highest scores. Runs in float32, bfloat16 and float64 on any device. With `columns`, a rank of a context group computes its
part of the rows only; `next_logprobs` returns whole rows all the same. Limits: no dropout, no activation recomputation; padding must be at
the end of rows.

`Numerics` are the settings of how exactly this process computes: deterministic kernels, and float32 products without TF32. Whatever is set
is put back by whoever set it: `Numerics.now()` before, `restore()` at the end. No GPU has confirmed it yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.deterministic
from torch import nn
from torch.nn import functional

from kit.train.columns import Columns, part_of

if TYPE_CHECKING:
    from kit.megatron.config import Geometry


STD = 0.02
CHOSEN = 2  # experts of a token
Cache = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, [rows, kv_heads, length, head]


class Norm(nn.Module):
    def __init__(self, hidden: int, eps: float, **made: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, **made))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, geometry: Geometry, **made: Any) -> None:
        super().__init__()
        self.head = geometry.hidden // geometry.heads
        narrow = geometry.kv_heads * self.head
        self.repeat = geometry.heads // geometry.kv_heads
        self.q_proj = nn.Linear(geometry.hidden, geometry.hidden, bias=geometry.qkv_bias, **made)
        self.k_proj = nn.Linear(geometry.hidden, narrow, bias=geometry.qkv_bias, **made)
        self.v_proj = nn.Linear(geometry.hidden, narrow, bias=geometry.qkv_bias, **made)
        self.o_proj = nn.Linear(geometry.hidden, geometry.hidden, bias=False, **made)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        allowed: torch.Tensor | None,
        cache: Cache | None,
        start: int,
        *,
        columns: Columns | None,
    ) -> torch.Tensor:
        rows, length, hidden = x.shape
        split = (rows, length, -1, self.head)
        q = _turned(self.q_proj(x).view(split).transpose(1, 2), turn)
        k = _turned(self.k_proj(x).view(split).transpose(1, 2), turn)
        v = self.v_proj(x).view(split).transpose(1, 2)
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, start : start + length] = new
            k, v = (kept[:, :, : start + length] for kept in cache)
        if columns is not None:
            k, v = columns.keys_and_values(k, v)
        k, v = (heads.repeat_interleave(self.repeat, dim=1) for heads in (k, v))
        causal = allowed is None and cache is None
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal)
        mixed: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, hidden))
        return mixed


class Mlp(nn.Module):
    def __init__(self, geometry: Geometry, **made: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(geometry.hidden, geometry.ffn, bias=False, **made)
        self.up_proj = nn.Linear(geometry.hidden, geometry.ffn, bias=False, **made)
        self.down_proj = nn.Linear(geometry.ffn, geometry.hidden, bias=False, **made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.Module):
    """Every expert runs for every token: simple, and slow."""

    def __init__(self, geometry: Geometry, experts: int, **made: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(geometry.hidden, experts, bias=False, **made)
        self.experts = nn.ModuleList([Mlp(geometry, **made) for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).topk(CHOSEN, dim=-1)
        shares = scores.softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        return sum(
            (
                (shares * (chosen == number)).sum(-1, keepdim=True) * expert(x)
                for number, expert in enumerate(self.experts)
            ),
            start=torch.zeros_like(x),
        )


class Layer(nn.Module):
    def __init__(self, geometry: Geometry, experts: int, **made: Any) -> None:
        super().__init__()
        self.self_attn = Attention(geometry, **made)
        self.mlp = Experts(geometry, experts, **made) if experts else Mlp(geometry, **made)
        self.input_layernorm = Norm(geometry.hidden, geometry.norm_eps, **made)
        self.post_attention_layernorm = Norm(geometry.hidden, geometry.norm_eps, **made)

    def forward(self, x: torch.Tensor, *attention: Any, columns: Columns | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention, columns=columns)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, geometry: Geometry, experts: int, **made: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(geometry.vocab, geometry.hidden, **made)
        self.layers = nn.ModuleList([Layer(geometry, experts, **made) for _ in range(geometry.layers)])
        self.norm = Norm(geometry.hidden, geometry.norm_eps, **made)


class PlainModel(nn.Module):
    """`model.layers.N...` as Hugging Face names them. Made without weights: see `from_weights`."""

    columns: Columns | None = None  # set where ranks of a context group share the columns of their rows

    def __init__(
        self,
        geometry: Geometry,
        *,
        experts: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.model = Body(geometry, experts, dtype=dtype, device=device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: list[Cache] | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        """Logits, [rows, length, vocab], float32 (float64 in float64).

        `segments` numbers the sequences that share a row: a token attends only to earlier tokens of its own sequence. With a `cache` the
        tokens stand at `start` and see what is cached before, and each other. With `columns`, and without a cache, the logits are those of
        this rank's part of the columns, and every rank of the group makes the same call with the same rows.
        """
        columns = self.columns if cache is None else None
        length = input_ids.shape[1]
        if positions is None:
            positions = torch.arange(start, start + length, device=input_ids.device)[None]
        allowed = None if segments is None else _allowed(segments)
        if columns is not None:
            sequences = torch.zeros_like(positions) if segments is None else segments
            allowed = part_of(_allowed(columns.padded(sequences, fill=-1)), columns.group, 2)  # padding sees no token
            input_ids, positions = columns.own(input_ids), columns.own(positions)
        x = self.model.embed_tokens(input_ids)
        turn = _angles(self.geometry, positions, x.dtype)
        if cache and length > 1:
            allowed = torch.ones(length, start + length, dtype=torch.bool, device=input_ids.device).tril(start)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, turn, allowed, cache[index] if cache else None, start, columns=columns)
        logits = functional.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    def empty_cache(self, rows: int, length: int) -> list[Cache]:
        g, weight = self.geometry, self.model.embed_tokens.weight
        shape = (g.layers, 2, rows, g.kv_heads, length, g.hidden // g.heads)
        return [(layer[0], layer[1]) for layer in weight.new_zeros(shape)]


def from_weights(
    geometry: Geometry,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PlainModel:
    """Return a model with copies of these full weights; missing or unknown names raise an error."""
    # Torch's own initial values would cost time and random numbers.
    model = PlainModel(geometry, dtype=dtype, device="meta").to_empty(device=device)
    model.load_state_dict(weights)
    return model


def initial_weights(geometry: Geometry, seed: int) -> dict[str, torch.Tensor]:
    """float32 on the host: normal matrices, narrower where they write to the residual; norms one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, wanted in PlainModel(geometry, device="meta").named_parameters():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(wanted.shape)
        elif name.endswith("bias"):
            weights[name] = torch.zeros(wanted.shape)
        else:
            narrower = (2 * geometry.layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weights[name] = torch.randn(wanted.shape, generator=generator) * (STD / narrower)
    return weights


def next_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, length]: column t has the log-probability of token t + 1. The last column has no meaning."""
    columns: Columns | None = getattr(model, "columns", None)
    logits = model(input_ids, positions, segments)
    tokens = input_ids.roll(-1, dims=1)  # of whole rows: the token after a part's last column is in the next part
    if columns is not None:
        tokens = columns.own(tokens)
    scored = -functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
    return scored if columns is None else columns.whole(scored, input_ids.shape[1])


def plain_logprobs(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Of input_ids[:, 1:], [rows, length - 1], in float32 (float64 in float64)."""
    return next_logprobs(model, input_ids)[:, :-1]


def _angles(geometry: Geometry, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # In float32 whatever the model's dtype: bfloat16 cannot count beyond 256.
    wide = torch.promote_types(dtype, torch.float32)
    half = torch.arange(0, geometry.hidden // geometry.heads, 2, dtype=wide, device=positions.device)
    frequency = geometry.rope_base ** (-half / (geometry.hidden // geometry.heads))
    angle = positions[:, None, :, None].to(wide) * torch.cat([frequency, frequency])
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


def _allowed(segments: torch.Tensor) -> torch.Tensor:
    length = segments.shape[1]
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()


# -- how exactly this process computes ---------------------------------------------------------------------------------

_filling: Any = torch.utils.deterministic


def deterministic() -> None:
    """Deterministic kernels, and nothing else: with them torch fills every `torch.empty`, on the CPU too, which costs time and hides
    reads of memory that nothing has written (torch.utils.deterministic.fill_uninitialized_memory is True by default)."""
    torch.use_deterministic_algorithms(mode=True)
    _filling.fill_uninitialized_memory = False


def full_float32() -> None:
    """float32 products in float32. Images of NVIDIA's switch TF32 on by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which this call undoes."""
    torch.set_float32_matmul_precision("highest")


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """The settings at some moment. `precision` is None if torch cannot report it: its old and new names were mixed."""

    deterministic: bool
    warn_only: bool
    filling: bool
    precision: str | None

    @classmethod
    def now(cls) -> Numerics:
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:
            precision = None
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            bool(_filling.fill_uninitialized_memory),
            precision,
        )

    def restore(self) -> None:
        torch.use_deterministic_algorithms(mode=self.deterministic, warn_only=self.warn_only)
        _filling.fill_uninitialized_memory = self.filling
        if self.precision is not None:
            torch.set_float32_matmul_precision(self.precision)
