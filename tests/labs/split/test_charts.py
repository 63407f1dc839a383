"""The picture of a split run: calls at their measured times, errors at their values, 0 as 0, and failures marked as failures."""

from __future__ import annotations

import dataclasses
import math

import pytest

import kit
from kit.draw.data import read
from kit.draw.style import THEMES
from kit.labs.split.charts import gradient_errors, metric_errors, step_calls
from kit.labs.split.lab import SplitConfig, cases_of
from kit.results import Verdict, VerdictRow, create_run
from kit.results.verdict import without_parts
from kit.view import named
from kit.view.named import album, plot_run
from tests.labs.parts import made_up_row
from tests.seen import axes_of, words

METRICS = {"loss": 0.5, "probs_ratio": 1.0, "probs_ratio_max": 1.2, "num_valid_samples": 40.0}
NORMALIZERS = {"probs_ratio": "tokens", "probs_ratio_max": "none", "num_valid_samples": "none"}
COUNTS = {"global_valid_seqs": 40.0, "global_valid_toks": 200.0}


pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def make_split(tmp_path):
    """Return a function that writes a split run. `off` has the factor of a metric in the split step, None where it is missing."""

    def make(*, gradient=2e-7, chunk=0.0, off=(), ranks=2, until=None, calls=True, fault=None, old=False, **changed):
        config = dataclasses.asdict(SplitConfig(**{"ranks": ranks, "steps": 2, "chunks": (1, 5), **changed}))
        writer = create_run(tmp_path, "split", config, {}, fault=fault)
        off = dict(off)
        clock = 1.8e9

        def tell(cycle, phase, rank, rows):
            about = {"run": writer.id, "lab": "split", "cycle": cycle, "phase": phase, "rank": rank, "time": clock}
            writer.append([made_up_row(about, *row, old=old) for row in rows])

        def numbers(level, factors, *, plain):
            rows = []
            for step in range(1, config["steps"] + 1):
                whole = {"global_loss": 0.5, "grad_norm": 1.0, "lr": 1e-4, "updated": 1.0, **COUNTS, **METRICS}
                rows += [
                    ("result", value * factors.get(name, 1.0), {"step": step, "name": name})
                    for name, value in whole.items()
                    if factors.get(name, 1.0) is not None
                ]
            by = {"loss": level, **NORMALIZERS}
            return rows + [("normalizer", None, {"name": name}, text) for name, text in by.items()] * plain

        def timed(*names):
            made = [("call_seconds", 0.1, {"call": name, "order": index}) for index, name in enumerate(names)]
            return made if calls else []

        plan = [(0, "prepare", None)]
        for case in cases_of(config):
            plan += [(case.cycle, "sync", case)] * case.first + [
                (case.cycle, "split", case),
                (case.cycle, "compare", case),
            ]
        for cycle, phase, case in [*plan, (0, "rehearse", None)]:
            clock += 1
            for rank in range(ranks):
                rows = [("seconds", 0.4)]
                if phase == "sync":
                    rows += numbers(case.level, {}, plain=True) + timed("run")
                if phase == "split":
                    rows += numbers(case.level, off, plain=False)
                    rows += timed("begin", *["microbatch"] * case.chunks, "finish")
                if phase == "compare" and rank == 0:
                    rows += [
                        ("gradient_error", gradient * step, {"step": step}) for step in range(1, config["steps"] + 1)
                    ]
                    rows += [("chunk_error", 0.0 if case.first else chunk)]
                    worst = {"error": gradient, "index": 3, "worst": gradient}
                    rows += [(f"tensor_gradient_{what}", value, {"tensor": "w"}) for what, value in worst.items()]
                tell(cycle, phase, rank, rows)
            if (cycle, phase) == until:
                break
        writer.finish()
        return kit.load(writer.dir)

    return make


@pytest.mark.drawn(1, of="themes")
@pytest.mark.parametrize("theme_name", THEMES)
def test_it_tells_the_story(make_split, theme_name):
    picture = plot_run(make_split(), theme=theme_name)
    assert picture.get_suptitle() == "split · 2 ranks · megatron tiny · grpo · chunks 1, 5 · 2 steps · finished"
    assert {"tokens, plain", "sequences, 1 chunk", "sequences, 5 chunks", "begin", "microbatch", "finish"} <= words(
        picture
    )
    assert {
        "limit 1e-06, step 1",
        "limit 0.0001, later",
        "0.001, common",
        "step 2",
        "against the first number of chunks",
    } <= words(picture)
    assert {"metric_parity", "chunk_invariance"} <= words(picture)
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_axes_of_the_plots_of_every_run_name_level_and_chunks(make_split):
    data = album(make_split(chunks=(1, 0))).data
    rows = data.by_step(data.level("seconds"))
    each = "one per\nmicrobatch"
    labels = [f"{level}\n{chunks}" for level in ("tokens", "sequences") for chunks in (1, each)]
    assert list(rows.attrs["ticks"].values()) == labels
    assert rows.attrs["axis"].startswith("level and chunks")


def test_calls_follow_each_other_a_lane_for_each_rank(make_split):
    rows = step_calls(read(make_split(level="tokens")))
    assert list(rows["lane"].unique()) == ["tokens, plain", "tokens, 1 chunk", "tokens, 5 chunks"]
    last = rows[(rows["lane"] == "tokens, 5 chunks") & (rows["low"] == 0.5)]
    assert last["kind"].tolist() == ["begin", *["microbatch"] * 5, "finish"]
    assert last["left"].tolist() == pytest.approx([0.1 * index for index in range(7)])
    assert (last["right"] - last["left"]).tolist() == pytest.approx([0.1] * 7)
    assert {"700 ms", "300 ms", "100 ms"} <= set(rows["words"])
    assert rows.attrs["ranks"] == "lanes: ranks 0 to 1"


def test_many_ranks_are_reported_by_one(make_split):
    assert step_calls(read(make_split(ranks=8))).attrs["ranks"] == "rank 0"


def test_an_older_run_without_times_of_calls_is_drawn(make_split):
    assert set(step_calls(read(make_split(calls=False)))["kind"]) == {"took"}
    assert axes_of(plot_run(make_split(calls=False)), "Step 2")


@pytest.mark.parametrize(("gradient", "chunk"), [(2e-7, 0.0), (0.0, 3e-7), (math.inf, 0.0)])
def test_gradients_are_at_their_error(make_split, gradient, chunk):
    rows = gradient_errors(read(make_split(level="tokens", gradient=gradient, chunk=chunk)))
    points = rows[rows["kind"] == "tokens"]
    assert points["value"].tolist() == pytest.approx([gradient] * 2)
    assert points["judged"].all()
    assert rows[rows["kind"] == "against the first number of chunks"]["value"].tolist() == pytest.approx([chunk])
    later = rows[rows["kind"] == "later"]
    assert later[["low", "high"]].to_numpy().tolist() == [[2 * gradient] * 2] * 2


def cells(run, name):
    """The words, kinds and values of a metric's row, by column."""
    rows = metric_errors(read(run))
    return rows[rows["row"].str.split().str[0] == name].set_index("column")[["words", "kind", "value"]]


def test_metrics_show_zero_and_what_one_scalar_would_do(make_split):
    run = make_split(level="tokens")
    table = cells(run, "probs_ratio")  # normalized by tokens, like the loss
    assert table["words"].tolist() == ["0", "0", "0"]
    assert list(table.index) == ["tokens,\n1 chunk", "tokens,\n5 chunks", "tokens,\none scalar"]
    assert cells(run, "num_valid_samples")["words"].tolist() == ["0", "0", f"{1 - 1 / 200:.2g}"]
    assert cells(make_split(level="sequences"), "probs_ratio")["words"].tolist() == ["0", "0", f"{200 / 40 - 1:.2g}"]


def test_a_wrong_metric_is_seen(make_split):
    run = make_split(level="tokens", off={"probs_ratio": 3.0}, fault="one-scalar-metrics")
    assert cells(run, "probs_ratio")["value"].tolist()[:2] == pytest.approx([2, 2])
    picture = plot_run(run)
    assert "fault: one-scalar-metrics" in picture.get_suptitle()
    assert {"✗ 2", "above the limit of 1e-06"} <= words(picture)


def test_a_missing_metric_is_called_so(make_split):
    table = cells(make_split(level="tokens", off={"num_valid_samples": None}), "num_valid_samples")
    assert table["words"].tolist()[:2] == ["missing"] * 2


def test_rows_of_a_check_are_one_line():
    rows = [VerdictRow(name, 0.5, 1, "1", True, "") for name in ("m", "m/one", "m/two", "n")]
    assert [row.check for row in without_parts(Verdict(rows))] == ["m", "n"]


def test_a_run_of_an_older_kit_is_drawn_as_any_run(make_split):
    run = make_split(old=True)
    assert axes_of(plot_run(run), "Timeline of ranks")
    for name in named.names(run):
        run.plot(name)
    assert [row.check for row in run.verdict().failed] == []


def test_a_run_that_broke_is_drawn_as_any_run(make_split):
    assert axes_of(plot_run(make_split(until=(2, "split"))), "Timeline of ranks")


def test_a_persons_own_code_is_named(make_split):
    assert " · mine:Step · " in plot_run(make_split(implementation="mine:Step")).get_suptitle()


@pytest.mark.slow
def test_its_drawings_have_names(make_split):
    run = make_split(level="both")
    assert {"metrics", "gradients", "calls"} <= set(named.names(run))
    metrics = named.plot_run(run, "metrics")
    assert {"tokens,\n1 chunk", "sequences,\none scalar", "above the limit of 1e-06"} <= words(metrics)
    moved = named.plot_run(run, "gradients", tolerances={"grad_parity": 1e-3})
    assert "limit 0.001, step 1" in words(moved)
    assert {"||dg|| / ||g||", "chunks per step (a point is one step, n = 1)"} <= words(moved)
    assert "time since the step began, one sample [ms]" in words(named.plot_run(run, "calls"))
    assert "metrics" not in named.names(make_split(until=(1, "split")))
