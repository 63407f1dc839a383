"""How metrics of microbatches are combined into those of a step."""

import math

import pytest
import torch

from kit import World
from kit.train import protocol


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("probs_ratio_min", "min"),
        ("probs_ratio_clamped_max", "max"),
        ("lr", "mean"),
        ("wd", "mean"),
        ("reward", "mean"),
        ("global_valid_seqs", "mean"),
        ("global_valid_toks", "mean"),
        ("loss", "sum"),
        ("num_valid_samples", "sum"),
        ("min_of_something", "sum"),
        ("lr_scale", "sum"),
    ],
)
def test_names_decide(name, kind):
    assert protocol.kind(name) == kind


def microbatches(name, values):
    return [{name: torch.tensor(value)} for value in values]


@pytest.mark.parametrize(
    ("name", "values", "together"),
    [
        ("loss", [1.0, 2.0, 4.0], 7.0),
        ("lr", [1.0, 2.0, 6.0], 3.0),
        ("a_min", [3.0, 1.0, math.inf], 1.0),
        ("a_max", [3.0, 5.0, -math.inf], 5.0),
        ("a_min", [math.inf, math.inf], math.inf),
        ("loss", [], 0.0),
        ("lr", [], 0.0),
        ("a_min", [], math.inf),
        ("a_max", [], -math.inf),
    ],
)
def test_over_microbatches(name, values, together):
    assert protocol.of_microbatches(microbatches(name, values), [name]) == {name: together}


def test_sums_are_exact_in_float64():
    seen = [{"loss": torch.tensor(value, dtype=torch.float64)} for value in (1e16, 1.0, -1e16, 1.0)]
    assert protocol.of_microbatches(seen, ["loss"])["loss"] == 2.0


@pytest.mark.parametrize(
    ("values", "total"),
    [([math.inf, -math.inf], math.nan), ([math.inf, 1.0], math.inf), ([1.7e308, 1.7e308], math.inf)],
)
def test_sums_that_are_not_finite_are_no_error(values, total):
    """A rank that raises would leave the others waiting in their collective."""
    seen = [{"loss": torch.tensor(value, dtype=torch.float64)} for value in values]
    assert protocol.of_microbatches(seen, ["loss"])["loss"] == pytest.approx(total, nan_ok=True)


def test_each_is_divided_by_its_own():
    raw = {"loss": 12.0, "probs_ratio": 12.0, "num_valid_samples": 12.0, "unknown": 12.0, "r_min": 12.0}
    by = {"loss": "sequences", "probs_ratio": "tokens", "num_valid_samples": None, "r_min": None}
    assert protocol.normalised(raw, by, tokens=6.0, sequences=3.0) == {
        "loss": 4.0,
        "probs_ratio": 2.0,
        "num_valid_samples": 12.0,
        "unknown": 12.0,
        "r_min": 12.0,
    }


@pytest.mark.parametrize(("name", "value"), [("r_min", math.inf), ("r_max", -math.inf), ("r_min", -math.inf)])
def test_extremes_over_nothing_are_minus_one(name, value):
    assert protocol.normalised({name: value}, {name: None}, tokens=1.0, sequences=1.0) == {name: -1.0}


def test_extremes_are_never_divided():
    assert protocol.normalised({"r_max": 3.0}, {"r_max": "tokens"}, tokens=6.0, sequences=2.0) == {"r_max": 3.0}


def test_over_data_ranks_the_kind_decides(nothing_left):
    """Rank 1 has no valid token: its sums are 0 and its extremes infinite."""
    with World(ranks=2, device="cpu") as world:
        world.run("import math, torch\nfrom kit.train import protocol")
        world.run(
            "some = {'loss': 3.0, 'lr': 0.5, 'a_min': 2.0, 'a_max': 4.0, 'none_min': math.inf, 'none_max': -math.inf}"
        )
        world.run("empty = {'loss': 0.0, 'lr': 0.5, 'a_min': math.inf, 'a_max': -math.inf}")
        world.run("empty |= {'none_min': math.inf, 'none_max': -math.inf}")
        world.run("total = protocol.over_ranks([some, empty][rank], None, torch.device('cpu'))")
        seen = world.eval("protocol.normalised(total, {'loss': 'tokens'}, tokens=6.0, sequences=1.0)")
    wanted = {"loss": 0.5, "lr": 0.5, "a_min": 2.0, "a_max": 4.0, "none_min": -1.0, "none_max": -1.0}
    assert seen == [wanted, wanted]
