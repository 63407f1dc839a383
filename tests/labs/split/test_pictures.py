"""The picture of a split run: calls at their measured times, errors at their values, 0 as 0, and failures marked as failures."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import matplotlib as mpl
import pytest

import kit
from kit.draw.plots import Picture, step_axis
from kit.draw.style import THEMES, theme
from kit.labs.split.lab import SplitConfig, cases_of
from kit.labs.split.pictures import Decades, ways
from kit.results import Row, Verdict, VerdictRow, create_run
from kit.results.verdict import without_parts
from kit.view import named
from kit.view.named import album, plot

METRICS = {"loss": 0.5, "probs_ratio": 1.0, "probs_ratio_max": 1.2, "num_valid_samples": 40.0}
NORMALIZERS = {"probs_ratio": "tokens", "probs_ratio_max": "none", "num_valid_samples": "none"}
COUNTS = {"global_valid_seqs": 40.0, "global_valid_toks": 200.0}


@pytest.fixture(autouse=True)
def strict():
    """Make warnings errors: a layout that does not fit only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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
            writer.append([as_record(about, *row) for row in rows])

        def as_record(about, name, value, ids=None, text=""):
            if old:  # texts and ids used to be coded in names and numbers
                path = "/".join([name, *map(str, (ids or {}).values())])
                return Row(**about, metric=path, value=1 if value is None else value, unit="1")
            return Row(**about, metric=name, value=value, unit="1", ids=ids or {}, text=text)

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


def axes_of(picture, title):
    return next(axes for axes in picture.axes if axes.get_title(loc="left").startswith(title))


def words(picture):
    return {text.get_text().strip() for text in picture.findobj(mpl.text.Text)}


def bars(axes):
    """The bars of a drawing, sorted by row and left end: row, left end, width."""
    found = [
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for drawn in axes.containers for bar in drawn
    ]
    return sorted(found)


@pytest.mark.parametrize("theme_name", THEMES)
def test_it_tells_the_story(make_split, theme_name):
    picture = plot(make_split(), theme=theme_name)
    assert picture.get_suptitle() == "split · 2 ranks · megatron tiny · grpo · chunks 1, 5 · 2 steps · finished"
    assert {"tokens, plain", "sequences, plain", "1 chunk", "5 chunks", "begin", "microbatch", "finish"} <= words(
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
    axes = Picture().subplots()
    step_axis(axes, album(make_split(chunks=(1, 0))).data, theme("light"))
    each = "one per\nmicrobatch"
    labels = [f"{level}\n{chunks}" for level in ("tokens", "sequences") for chunks in (1, each)]
    assert [label.get_text() for label in axes.get_xticklabels()] == labels
    assert axes.get_xlabel().startswith("level and chunks")


def test_calls_follow_each_other_a_lane_for_each_rank(make_split):
    axes = axes_of(plot(make_split(level="tokens")), "Step 2, call by call (lanes: ranks 0 to 1)")
    assert len({place for place, _, _ in bars(axes)}) == 2 * 3
    lane = [(left, width) for place, left, width in bars(axes) if place == bars(axes)[-1][0]]
    assert [left for left, _ in lane] == pytest.approx([100 * index for index in range(7)])  # begin, 5 calls, finish
    assert [width for _, width in lane] == pytest.approx([100] * 7)
    assert {"700 ms", "300 ms", "100 ms"} <= words(axes.figure)


def test_many_ranks_are_reported_by_one(make_split):
    assert axes_of(plot(make_split(ranks=8)), "Step 2, call by call (rank 0)")


def test_every_way_has_its_place():
    found = [
        (place, case.level, case.chunks, phase) for place, case, phase in ways({"level": "both", "chunks": [2, 0]})
    ]
    assert found == [
        (0, "tokens", 2, "sync"), (1, "tokens", 2, "split"), (2, "tokens", 0, "split"),
        (3.5, "sequences", 2, "sync"), (4.5, "sequences", 2, "split"), (5.5, "sequences", 0, "split"),
    ]  # fmt: skip


def test_an_older_run_without_times_of_calls_is_drawn(make_split):
    assert not axes_of(plot(make_split(calls=False)), "Step 2").containers[0].patches


@pytest.mark.parametrize(
    ("value", "place"), [(0.0, -8.2), (1e-6, -6), (1.0, 0), (10.0, 1), (math.inf, 2.8), (math.nan, 2.8)]
)
def test_every_error_has_a_place(value, place):
    decades = Decades.of([3e-7, 20.0, math.inf], [1e-3])
    assert (decades.low, decades.high) == (-7, 2)
    assert decades.place(value) == pytest.approx(place)
    assert set(decades.ticks().values()) >= {"0", "∞", "10²"}
    assert decades.ends()[0] < decades.place(0) < decades.shade()[1] < decades.low


@pytest.mark.parametrize("low", range(-18, 0))
def test_ticks_do_not_touch(low):
    places = sorted(Decades(low, 1, infinite=False).ticks())
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert min(gaps) > (1 - low) / 16
    assert len(places) >= 3


def test_all_bit_for_bit_has_places_too():
    decades = Decades.of([0.0, 0.0], [1e-3])
    assert "∞" not in decades.ticks().values()
    assert decades.place(0) < decades.low == -3


def gradient_points(run):
    axes = axes_of(plot(run), "Gradients against the plain step")
    zero = next(
        tick for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if label.get_text() == "0"
    )
    lines = {line.get_label(): line.get_ydata() for line in axes.lines if line.get_label() == "tokens"}
    diamonds = [float(line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "D"]
    large = [line for line in axes.lines if line.get_markersize() == 8.5]
    return list(lines["tokens"]), diamonds, zero, large


def test_gradients_lie_at_their_error_and_zero_at_zero(make_split):
    points, between, zero, wrong = gradient_points(make_split(level="tokens"))
    assert points == pytest.approx([math.log10(2e-7)] * 2)
    assert between == [zero]
    assert not wrong
    points, between, zero, wrong = gradient_points(make_split(level="tokens", gradient=0.0, chunk=3e-7))
    assert points == [zero] * 2
    assert between == pytest.approx([math.log10(3e-7)])


@pytest.mark.parametrize("error", [0.3, math.inf])
def test_wrong_gradients_are_marked(make_split, error):
    *_, wrong = gradient_points(make_split(level="tokens", gradient=error))
    assert len(wrong) == 2


def metric_row(run, name, level="tokens"):
    """The texts in a metric's row, and its bars: hatch and right end."""
    axes = axes_of(plot(run), f"Metrics, loss per {level[:-1]}")
    names = [label.get_text().split()[0] for label in axes.get_yticklabels()]
    row = names.index(name)
    texts = [text.get_text().strip() for text in axes.texts if abs(text.get_position()[1] - row) < 0.4]
    return texts, [(bar.get_hatch(), bar.get_x() + bar.get_width()) for drawn in axes.containers for bar in drawn
                   if abs(bar.get_y() + bar.get_height() / 2 - row) < 0.4]  # fmt: skip


def test_metrics_show_zero_and_what_one_scalar_would_do(make_split):
    run = make_split(level="tokens")
    assert metric_row(run, "probs_ratio") == (["0", "0"], [])  # normalized by tokens, like the loss
    texts, drawn = metric_row(run, "num_valid_samples")
    assert texts == ["0"]
    assert drawn == [("", pytest.approx(math.log10(1 - 1 / 200)))]
    texts, drawn = metric_row(make_split(level="sequences"), "probs_ratio", "sequences")
    assert texts == ["0"]
    assert drawn == [("", pytest.approx(math.log10(200 / 40 - 1)))]


def test_a_wrong_metric_is_seen(make_split):
    run = make_split(level="tokens", off={"probs_ratio": 3.0}, fault="one-scalar-metrics")
    texts, drawn = metric_row(run, "probs_ratio")
    assert texts == ["0"]
    assert drawn == [("////", pytest.approx(math.log10(2)))]
    picture = plot(run)
    assert "fault: one-scalar-metrics" in picture.get_suptitle()
    worst = "1 of 4 fail; worst: probs_ratio (per token): 1 in the plain step, 3"
    assert any(word.startswith(worst) for word in words(picture))


def test_a_missing_metric_is_called_so(make_split):
    texts, _ = metric_row(make_split(level="tokens", off={"num_valid_samples": None}), "num_valid_samples")
    assert texts == ["missing"]


def test_rows_of_a_check_are_one_line():
    rows = [VerdictRow(name, 0.5, 1, "1", True, "") for name in ("m", "m/one", "m/two", "n")]
    assert [row.check for row in without_parts(Verdict(rows))] == ["m", "n"]


def test_a_run_of_an_older_kit_is_drawn_as_any_run(make_split):
    run = make_split(old=True)
    assert axes_of(plot(run), "Timeline of ranks")
    for name in named.names(run):
        run.plot(name)
    assert [row.check for row in run.verdict().failed] == []


def test_a_run_that_broke_is_drawn_as_any_run(make_split):
    assert axes_of(plot(make_split(until=(2, "split"))), "Timeline of ranks")


def test_a_persons_own_code_is_named(make_split):
    assert " · mine:Step · " in plot(make_split(implementation="mine:Step")).get_suptitle()


def test_its_drawings_have_names(make_split):
    run = make_split(level="both")
    assert {"metrics", "gradients", "calls"} <= set(named.names(run))
    metrics = named.plot(run, "metrics")
    assert {"Metrics, loss per token", "Metrics, loss per sequence"} <= words(metrics)
    assert {"limit 1e-06", "0.001, common", "relative error in step 1, worst of all numbers of chunks"} <= words(
        metrics
    )
    moved = named.plot(run, "gradients", tolerances={"grad_parity": 1e-3})
    assert "limit 0.001, step 1" in words(moved)
    assert {"||dg|| / ||g||", "chunks per step (a point is one step, n = 1)"} <= words(moved)
    assert "time since the step began [ms], one sample" in words(named.plot(run, "calls"))
    assert "metrics" not in named.names(make_split(until=(1, "split")))
