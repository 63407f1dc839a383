"""Checks of the split lab on made-up records: differences that rounding explains pass, others fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.labs.discover import find
from kit.labs.split.lab import SplitConfig
from kit.labs.split.ranks.phases import SplitSide, Trained
from kit.results import Row, VerdictRow, to_frame
from tests.labs.parts import Answers

CONFIG = asdict(SplitConfig(ranks=2, level="tokens", chunks=(1,), steps=2, dtype="float32"))
Fact = tuple[int, str, str, float, dict[str, str | int]]
RESULT = {
    "grad_norm": 1.0,
    "lr": 1e-4,
    "wd": 0.1,
    "updated": 1.0,
    "global_valid_seqs": 15.0,
    "global_valid_toks": 85.0,
    "global_loss": 0.5,
}
ROUNDING = 1.5e-5


def answers(rows: Iterable[Fact], tolerances: Mapping[str, float] | None = None, **config: object) -> Answers:
    records = [
        Row(run="r", lab="split", cycle=c, phase=p, rank=0, metric=m, value=v, unit="1", time=0, ids=i)
        for c, p, m, v, i in rows
    ]
    return Answers(to_frame(records), {**CONFIG, **config}, find("split").load_rules(), tolerances)


def results(phase: str, change: Mapping[str, float] | None = None, step: int = 1) -> list[Fact]:
    """The numbers of two steps; `change` replaces some of them in one step."""
    return [
        (1, phase, "result", value, {"step": each, "name": name})
        for each in (1, 2)
        for name, value in {**RESULT, **((change or {}) if each == step else {})}.items()
    ]


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True),
        ({"grad_norm": 1 + 2e-6}, True),  # within the rounding of a float32 norm
        ({"grad_norm": 1 + 2e-5}, False),
        ({"grad_norm": float("nan")}, False),
        ({"wd": 0.1 * (1 + 2e-5)}, False),  # other numbers of a result have no such rounding
        ({"global_valid_toks": 85.001}, False),
        ({"updated": 0.0}, False),
    ],
    ids=str,
)
def test_a_norm_may_be_rounded_as_float32_rounds(change: dict[str, float], *, passed: bool) -> None:
    rounding: list[Fact] = [(1, phase, "norm_rounding", ROUNDING, {}) for phase in ("sync", "split")]
    row = answers(results("sync") + results("split", change) + rounding)["result_parity"]
    assert row.passed is passed
    assert row.limit == 1e-6


def test_without_a_rounding_a_norm_has_none() -> None:
    """Records of an earlier version lack `norm_rounding`, so no rounding is allowed."""
    row = answers(results("sync") + results("split", {"grad_norm": 1 + 2e-6}))["result_parity"]
    assert (row.passed, row.measured) == (False, pytest.approx(2e-6))


def balances(plain: float, cut: float | None, exact: float = 1.25) -> list[Fact]:
    message = [
        *results("sync", {"moe_aux_loss": plain}),
        *results("split", {} if cut is None else {"moe_aux_loss": cut}),
    ]
    return [*message, (1, "oracle", "balance", exact, {})]


@pytest.mark.parametrize(
    ("plain", "cut", "passed"),
    [
        (1.25, 1.25 * (1 + 1e-7), True),
        (1.25, 1.2501, False),
        (5.0, 5.0, False),  # both ways have the same error
        (1.25, None, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_the_experts_balance_is_held_against_float64(plain: float, cut: float | None, *, passed: bool) -> None:
    row = answers(balances(plain, cut), experts=4, aux_loss=0.01)["experts_balance"]
    assert row.passed is passed


def test_a_job_without_that_loss_is_not_asked_for_it() -> None:
    for config in ({"experts": 0}, {"experts": 4, "aux_loss": 0.0}):
        assert "experts_balance" not in answers(balances(1.25, 1.25), **config)


def noises(rounding: float, reach: float = 0.0, of: str = "later") -> list[Fact]:
    """A noise, by default that of later steps, and what clipping may add to it."""
    return [(1, "oracle", metric, value, {"of": of}) for metric, value in (("noise", rounding), ("reach", reach))]


def later(norm: float, noise: list[Fact], dtype: str, *, moved: float | None = None, **config: object) -> VerdictRow:
    gradients: list[Fact] = [(1, "compare", "gradient_error", 0.0, {"step": step}) for step in (1, 2)]
    rows = results("sync") + results("split", {"grad_norm": norm}, step=2) + gradients + noise
    tolerances = None if moved is None else {"later_steps": moved}
    return answers(rows, tolerances, dtype=dtype, **config)["later_steps"]


@pytest.mark.parametrize(
    ("norm", "noise", "dtype", "passed", "limit"),
    [
        (1.2, noises(0.05, 0.1), "bfloat16", True, 0.25),
        (1.3, noises(0.05, 0.1), "bfloat16", False, 0.25),
        (
            1.05,
            noises(0.01),
            "bfloat16",
            False,
            0.03,
        ),  # the limit of a calm run is lower than the usual one of bfloat16
        (1.05, [], "bfloat16", True, 0.1),  # records of an earlier version lack the noise
        (1.05, noises(float("nan")), "bfloat16", True, 0.1),
        (1.05, noises(0.05, 0.1), "float32", False, 1e-4),
        (1.05, noises(0.3, 0.2), "bfloat16", None, 0.1),  # rounding hides everything
        (3.0, noises(0.3, 0.2), "bfloat16", False, 1.1),
    ],
    ids=str,
)
def test_in_bfloat16_limits_follow_from_the_noise_of_the_oracle(
    norm: float, noise: list[Fact], dtype: str, *, passed: bool | None, limit: float
) -> None:
    row = later(norm, noise, dtype)
    assert (row.passed, row.limit) == (passed, pytest.approx(limit))


@pytest.mark.parametrize(("norm", "moved", "passed"), [(1.9, 0.1, False), (1.9, 0.95, True), (3.0, 2.5, True)])
def test_a_moved_limit_is_held_where_rounding_hides_everything(norm: float, moved: float, *, passed: bool) -> None:
    row = later(norm, noises(0.3, 0.2), "bfloat16", moved=moved)
    assert (row.passed, row.limit) == (passed, moved)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, 0.03),
        ({"loss": "mine:loss"}, 0.1),
        ({"model": "mine:job"}, 0.1),
        ({"implementation": "mine:Step"}, 0.1),  # it rounds in another order, which later steps amplify
        ({"experts": 4}, 0.1),
    ],
    ids=str,
)
def test_noise_of_the_kits_formulas_lowers_no_limit_of_other_formulas(config: dict[str, object], limit: float) -> None:
    """Own code may round more than the loss and the dense model whose noise is measured."""
    assert later(1.05, noises(0.01), "bfloat16", **config).limit == pytest.approx(limit)
    assert later(1.05, noises(0.05), "bfloat16", **config).limit == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("change", "rounding"),
    [
        ({"lr": 1.05e-4}, None),
        ({"lr": 1.05e-4}, 0.005),
        ({"wd": 0.1005}, 0.005),
        ({"global_valid_toks": 85.005}, 0.005),
        ({"global_valid_seqs": 15.1}, 0.005),
        ({"updated": 0.0}, 0.4),  # also where rounding hides the norm
    ],
    ids=str,
)
def test_in_bfloat16_only_the_norm_of_a_result_is_rounded(change: dict[str, float], rounding: float | None) -> None:
    noise = [] if rounding is None else noises(rounding, of="gradients")
    rows = answers(results("sync") + results("split", change) + noise, dtype="bfloat16")
    assert rows["result_parity"].passed is False
    exact = rows["result_parity/other numbers"]
    assert (exact.passed, exact.limit) == (False, 1e-6)


@pytest.mark.parametrize(
    ("norm", "rounding", "passed", "limit"),
    [(1.014, 0.005, True, 0.015), (1.016, 0.005, False, 0.015), (1.009, None, True, 0.01), (1.5, 0.4, None, 0.01)],
    ids=str,
)
def test_the_norm_of_a_result_in_bfloat16_is_held_against_noise(
    norm: float, rounding: float | None, limit: float, *, passed: bool | None
) -> None:
    noise = [] if rounding is None else noises(rounding, of="gradients")
    facts = results("sync") + results("split", {"grad_norm": norm}) + noise
    rows = answers(facts, dtype="bfloat16")
    assert (rows["result_parity"].passed, rows["result_parity/grad_norm"].limit) == (passed, pytest.approx(limit))
    assert rows["result_parity/other numbers"].passed is True
    moved = answers(facts, {"result_parity": 1e-3}, dtype="bfloat16")
    assert moved["result_parity"].passed is False


def compared(scaled: Mapping[str, float]) -> str:
    """What is said of gradients that are so many times those of the plain step: recorded and judged as in a run."""
    rows: list[Fact] = []
    ctx: Any = SimpleNamespace(
        record=lambda metric, value, text="", **ids: rows.append((1, "compare", metric, float(value), ids)),
        config=SplitConfig(ranks=2, level="tokens", chunks=(1,), steps=2, dtype="float32"),
        rank=0,
    )
    plain = {name: torch.sin(torch.arange(1.0, 9.0) * size) for size, name in enumerate(scaled, start=1)}
    side = SplitSide(ctx)
    side.plain = Trained(gradients=[plain] * 2, weights=plain)
    side.cut = Trained(
        gradients=[{name: plain[name] * factor for name, factor in scaled.items()}, plain], weights=plain
    )
    side.compare(1)
    return answers(rows)["grad_parity"].why


def test_a_common_factor_of_all_gradients_is_said() -> None:
    assert "; all gradients are 0.5 times those of the plain step" in compared({"a": 0.5, "b": 0.5})
    assert "; all gradients are -8 times those of the plain step" in compared({"a": -8.0, "b": -8.0})
    assert "all gradients" not in compared({"a": 0.5, "b": 0.25})
    assert "all gradients" not in compared({"a": 1.0, "b": 1.0})
