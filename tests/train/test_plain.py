"""The plain model compared with itself in float64, with attention computed by hand, and with its own cache."""

from __future__ import annotations

import math

import pytest
import torch

from kit.megatron.config import GEOMETRIES
from kit.train.plain import PlainModel, from_weights, initial_weights, plain_logprobs

GEOMETRY = GEOMETRIES["tiny"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Weights larger than initial ones, with non-zero biases, so that every part matters."""
    generator = torch.Generator().manual_seed(5)
    made = initial_weights(GEOMETRY, 1)
    return {name: value * 3 + 0.1 * torch.randn(value.shape, generator=generator) for name, value in made.items()}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, GEOMETRY.vocab, (3, 20), generator=torch.Generator().manual_seed(2))


def test_names_are_those_of_qwen2() -> None:
    layer = {f"self_attn.{kind}_proj.{what}" for kind in "qkv" for what in ("weight", "bias")}
    layer |= {f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    layer |= {"self_attn.o_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}
    expected = {f"model.layers.{index}.{name}" for index in range(GEOMETRY.layers) for name in layer}
    made = initial_weights(GEOMETRY, 1)
    assert made.keys() == expected | {"model.embed_tokens.weight", "model.norm.weight"}
    assert made["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert not any(name.endswith("bias") for name in initial_weights(GEOMETRIES["125m"].__class__(**small()), 1))


def small() -> dict[str, object]:
    g = GEOMETRIES["125m"]
    sizes = {"hidden": 24, "layers": 1, "heads": 4, "kv_heads": 4, "ffn": 8, "vocab": 16, "seq": 8}
    return {name: sizes.get(name, getattr(g, name)) for name in g.__dataclass_fields__}


def test_initial_weights_are_of_the_seed() -> None:
    first, again, other = (initial_weights(GEOMETRY, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert float(first["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)
    narrower = 0.02 / math.sqrt(2 * GEOMETRY.layers)
    assert float(first["model.layers.0.mlp.down_proj.weight"].std()) == pytest.approx(narrower, rel=0.05)
    assert float(first["model.norm.weight"].min()) == 1.0


def test_float32_is_float64_to_rounding(weights, ids) -> None:
    wide, narrow = (
        plain_logprobs(from_weights(GEOMETRY, weights, dtype=dtype), ids) for dtype in (torch.float64, torch.float32)
    )
    assert (wide.dtype, narrow.dtype, tuple(wide.shape)) == (torch.float64, torch.float32, (3, 19))
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)
    coarse = plain_logprobs(from_weights(GEOMETRY, weights, dtype=torch.bfloat16), ids)
    assert coarse.dtype == torch.float32
    assert 1e-4 < float((coarse.double() - wide).abs().mean()) < 0.2


def by_hand(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Compute the logits of one sequence by loops over heads and positions, in float64."""
    g, w = GEOMETRY, {name: value.double() for name, value in weights.items()}
    head = g.hidden // g.heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + g.norm_eps).sqrt() * w[name]

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        out = x.clone()
        for pair in range(head // 2):
            angle = position * g.rope_base ** (-2 * pair / head)
            a, b = x[pair], x[pair + head // 2]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + head // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(g.layers):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (h @ w[f"{at}self_attn.{n}_proj.weight"].T + w[f"{at}self_attn.{n}_proj.bias"] for n in "qkv")
        mixed = torch.zeros_like(x)
        for one in range(g.heads):
            mine, shared = slice(one * head, one * head + head), one // (g.heads // g.kv_heads) * head
            for t in range(len(ids)):
                query = turned(q[t, mine], t)
                keys = torch.stack([turned(k[s, shared : shared + head], s) for s in range(t + 1)])
                share = (keys @ query / math.sqrt(head)).softmax(0)
                mixed[t, mine] = share @ v[: t + 1, shared : shared + head]
        x = x + mixed @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T


def test_logits_are_those_worked_out_by_hand(weights, ids) -> None:
    model = from_weights(GEOMETRY, weights, dtype=torch.float64)
    # Angles are float64 in both; only rounding differs.
    torch.testing.assert_close(model(ids[:1, :6])[0], by_hand(weights, ids[0, :6].tolist()), rtol=1e-9, atol=1e-9)


def test_a_token_sees_nothing_after_it(weights, ids) -> None:
    model = from_weights(GEOMETRY, weights)
    changed = ids.clone()
    changed[:, 12:] = 7
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 13], after[:, 13])


def test_a_cache_gives_the_same_logits(weights, ids) -> None:
    model = from_weights(GEOMETRY, weights, dtype=torch.float64)
    with torch.no_grad():
        cache = model.empty_cache(3, 20)
        steps = [model(ids[:, at : at + 1], cache=cache, start=at) for at in range(20)]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids))
        pieces = [model(ids[:, at : at + 5], cache=cache, start=at) for at in range(0, 20, 5)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(ids))


def test_weights_must_be_all_and_no_more(weights) -> None:
    with pytest.raises(RuntimeError, match="Missing"):
        from_weights(GEOMETRY, {name: value for name, value in weights.items() if name != "model.norm.weight"})
    with pytest.raises(RuntimeError, match="Unexpected"):
        from_weights(GEOMETRY, {**weights, "lm_head.weight": torch.zeros(1)})


def test_a_model_takes_no_random_numbers(weights) -> None:
    before = torch.get_rng_state()
    model = from_weights(GEOMETRY, weights)
    assert isinstance(model, PlainModel)
    assert torch.equal(torch.get_rng_state(), before)
