"""Rollouts like those of a real RL step: answers sampled from an engine's weights, rewards, and log-probabilities of all four models.

`prepare` trains a plain model a little on the arithmetic task (sums, differences and products of small numbers, a token per character),
samples from a bfloat16 copy, and moves the weights on, so that the four sets of log-probabilities differ as in practice. The same seed
gives the same bits on the same machine. Limits: adam only for the few updates here; whole model on one device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kit.errors import BadInput
from kit.train.plain import PlainModel, from_weights, initial_weights, plain_logprobs
from kit.train.protocol import KEYS, Batch, cuts, rows

if TYPE_CHECKING:
    from kit.megatron.config import Geometry

PAD, END = 0, 10  # bytes that no problem holds: NUL and the end of a line
LONGEST = 11  # tokens of "99*99=9801" and the end
LR, WIDTH = 1e-3, 64  # learning rate at this width; lower for wider models, which each update moves further
LESSON = 16  # problems of one supervised update
AT_ONCE = 8192  # tokens of one forward pass
MASKED = 8  # one row in this many does not count


Lesson = list[tuple[list[int], list[int]]]  # prompts and answers, as tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    prompt: str  # "17+25="
    answer: str  # "42"


def draw_problems(seed: int, n: int) -> list[Problem]:
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    made = []
    for _ in range(n):
        # Only random() is the same in every Python version; randrange and choice may differ.
        left, right, sign = (int(draw.random() * limit) for limit in (100, 100, 3))
        value = (left + right, left - right, left * right)[sign]
        made.append(Problem(prompt=f"{left}{'+-*'[sign]}{right}=", answer=str(value)))
    return made


def encode_ascii(text: str) -> list[int]:
    return list(text.encode("ascii"))


def answer_reward(problem: Problem, answer: list[int]) -> float:
    """0 to 1 for the tokens that were written, end included: three parts for right characters in place, one for the length."""
    wanted = [*encode_ascii(problem.answer), END]
    right = sum(a == b for a, b in zip(wanted, answer, strict=False))
    return 0.75 * right / len(wanted) + 0.25 / (1 + abs(len(answer) - len(wanted)))


def prepare_rollout(
    geometry: Geometry,
    *,
    seed: int,
    prompts: int,
    group: int,
    length: int,
    warm_steps: int,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, torch.Tensor], Batch]:
    """The weights that the step starts from, and a batch of prompts * group rows, both on the host.

    initial -> warm_steps -> reference -> half as many -> engine, which samples -> 1 -> prev -> 1 -> where the step starts. The
    last two updates go far, so that some ratios are clipped.
    """
    if length <= LONGEST:
        raise BadInput(f"length={length} is too short for the arithmetic task: use more than {LONGEST}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = from_weights(geometry, initial_weights(geometry, seed), device=device)
        pupil = Pupil(model, seed)
        pupil.learn(warm_steps)
        reference = _weights(model)
        pupil.learn(warm_steps // 2)
        asked = draw_problems(seed + 1, prompts)
        batch = sample(
            from_weights(geometry, _weights(model), dtype=torch.bfloat16, device=device), asked, group, length, seed
        )
        pupil.learn(1, far=2.0)
        batch["prev_logprobs"] = score_batch(model, batch)
        pupil.learn(1, far=4.0)
        batch["reference_logprobs"] = score_batch(from_weights(geometry, reference, device=device), batch)
    batch["advantages"] = _advantages(asked, group, batch)
    count = rows(batch)
    left_out = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 2))[: count // MASKED]
    batch["sample_mask"] = torch.ones(count).index_fill(0, left_out, 0.0)
    return _weights(model), {name: batch[name] for name in KEYS}


def uneven(batch: Batch, ranks: int) -> Batch:
    """The last data rank's share of rows (of `ranks` equal ones) all masked; one valid token in the first row of the others."""
    share = rows(batch) // ranks
    mask = batch["token_mask"].clone()
    for first in range(0, share * (ranks - 1), share):
        kept = int(mask[first].argmax())
        mask[first] = 0.0
        mask[first, kept] = 1.0
    mask[share * (ranks - 1) :] = 0.0
    return {**batch, "token_mask": mask}


class Pupil:
    """A model trained on answers, some problems per update. `lesson` returns prompts and answers for an update's number."""

    def __init__(self, model: PlainModel, seed: int, lesson: Callable[[int, int], Lesson] | None = None) -> None:
        self.model = model
        self.lesson = lesson or lesson_of
        self.rate = LR * (WIDTH / model.geometry.hidden) ** 1.5
        self.optimizer = torch.optim.Adam(model.parameters())
        self.seed, self.updates = seed, 0

    def learn(self, updates: int, far: float = 1.0) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * far
        for _ in range(updates):
            self.updates += 1
            taught = self.lesson(self.seed, self.updates)
            longest = max(len(prompt) + len(answer) for prompt, answer in taught)
            ids = torch.full((len(taught), longest), PAD)
            mask = torch.zeros(len(taught), longest)
            for row, (prompt, answer) in enumerate(taught):
                end = len(prompt) + len(answer)
                ids[row, :end] = torch.tensor(prompt + answer)
                mask[row, len(prompt) : end] = 1.0
            device = self.model.model.embed_tokens.weight.device
            loss = -(plain_logprobs(self.model, ids.to(device)) * mask[:, 1:].to(device)).sum() / mask.sum()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()


def lesson_of(seed: int, update: int) -> Lesson:
    return [
        (encode_ascii(problem.prompt), [*encode_ascii(problem.answer), END])
        for problem in draw_problems(seed * 1_000_003 + update, LESSON)
    ]


@torch.no_grad()
def sample(model: PlainModel, asked: list[Problem], group: int, length: int, seed: int) -> Batch:
    """Sample `group` answers per prompt at temperature 1. A row ends with END or at its own limit, drawn between one token and `length`."""
    device = model.model.embed_tokens.weight.device
    starts = [encode_ascii(problem.prompt) for problem in asked for _ in range(group)]
    count = len(starts)
    prompt = torch.tensor([len(start) for start in starts])
    generator = torch.Generator().manual_seed(seed)
    limit = prompt + 1 + (torch.rand(count, generator=generator) * (length - prompt)).long()
    ids = torch.full((count, length), PAD)
    for row, start in enumerate(starts):
        ids[row, : len(start)] = torch.tensor(start)
    generation = torch.zeros(count, length)
    lengths = limit.clone()
    cache = model.empty_cache(count, length)
    # Prompts are fed token by token too, so that all rows stand at the same position.
    for at in range(length - 1):
        after = model(ids[:, at : at + 1].to(device), cache=cache, start=at)[:, 0].log_softmax(-1).cpu()
        drawn = torch.multinomial(after.exp(), 1, generator=generator)[:, 0]
        written = (prompt <= at + 1) & (at + 1 < lengths)
        ids[written, at + 1] = drawn[written]
        following = ids[:, at + 1]
        generation[:, at + 1] = after.gather(1, following[:, None])[:, 0]
        lengths = torch.where(written & (drawn == END), at + 2, lengths)
        if bool((lengths <= at + 2).all()):
            break
    column = torch.arange(length)[None]
    inside = column < lengths[:, None]
    mask = inside & (column >= prompt[:, None])
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": mask.float(),
        "generation_logprobs": generation * mask,
    }


@torch.no_grad()
def score_batch(model: PlainModel, batch: Batch) -> torch.Tensor:
    """Log-probabilities of a batch's tokens, [rows, length]: none for the first token, nor for padding."""
    device = model.model.embed_tokens.weight.device
    length = batch["input_ids"].shape[1]
    parts = [
        plain_logprobs(model, piece["input_ids"].to(device)).float().cpu()
        for piece in cuts(batch, max(1, AT_ONCE // length))
    ]
    scored = torch.nn.functional.pad(torch.cat(parts), (1, 0))
    return scored * (torch.arange(length)[None] < batch["input_lengths"][:, None])


def _advantages(asked: list[Problem], group: int, batch: Batch) -> torch.Tensor:
    """Rewards minus the mean of their group, divided by its deviation; one value for all tokens of a row."""
    ids, lengths = batch["input_ids"].tolist(), batch["input_lengths"].tolist()
    rewards = torch.tensor(
        [
            answer_reward(problem, ids[row][len(problem.prompt) : lengths[row]])
            for index, problem in enumerate(asked)
            for row in range(index * group, (index + 1) * group)
        ]
    ).view(-1, group)
    centred = rewards - rewards.mean(1, keepdim=True)
    by_row = (centred / (rewards.std(1, correction=0, keepdim=True) + 1e-6)).flatten()
    return by_row[:, None].expand_as(batch["input_ids"]) * batch["token_mask"]


def _weights(model: PlainModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in model.named_parameters()}
