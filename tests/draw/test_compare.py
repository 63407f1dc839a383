"""The picture that compares runs: the largest against its spread first, with both medians, their spread and the number of samples."""

from __future__ import annotations

import pytest

from kit.draw.compare import changed_most, plot_against
from kit.draw.data import cycles_of, stretches
from kit.draw.style import THEMES
from kit.errors import BadInput
from kit.results import Row, Run, compare, create_run
from kit.results.comparison import labelled, settings_of_runs
from tests.seen import words

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def make(tmp_path):
    """Make a run of two ranks and three cycles from one number per metric, which grows by `step` in each cycle."""

    def make(values, *, step=0.0, fault=None, **config):
        writer = create_run(tmp_path, "offload", {"mode": "exact", **config}, {}, fault=fault)
        writer.append(
            [
                Row(
                    run=writer.id,
                    lab="offload",
                    cycle=cycle,
                    phase="reload",
                    rank=rank,
                    metric=metric,
                    value=value + step * cycle,
                    unit=unit,
                    time=1e9 + cycle,
                )
                for metric, (value, unit) in values.items()
                for cycle in range(3)
                for rank in range(2)
            ]
        )
        writer.finish()
        return Run(writer.dir)

    return make


BASE = {"seconds": (0.5, "s"), "rss": (2.0**30, "B"), "groups": (4, "1"), "rss_before": (1.0, "B"), "zero": (0, "1")}
MORE = {**BASE, "seconds": (2.0, "s"), "groups": (6, "1"), "rss_before": (9.0, "B"), "zero": (5, "1")}


def rows_of(picture):
    """The words of each row of the matrix."""
    (axes,) = picture.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    lines = [[text.get_text() for text in axes.texts if text.get_position()[1] == line] for line in range(len(names))]
    return dict(zip(names, lines, strict=True))


def test_what_changed_most_is_on_top_and_what_did_not_is_left_out(make):
    runs = [make(BASE), make(MORE, fault="leak-gloo")]
    picture = plot_against(runs)
    assert rows_of(picture) == {
        "reload  seconds": ["4 x: 500 ms → 2 s, rank 0"],
        "reload  groups": ["1.5 x: 4 → 6, rank 0"],
    }
    assert f"{runs[1].id}, fault leak-gloo" in words(picture)


@pytest.mark.parametrize("theme_name", THEMES)
def test_both_medians_their_spread_and_number_are_reported(make, theme_name):
    runs = [make({"seconds": (1.0, "s")}, step=0.1), make({"seconds": (4.0, "s")}, step=1.0)]
    picture = plot_against(runs, theme_name=theme_name)
    assert rows_of(picture) == {"reload  seconds": ["4.55 x: 1.1 s ± 100 ms → 5 s ± 1 s, rank 0"]}
    assert "Medians over cycles and their spread (n = 3)" in words(picture)
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_three_runs_have_a_column_each(make):
    runs = [make(BASE), make(MORE), make({**BASE, "seconds": (0.25, "s")})]
    picture = plot_against(runs)
    assert {run.id for run in runs[1:]} <= words(picture)
    assert rows_of(picture)["reload  seconds"] == ["4 x: 500 ms → 2 s, rank 0", "1/2: 500 ms → 250 ms, rank 0"]


def test_two_that_are_alike_say_so(make):
    assert any("nothing that both measured changed" in word for word in words(plot_against([make(BASE), make(BASE)])))


def test_one_run_is_no_comparison(make):
    run = make(BASE)
    with pytest.raises(BadInput, match="at least two different runs"):
        plot_against([run, run])


def test_the_table_that_is_known_is_taken(make):
    runs = [make(BASE), make(MORE)]
    table = compare(runs)
    assert words(plot_against(runs, table=table)) == words(plot_against(runs))
    assert changed_most(table, 1)["metric"].tolist() == ["groups"]  # its readings have no spread


def test_settings_that_differ_are_reported(make):
    runs = [make(BASE, tp=2), make(BASE, tp=2, mode="manual", fault="leak-gloo")]
    assert settings_of_runs(runs) == {"mode": ["exact", "manual"], "fault": [None, "leak-gloo"]}


def test_each_run_is_labelled_by_what_differs_and_a_difference_in_size_warns(make):
    runs = [make(BASE, tp=1, fault="leak-gloo"), make(MORE, tp=2), make(MORE, tp=2, mode="manual")]
    assert list(labelled(runs).values()) == [
        f"{runs[0].id}, mode=exact, tp=1, fault leak-gloo",
        f"{runs[1].id}, mode=exact, tp=2",
        f"{runs[2].id}, mode=manual, tp=2",
    ]
    picture = plot_against(runs)
    assert {*labelled(runs[1:]).values()} == {f"{runs[1].id}, mode=exact", f"{runs[2].id}, mode=manual"}
    assert {f"{runs[1].id}, mode=exact, tp=2", f"{runs[2].id}, mode=manual, tp=2"} <= words(picture)
    warning = "these runs differ in size (tp): their times and memory cannot be compared"
    assert picture.get_suptitle().endswith(f"\nWarning: {warning}")
    assert "Warning" not in plot_against(runs[1:]).get_suptitle()


# -- which cycles a run has, and where an axis of steps labels them
# ------------------------------------------------------


def test_a_cycle_is_named_where_it_has_most_steps() -> None:
    once, control = [(0, "baseline")], [(1, "control"), (2, "control")]
    cycles = [(cycle, phase) for cycle in (1, 2) for phase in ("make", "talk", "destroy")]
    order = [*once, *control, *cycles, (0, "end")]
    assert cycles_of(order) == [1, 2]
    assert stretches(order, cycles_of(order)) == {1: [3, 4, 5], 2: [6, 7, 8]}


def test_a_loop_may_count_from_zero() -> None:
    order = [(0, "setup"), (0, "train"), (1, "train"), (2, "train")]
    assert cycles_of(order) == [0, 1, 2]
    assert stretches(order, cycles_of(order)) == {0: [0, 1], 1: [2], 2: [3]}


def test_a_run_without_cycles_has_one() -> None:
    assert cycles_of([(0, "baseline"), (0, "offload"), (0, "reload")]) == [0]


@pytest.mark.parametrize(("measured", "cycles"), [(0, []), (1, [1]), (2, [1, 2])])
def test_cycles_that_only_the_control_has_had_are_not_counted(measured: int, cycles: list[int]) -> None:
    order = [(0, "baseline"), *((cycle, "control") for cycle in (1, 2, 3))]
    order += [(cycle, phase) for cycle in range(1, measured + 1) for phase in ("make", "destroy")]
    assert cycles_of(order) == cycles
    assert [*stretches(order, cycles_of(order))] == cycles
