"""Somebody's own trainer goes through the same phases and checks; a wrong one is found out, whatever its numbers say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kit
from kit.errors import BadInput
from kit.labs.split.broken import NUMBERS, whole_result
from kit.labs.split.config import SplitConfig
from kit.results import exit_code
from tests.labs.split.conftest import ROOT, failed, unanswered

Split = Callable[..., kit.Run]
ONE = {"steps": 1, "layers": 1, "microbatches": 2, "chunks": [1], "level": "tokens"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{}, {"overlap_grad_reduce": True, "distributed_optimizer": True}, {"reduce": "mean"}, {"tp": 2}],
    ids=lambda config: "-".join(config) or "default",
)
def test_the_documentations_trainer_passes(split: Split, config: dict[str, object]) -> None:
    verdict = split(implementation="own_split:Trainer", **{**ONE, "steps": 2, "chunks": [1, 2]}, **config).verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) == {"backends_agree"}


@pytest.mark.slow
def test_a_trainer_that_forgets_the_reduction_is_judged(split: Split) -> None:
    verdict = split(implementation="mine:Forgets", **ONE).verdict()
    assert exit_code(verdict) == 1
    assert {"one_reduction", "grad_parity", "params_parity", "ranks_agree"} <= failed(verdict)
    assert "loss_parity" not in failed(verdict)


WRONG = {
    "RankLies": {"ranks_agree"},
    "NotANumber": {"metric_parity"},
    "NoRate": {"lr_of_this_step", "result_parity"},
    "NeverUpdated": {"result_parity"},
    "NoDecay": {"result_parity"},
    "StrayReplica": {"params_parity"},
    "OwnUpdate": {"grad_parity", "params_parity", "lr_of_this_step"},
    "LateVersion": {"version_ticks"},
    "AbortMoves": {"abort_is_clean"},
    "AbortLosesHooks": {"hooks_restored"},
    "KeepsRandom": {"abort_is_clean"},
    "Swallows": {"misuse_raises"},
    "RaisesWhenClosed": {"misuse_raises"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_trainer_is_found_out(split: Split, name: str) -> None:
    assert WRONG[name] <= failed(split(implementation=f"mine:{name}", **ONE).verdict())


@pytest.mark.slow
def test_what_it_does_to_its_rows_is_its_own_business(split: Split) -> None:
    """Both levels: a plain step comes after a piece-wise one."""
    verdict = split(implementation="mine:Consumes", **{**ONE, "level": "both", "chunks": [1, 2]}).verdict()
    assert failed(verdict) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raises", "LookupError: my own finish failed"),
        ("Empty", "the object it returned lacks begin, microbatch, finish, abort, version"),
        ("HalfOfIt", "the object it returned lacks finish, abort"),
        ("Lacks", r"finish\(\) must return a dict of global_loss, .*; it lacks lr, global_valid_seqs"),
        ("Nothing", r"version, metrics; it returned NoneType"),
        ("Words", r"these are no numbers: loss='small'"),
    ],
)
def test_what_breaks_the_run_says_so(split: Split, name: str, said: str) -> None:
    with pytest.raises(kit.RankError, match=said) as caught:
        split(implementation=f"mine:{name}", **ONE)
    assert caught.value.phase == "split"
    assert name == "Raises" or f"implementation=mine:{name}" in str(caught.value)
    assert name != "Raises" or "mine.py" in caught.value.traceback


WHOLE = {**dict.fromkeys(NUMBERS, 1.0), "version": 1, "metrics": {"loss": 0.5}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": None}, "these are no numbers: lr=None"),
        ({"metrics": [1]}, "its metrics are list, and must be a dict"),
        ({"metrics": {"loss": "small"}}, "these are no numbers: loss='small'"),
    ],
)
def test_a_result_that_is_none(change: dict[str, object], said: str) -> None:
    config = SplitConfig(implementation="mine:Own")
    assert whole_result(config, WHOLE) == WHOLE
    with pytest.raises(BadInput, match=f"^implementation=mine:Own: finish.*; {said}"):
        whole_result(config, {**WHOLE, **change})
    with pytest.raises(BadInput, match=r"it lacks version$"):
        whole_result(config, {name: value for name, value in WHOLE.items() if name != "version"})


@pytest.mark.slow
def test_a_bug_of_the_kits_own_step_is_not_put_into_somebodys(split: Split) -> None:
    with pytest.raises(kit.RankError, match="fault 'late-lr' is a bug of the kit's own step"):
        split(fault="late-lr", implementation="own_split:Trainer")


def test_the_documentation_names_the_example() -> None:
    page = (ROOT / "docs" / "own-code.md").read_text()
    assert "[examples/own_split.py](examples/own_split.py)" in page
    assert "kit run split --set implementation=own_split:Trainer" in page
