"""Rollouts: uneven lengths, masks, equal results for equal seeds, and four sets of log-probabilities that differ as in practice."""

from __future__ import annotations

import pytest
import torch

from kit.errors import BadInput
from kit.megatron.config import GEOMETRIES
from kit.train.plain import from_weights
from kit.train.protocol import KEYS, Batch, counts, cut
from kit.train.rollout import END, PAD, draw_problems, encode_ascii, prepare_rollout, score_batch, uneven

GEOMETRY = GEOMETRIES["tiny"]
PROMPTS, GROUP = 10, 4
Made = tuple[dict[str, torch.Tensor], Batch]


pytestmark = pytest.mark.usefixtures("one_thread")


def make(seed: int = 3, warm_steps: int = 8) -> Made:
    return prepare_rollout(GEOMETRY, seed=seed, prompts=PROMPTS, group=GROUP, length=32, warm_steps=warm_steps)


@pytest.fixture(scope="module")
def made() -> Made:
    return make()


def test_the_same_seed_gives_the_same_bits(made) -> None:
    state = torch.get_rng_state()
    weights, batch = make()
    assert torch.equal(torch.get_rng_state(), state)
    for one, two in ((weights, made[0]), (batch, made[1])):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(make(seed=4)[1]["input_ids"], batch["input_ids"])


def test_a_batch_has_every_key_in_its_shape(made) -> None:
    batch = made[1]
    assert tuple(batch) == KEYS
    for name, value in batch.items():
        assert value.shape == ((40,) if name in ("sample_mask", "input_lengths") else (40, 32))
        assert value.dtype == (torch.int64 if name.startswith("input") else torch.float32)
        assert torch.isfinite(value).all()
        assert value.is_contiguous()


def test_rows_are_prompt_answer_padding(made) -> None:
    batch = made[1]
    lengths, ids, mask = (batch[name].tolist() for name in ("input_lengths", "input_ids", "token_mask"))
    ended = 0
    for row, problem in enumerate(problem for problem in draw_problems(4, PROMPTS) for _ in range(GROUP)):
        prompt = encode_ascii(problem.prompt)
        assert ids[row][: len(prompt)] == prompt
        assert len(prompt) < lengths[row] <= 32
        assert mask[row] == [float(len(prompt) <= at < lengths[row]) for at in range(32)]
        assert set(ids[row][lengths[row] :]) <= {PAD}
        answer = ids[row][len(prompt) : lengths[row]]
        assert END not in answer[:-1]
        ended += answer[-1] == END
    assert len(set(lengths)) > 8
    assert ended < 40
    assert batch["sample_mask"].tolist().count(0.0) == 5


def test_a_trained_engine_ends_its_answers() -> None:
    batch = make(warm_steps=60)[1]
    last = batch["input_ids"].gather(1, batch["input_lengths"][:, None] - 1)
    assert int((last == END).sum()) > 5


def test_advantages_are_of_groups(made) -> None:
    batch = made[1]
    mask = batch["token_mask"]
    each = batch["advantages"].sum(1) / mask.sum(1)
    assert torch.equal(batch["advantages"], (each[:, None] * mask).to(torch.float32)) or torch.allclose(
        batch["advantages"], each[:, None] * mask
    )
    groups = each.view(PROMPTS, GROUP)
    assert float(groups.mean(1).abs().max()) < 1e-5
    assert int((groups.std(1, correction=0) - 1).abs().lt(1e-2).sum()) >= PROMPTS - 2


@pytest.mark.parametrize("warm_steps", [0, 8])
def test_parties_differ_as_in_life(made, warm_steps) -> None:
    weights, batch = made if warm_steps else make(warm_steps=0)
    on = batch["token_mask"] > 0
    now = score_batch(from_weights(GEOMETRY, weights), batch)
    ratio = (now - batch["prev_logprobs"])[on].exp()
    assert 0.02 < float(((ratio - 1).abs() > 0.2).float().mean()) < 0.5
    for name in ("generation_logprobs", "reference_logprobs"):
        apart = (batch["prev_logprobs"] - batch[name])[on].abs()
        assert 1e-2 < float(apart.mean()) < 1.0
        assert float(batch[name][on].max()) < 0.0
    assert not batch["generation_logprobs"][~on].any()


def test_the_engine_speaks_bfloat16() -> None:
    """Without training steps engine and reference are the same model: only the number format differs."""
    batch = make(warm_steps=0)[1]
    on = batch["token_mask"] > 0
    apart = (batch["generation_logprobs"] - batch["reference_logprobs"])[on].abs()
    assert 0 < float(apart.max()) < 0.05


def test_uneven_leaves_one_rank_empty_and_rows_with_one_token(made) -> None:
    batch = made[1]
    found = uneven(batch, 4)
    assert float(counts(cut(found, 30, 40))[1]) == 0.0
    assert [float(found["token_mask"][row].sum()) for row in (0, 10, 20)] == [1.0] * 3
    for row in (0, 10, 20):
        assert found["token_mask"][row].argmax() == batch["token_mask"][row].argmax()
    assert torch.equal(found["token_mask"][1:10], batch["token_mask"][1:10])
    assert all(torch.equal(found[name], batch[name]) for name in KEYS if name != "token_mask")


def test_rows_must_hold_a_problem() -> None:
    with pytest.raises(BadInput, match="length=11 is too short"):
        prepare_rollout(GEOMETRY, seed=1, prompts=1, group=1, length=11, warm_steps=0)
