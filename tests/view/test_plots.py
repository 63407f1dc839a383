"""Pictures of runs: their content, complete pictures whatever was measured, and saving them."""

from __future__ import annotations

import matplotlib as mpl
import pytest

import kit
from kit.draw.data import read
from kit.draw.picture import Picture
from kit.draw.style import THEMES
from kit.errors import BadInput
from kit.measure import Recorder
from kit.results import Row, Run, Verdict, VerdictRow, create_run
from kit.view.named import plot_run


def titles(picture):
    return [axes.get_title(loc="left") for axes in picture.axes]


def words(picture):
    return {text.get_text() for text in picture.findobj(mpl.text.Text)}


pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize("theme_name", THEMES)
def test_a_run_shows_time_memory_census_and_timeline(make_run, theme_name):
    picture = plot_run(make_run(), theme=theme_name)
    assert [title for title in titles(picture) if title] == [
        "Time per phase and rank (n = 3 each, median and range)",
        "Host memory of the ranks (median and range of 2 ranks)",
        "Process groups: start 1",
        "Open files",
        "Threads",
        "Timeline of ranks",
    ]
    assert {"time [ms]", "change since start [MiB]", "count (range of 2 ranks)", "rank 0", "rank 1"} <= words(picture)
    assert not [word for word in words(picture) if "VRAM" in word or "GPU" in word]
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_one_sample_says_so(make_run):
    picture = plot_run(make_run(cycles=1))
    assert titles(picture)[0] == "Time per phase and rank (n = 1 each)"


def test_a_gpu_has_a_drawing_of_its_own(make_run):
    device = [("allocated", 3e10, "B"), ("allocated_before", 3e10, "B"), ("driver_used", 4e10, "B")]
    picture = plot_run(make_run(more=device))
    assert "GPU memory (median and range of 2 ranks)" in titles(picture)
    assert "whole GPU, 37.3 GiB" in words(picture)
    shared = plot_run(make_run(more=[*device, ("gpu", 0, "1")]))
    assert "GPU memory, each GPU shared by ranks (median and range of 2 ranks)" in titles(shared)


@pytest.mark.slow
def test_many_ranks_phases_and_cycles_fit(make_run):
    phases = [f"a-long-name-{index}" for index in range(9)]
    picture = plot_run(make_run(ranks=16, cycles=12, phases=phases))
    assert titles(picture)[0] == "Time per phase, all ranks (n = 192 each, median and range)"
    picture._repr_png_()


def test_limits_are_drawn_above_the_start(make_run):
    run = make_run()
    row = VerdictRow("groups_return_to_baseline", 0, 2, "1", True, "")
    Verdict([row, VerdictRow("fds_return", 9, 4, "1", False, "rank 1: 20 at the baseline, 29 after")]).write(
        run.dir / "verdict.json"
    )
    picture = plot_run(Run(run.dir))
    groups = next(axes for axes in picture.axes if axes.get_title(loc="left").startswith("Process groups"))
    assert groups.get_title(loc="left") == "Process groups: start 1"
    assert "limit +2" in {text.get_text() for text in groups.texts}
    assert {line.get_ydata()[0] for line in groups.lines if len(set(line.get_ydata())) == 1} >= {1, 3}
    assert {"✗ FAIL", "9, limit 4", "rank 1: 20 at the baseline, 29 after"} <= {word.strip() for word in words(picture)}


def test_levels_start_after_a_baseline(make_run):
    seen = read(make_run(phases=("baseline", "make")))
    assert seen.start("fds") == 20


def test_a_partial_run_and_one_without_records(make_run):
    assert "running" in plot_run(make_run(finish=False)).get_suptitle()
    assert any("no phase has been measured" in word for word in words(plot_run(make_run(cycles=0))))


def test_the_heading_of_a_run_that_has_begun_counts_ranks_without_rows(tmp_path):
    writer = create_run(tmp_path, "smoke", {"ranks": 2}, {})
    where = {"run": writer.id, "lab": "smoke", "phase": "make", "cycle": 0, "rank": 0}
    writer.append([Row(**where, metric="seconds", value=1.0, unit="s", time=1.8e9)])
    assert plot_run(Run(writer.dir)).get_suptitle() == "smoke · 2 ranks · 1 cycle so far · running"
    writer.set_config({"ranks": "two"})
    assert "· 1 rank ·" in plot_run(Run(writer.dir)).get_suptitle()


def test_a_run_of_ones_own(tmp_path):
    with Recorder(tmp_path / "mine") as recorder:
        for cycle in range(2):
            with recorder.phase("train", cycle=cycle):
                recorder.record("loss", float("nan"))
            with recorder.phase("offload", cycle=cycle), recorder.phase("inner", cycle=cycle):
                pass
        recorder.record("anything", 3.0)
        with pytest.raises(ZeroDivisionError), recorder.phase("broken"):
            1 / 0  # noqa: B018
    picture = plot_run(Run(tmp_path / "mine"))
    assert picture.get_suptitle() == "own mine · 1 rank · 2 cycles · finished"
    assert {"Timeline of ranks", "raised"} <= words(picture)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_saving(make_run, tmp_path, suffix):
    path = plot_run(make_run()).save(tmp_path / "new" / f"picture{suffix}")
    assert path.stat().st_size > 5_000


def test_the_same_run_makes_the_same_svg(make_run, tmp_path):
    run = make_run()
    first, second = (plot_run(run).save(tmp_path / f"{name}.svg").read_bytes() for name in "ab")
    assert first == second


def test_wrong_names_are_reported(make_run, tmp_path):
    run = make_run()
    with pytest.raises(BadInput, match="light, dark, not 'pink'"):
        plot_run(run, theme="pink")
    with pytest.raises(BadInput, match=r"\.png, \.svg, \.pdf, not 'picture\.docx'"):
        plot_run(run).save(tmp_path / "picture.docx")


def test_settings_of_the_notebook_are_left_alone(make_run):
    before = dict(mpl.rcParams)
    assert isinstance(plot_run(make_run()), Picture)
    assert dict(mpl.rcParams) == before


def test_a_loaded_run_draws_itself(tmp_path, monkeypatch, nothing_left):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    run = kit.run("smoke", ranks=1, cycles=1, device="cpu", fault="leaked-group")
    picture = kit.load(run.dir).plot()
    assert isinstance(picture, Picture)
    assert "fault: leaked-group" in picture.get_suptitle()
    assert any(text.get_text() == "✗ FAIL" for axes in picture.axes for text in axes.texts)
