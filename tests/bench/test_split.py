"""The bench of the split step: how samples become rows."""

from types import SimpleNamespace

import pytest

from kit.errors import KitError
from kit.labs.bench_split import parts as split
from kit.labs.bench_split.parts import SplitJob
from kit.labs.bench_split.ranks import steps as onranks
from kit.train.protocol import counts, cuts


def test_a_gpu_has_a_larger_job_even_when_quick():
    config = SimpleNamespace(size="tiny", layers=4, length=256, micro_batch=2, microbatches=5)
    jobs = {device: split.job_of(SimpleNamespace(config=config, device=device)).size for device in ("cpu", "cuda")}
    assert jobs == {"cpu": "tiny", "cuda": "125m"}


@pytest.mark.parametrize("chunks", [1, 2, 5, 10])
def test_theory_of_bubbles(chunks):
    assert split.theory(10, chunks) == pytest.approx((10 + chunks) / 11)
    assert 1 <= split.theory(10, chunks, 0.1) <= split.theory(10, chunks)
    assert split.theory(10, chunks, 0.1) == pytest.approx(split.theory(10, chunks, 0.9))


def test_the_vocabulary_weighs_on_the_last_stage():
    assert split.share_of_first_stage(SplitJob(layers=4)) == pytest.approx(2 * 7.08 / (4 * 7.08 + 38.63), rel=0.01)


def test_a_step_takes_what_its_slowest_rank_takes():
    answers = [{"seconds": {"plain": [1.0, 2.0]}}, {"seconds": {"plain": [3.0, 1.0]}}]
    assert split.slowest(answers) == {"plain": [3.0, 2.0]}


def test_ratios_are_taken_turn_by_turn_and_short_steps_are_owned_up_to():
    seconds = {"plain": [0.1, 0.2], "plain again": [0.2, 0.2]}
    step, control = split.plain_rows("a", seconds, 1e-8)
    assert list(control.values) == [2, 1]
    assert step.note.endswith("so ratios are noisy")
    longer, _ = split.plain_rows("a", {name: [10 * each for each in taken] for name, taken in seconds.items()}, 1e-8)
    assert "agree within" in longer.note
    assert "noisy" not in longer.note


def test_steps_that_differ_are_seen_and_steps_without_an_update_are_no_steps():
    def reported(loss, *, updated=True):
        return {"global_loss": loss, "grad_norm": 2.0, "updated": updated}

    bench = SimpleNamespace(results={"a": [reported(1.0)], "b": [reported(0.9)], "c": [reported(1.0, updated=False)]})
    assert onranks.Stepper.apart(bench, "a", "b") == pytest.approx(0.1)
    with pytest.raises(KitError, match="no update"):
        onranks.Stepper.apart(bench, "a", "c")


@pytest.mark.parametrize(("full", "alike"), [(True, True), (False, False)])
def test_rows_are_alike_or_ragged(full, alike):
    tokens = {counts(one)[1].item() for one in cuts(onranks.noise(10, 64, 1000, 0, full=full), 1)}
    assert (len(tokens) == 1) is alike
