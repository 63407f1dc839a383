"""A user's trainer goes through the same phases and checks; a wrong one is caught, whatever its numbers say."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import kit
from kit.errors import BadInput
from kit.labs.split.lab import SplitConfig
from kit.labs.split.ranks.phases import NUMBERS, whole_result
from kit.results import exit_code
from tests.labs.parts import failed, unanswered, why
from tests.labs.split.conftest import ROOT

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
def test_a_trainer_of_ones_own_on_ranks_that_share_columns(split: Split) -> None:
    parts = {**ONE, "backend": "fsdp2", "cp": 2, "steps": 2, "length": 27}
    assert failed(split(implementation="mine:LoopOnColumns", **parts).verdict()) == set()
    wrong = split(implementation="mine:LoopThatCountsContextRanks", **parts).verdict()
    assert {"replicas_counted_once"} <= failed(wrong)


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
    "StaysDeterministic": {"hooks_restored"},
    "KeepsRandom": {"abort_is_clean"},
    "Swallows": {"misuse_raises"},
    "StoresAndSwallows": {"misuse_raises"},
    "AppliesNaN": {"nonfinite_skipped"},
    "OtherWords": {"misuse_raises"},
    "BreaksAfterAbort": {"abort_is_clean", "misuse_raises"},
    "RaisesWhenClosed": {"misuse_raises"},
}


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_trainer_is_found_out(split: Split, name: str) -> None:
    assert WRONG[name] <= failed(split(implementation=f"mine:{name}", **ONE).verdict())


@pytest.mark.slow
def test_words_of_its_own_are_a_number_of_their_own(split: Split) -> None:
    run = split(implementation="mine:OtherWords", **ONE)
    reason = why(run.verdict(), "misuse_raises")
    assert reason.startswith("errors that do not name the state: 9 (")
    assert "begin while open, RuntimeError: not now" in reason
    assert "errors of another type than Misuse (allowed): 9" in reason
    records = run.frame().query("phase == 'rehearse' and rank == 0").groupby("metric")["value"].sum()
    assert (records["misuse_silent"], records["misuse_other_words"], records["misuse_other_type"]) == (0, 9, 9)


@pytest.mark.slow
def test_a_rehearsal_that_breaks_off_fails_what_it_was_to_judge(split: Split) -> None:
    verdict = split(implementation="mine:BreaksAfterAbort", **ONE).verdict()
    assert "could not be judged: a rehearsal raised an error" in why(verdict, "abort_is_clean")


@pytest.mark.slow
def test_a_step_that_clips_by_torch_is_judged_by_its_gradients_before_that(split: Split) -> None:
    assert failed(split(implementation="mine:ClipsItself", **ONE, dtype="float32").verdict()) == set()
    verdict = split(implementation="mine:ClipsToHalf", **ONE, dtype="float32").verdict()
    assert {"update"} <= failed(verdict) <= {"update", "params_parity"}  # and not grad_parity: the gradients are right


@pytest.mark.slow
def test_an_error_instead_of_a_skipped_update_is_right_too(split: Split) -> None:
    assert failed(split(implementation="mine:RaisesOnNaN", **ONE).verdict()) == set()


@pytest.mark.slow
def test_a_step_may_store_rows_and_compute_in_finish(split: Split) -> None:
    verdict = split(implementation="mine:Stores", **ONE).verdict()
    assert failed(verdict) == set()
    assert why(verdict, "misuse_raises").startswith("begin, microbatch and finish raise in the wrong state")


@pytest.mark.slow
def test_what_it_does_to_its_rows_is_its_own_business(split: Split) -> None:
    """With both levels, a plain step comes after a split one."""
    verdict = split(implementation="mine:Consumes", **{**ONE, "level": "both", "chunks": [1, 2]}).verdict()
    assert failed(verdict) == set()


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "LookupError: my own finish failed"),
        ("Empty", "the object it returned lacks begin, microbatch, finish, abort, version"),
        ("HalfOfIt", "the object it returned lacks finish, abort"),
        ("Lacks", r"finish\(\) must return a dict with global_loss, .*; it lacks lr, global_valid_seqs"),
        ("Nothing", r"version, metrics; it returned NoneType"),
        ("Words", r"not a number: loss='small'"),
    ],
)
def test_what_breaks_the_run_says_so(split: Split, name: str, message: str) -> None:
    with pytest.raises(kit.RankError, match=message) as caught:
        split(implementation=f"mine:{name}", **ONE)
    assert caught.value.phase == "split"
    assert name == "Raises" or f"implementation=mine:{name}" in str(caught.value)
    assert name != "Raises" or "mine.py" in caught.value.traceback


@pytest.mark.slow
def test_a_loss_of_ones_own(split: Split) -> None:
    verdict = split(loss="mine:Reinforce", **{**ONE, "level": "both", "chunks": [1, 2]}).verdict()
    assert failed(verdict) == set()
    assert {"later_steps", "backends_agree"} == unanswered(verdict)
    assert re.match(r"loss: .* in float64, .*worst of 1 metric", why(verdict, "oracle"))
    assert {row.check for row in verdict if row.check.startswith("metric_parity/")} == {
        f"metric_parity/{name}" for name in ("loss", "entropy", "rows")
    }


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
@pytest.mark.parametrize(
    ("name", "checks"),
    [("WrongNormalizer", {"metric_parity"}), ("DividesAgain", {"oracle"}), ("ByMultiplying", {"masked_places"})],
)
def test_a_wrong_loss_is_found_out(split: Split, name: str, checks: set[str]) -> None:
    assert checks <= failed(split(loss=f"mine:{name}", **ONE).verdict())


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OneLevel", "loss=mine:OneLevel: its level is 'tokens' but ctx.level is 'sequences'; use level=tokens"),
        ("UnknownMetric", "normalizers.. and the returned metrics differ in extra"),
        ("OddNormalizer", "a normalizer must be 'tokens', 'sequences' or None"),
        ("Empty", "the object it returned lacks level, normalizers, __call__"),
    ],
)
def test_a_loss_that_cannot_be_used_says_so(split: Split, name: str, message: str) -> None:
    with pytest.raises(kit.RankError, match=message):
        split(loss=f"mine:{name}", **{**ONE, "level": "sequences"})


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_model_of_ones_own(split: Split, config: dict[str, object]) -> None:
    own = {name: value for name, value in ONE.items() if name != "layers"}
    verdict = split(model="mine:own_model", **{**own, "layers": None}, **config).verdict()
    assert failed(verdict) == set()
    assert {"oracle", "update", "backends_agree", "chunk_invariance", "later_steps"} == unanswered(verdict)
    assert re.search(r"worst tensor: [01]\.decoder\.", why(verdict, "grad_parity"))


@pytest.mark.slow
@pytest.mark.drawn(2, of="own code")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model_without_scheduler", "model=mine:model_without_scheduler: the object it returned lacks scheduler"),
        ("model_that_never_reduces", "finalize_model_grads_func in the config of a chunk is None"),
    ],
)
def test_a_model_that_cannot_be_used_says_so(split: Split, name: str, message: str) -> None:
    with pytest.raises(kit.RankError, match=message):
        split(model=f"mine:{name}", **{**ONE, "layers": None})


WHOLE = {**dict.fromkeys(NUMBERS, 1.0), "version": 1, "metrics": {"loss": 0.5}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": None}, "not a number: lr=None"),
        ({"metrics": [1]}, "metrics is a list and must be a dict"),
        ({"metrics": {"loss": "small"}}, "not a number: loss='small'"),
    ],
)
def test_a_result_that_is_none(change: dict[str, object], message: str) -> None:
    config = SplitConfig(implementation="mine:Own")
    assert whole_result(config, WHOLE) == WHOLE
    with pytest.raises(BadInput, match=f"^implementation=mine:Own: finish.*; {message}"):
        whole_result(config, {**WHOLE, **change})
    with pytest.raises(BadInput, match=r"it lacks version$"):
        whole_result(config, {name: value for name, value in WHOLE.items() if name != "version"})


def test_the_documentation_names_the_example() -> None:
    page = (ROOT / "docs" / "own-code.md").read_text()
    assert "[examples/own_split.py](examples/own_split.py)" in page
    assert "kit run split --set implementation=own_split:Trainer" in page
