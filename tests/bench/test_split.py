"""`kit bench split`: a small run of every part on real ranks, and how samples become rows."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kit.bench import split
from kit.bench.onranks import jobs as onranks
from kit.bench.session import conduct, order, read_rows
from kit.bench.split import SPLIT, Job
from kit.errors import KitError
from kit.labs.split.lab import RECIPES
from kit.train.protocol import counts, cuts

TINY = Job(size="tiny", length=24, microbatches=5)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_small_run_has_every_row(tmp_path):
    few = {"job": TINY, "pipeline": replace(TINY, layers=2), "rounds": 2, "trials": 1, "peak_steps": 1}
    few |= {"loss": (2, 64), "loss_rounds": 2}
    assert conduct("split", **few, out=tmp_path / "rows.jsonl", device="cpu") == 0
    message = read_rows(tmp_path / "rows.jsonl")
    assert message["bench"] == "split"
    rows = message["rows"]
    assert not [row for row in rows if row["median"] is None]

    def named(*parts):
        (found,) = [row for row in rows if all(part in row["what"] for part in parts)]
        return found

    for backend in ("megatron dp2", "fsdp2 dp2"):
        for what, limit in (("1 call over", 1.02), ("5 calls over", 1.05), ("empty control", None)):
            row = named(backend, f": {what}" if limit else "24: plain over plain")
            assert (row["limit"], row["n"]) == (limit, 2)
        assert within(named(backend, "a step")) < 1e-5
        assert named(backend, "peak, 5 calls over")["limit"] == 1.01
        assert named(backend, "peak, 1 call over")["median"] == pytest.approx(1, abs=0.2)
    assert named("pp2", "1 call over")["ceiling"] == 1
    assert named("pp2", "every microbatch")["ceiling"] == pytest.approx(10 / 6)
    assert within(named("pp2", "a step")) < 1e-5
    assert named("ep2", "corrected over uncorrected")["note"].startswith("10 forward passes of a microbatch against 5")
    assert [named(f", {recipe}: with metrics")["limit"] for recipe in RECIPES] == [1.15] * len(RECIPES)


def within(row):
    return float(re.search(r"agree within ([^;]+)", row["note"])[1])


def test_a_quick_bench_has_a_larger_job_on_a_gpu():
    sizes = {
        device: SPLIT.parts(device, **SPLIT.quick)["steps.megatron"].keywords["job"].size for device in ("cpu", "cuda")
    }
    assert sizes == {"cpu": "tiny", "cuda": "125m"}


@pytest.mark.parametrize("count", [2, 4, 6])
def test_turns_are_dealt_evenly(count):
    orders = [order(count, turn) for turn in range(count)]
    for place in range(count):
        assert sorted(one[place] for one in orders) == list(range(count))
    following = Counter(pair for one in orders for pair in itertools.pairwise(one))
    assert following == dict.fromkeys(itertools.permutations(range(count), 2), 1)


@pytest.mark.parametrize("chunks", [1, 2, 5, 10])
def test_theory_of_bubbles(chunks):
    assert split.theory(10, chunks) == pytest.approx((10 + chunks) / 11)
    assert 1 <= split.theory(10, chunks, 0.1) <= split.theory(10, chunks)
    assert split.theory(10, chunks, 0.1) == pytest.approx(split.theory(10, chunks, 0.9))


def test_the_vocabulary_weighs_on_the_last_stage():
    assert split.share_of_first_stage(Job(layers=4)) == pytest.approx(2 * 7.08 / (4 * 7.08 + 38.63), rel=0.01)


def test_a_step_takes_what_its_slowest_rank_takes():
    answers = [{"seconds": {"plain": [1.0, 2.0]}}, {"seconds": {"plain": [3.0, 1.0]}}]
    assert split.slowest(answers) == {"plain": [3.0, 2.0]}


def test_ratios_are_taken_turn_by_turn_and_short_steps_are_owned_up_to():
    seconds = {"plain": [0.1, 0.2], "plain again": [0.2, 0.2]}
    step, control = split.plain_rows("a", seconds, 1e-8)
    assert (control.low, control.median, control.high) == (1, 1.5, 2)
    assert step.note.endswith("so ratios are noisy")
    longer, _ = split.plain_rows("a", {name: [10 * each for each in taken] for name, taken in seconds.items()}, 1e-8)
    assert "agree within" in longer.note
    assert "noisy" not in longer.note


def test_steps_that_differ_are_seen_and_steps_without_an_update_are_no_steps():
    def reported(loss, *, updated=True):
        return {"global_loss": loss, "grad_norm": 2.0, "updated": updated}

    bench = SimpleNamespace(results={"a": [reported(1.0)], "b": [reported(0.9)], "c": [reported(1.0, updated=False)]})
    assert onranks.Bench.apart(bench, "a", "b") == pytest.approx(0.1)
    with pytest.raises(KitError, match="no update"):
        onranks.Bench.apart(bench, "a", "c")


@pytest.mark.parametrize(("full", "alike"), [(True, True), (False, False)])
def test_rows_are_alike_or_ragged(full, alike):
    tokens = {counts(one)[1].item() for one in cuts(onranks.noise(10, 64, 1000, 0, full=full), 1)}
    assert (len(tokens) == 1) is alike
