"""The picture of an offload run and of its modes: what it shows from each source, and that it is complete when records are missing."""

from __future__ import annotations

import pytest

from kit.draw.data import read
from kit.draw.style import THEMES
from kit.errors import BadInput
from kit.labs.offload.charts import WAYS, host_memory, look_numbers, places_of, plot_modes
from kit.results import Row, Run, Verdict, VerdictRow, create_run
from kit.view.named import plot_run
from tests.seen import axes_of, words

MIB = 2**20
CYCLE = ("train", "fingerprint", "release", "idle", "reload", "talk", "verify")
HELD = {"release", "idle", "end"}  # phases after which the job holds nothing


pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def make_offload(tmp_path):
    """Return a function that writes an offload run; `without` drops metrics, `leak` is the number of groups left behind per cycle."""

    def make(*, ranks=2, cycles=3, without=(), leak=0, cuda=False, fault=None, until=None, **config):
        config = {
            "size": "tiny",
            "tp": 2,
            "mode": "exact",
            "implementation": "kit.labs.offload.ranks.releaser:KitReleaser",
            **config,
        }
        writer = create_run(tmp_path, "offload", config, {}, fault=fault)
        plan = [
            (0, "start"),
            (0, "control_build"),
            *((c, "control") for c in range(1, cycles + 2)),
            (0, "second_control"),
        ]
        plan += [(0, "baseline"), (0, "build"), *((c, phase) for c in range(1, cycles + 1) for phase in CYCLE)]
        plan += [(cycles + 1, "train"), (0, "compare"), (0, "end")]
        clock = 1.8e9
        for cycle, phase in plan[: None if until is None else plan.index(until) + 1]:
            clock += 0.5
            for rank in range(ranks):
                held = 0 if phase in HELD | {"start", "baseline"} else 348
                left = leak * cycle * (phase in CYCLE)
                rows = [("seconds", 0.4 / (1 + cycle), "s")]
                rows += [("anon_rss", (280 + held + 0.1 * cycle + rank) * MIB, "B"), ("shared_rss", 40 * MIB, "B")]
                rows += [("rss", (320 + held) * MIB, "B"), ("peak_rss", (330 + held) * MIB, "B")]
                rows += [(name, (20 if held else 1) + left, "1") for name in ("groups", "fds", "sockets", "threads")]
                if cuda:
                    rows += [("driver_used", (900 + held) * MIB, "B"), ("reserved", (20 + held) * MIB, "B")]
                    rows += [("allocated", (10 + held) * MIB, "B"), ("peak_allocated", (15 + held) * MIB, "B")]
                if phase in {"release", "reload"}:
                    rows += [("groups_seconds", 0.02, "s"), ("tensors_seconds", 0.1, "s")]
                    rows += [
                        ("weights_bytes", 87 * MIB, "B"),
                        ("grads_bytes", 87 * MIB, "B"),
                        ("optimizer_bytes", 174 * MIB, "B"),
                    ]
                if phase == "idle":
                    rows += [("left_bytes", 0, "B")]
                about = {
                    "run": writer.id,
                    "lab": "offload",
                    "cycle": cycle,
                    "phase": phase,
                    "rank": rank,
                    "time": clock,
                }
                reported = [row for row in rows if row[0] not in without]
                writer.append([Row(**about, metric=name, value=value, unit=unit) for name, value, unit in reported])
        writer.finish()
        bad = VerdictRow("groups_return_to_baseline", leak, 0, "1", leak == 0, "rank 0 has more")
        none = VerdictRow("residual", None, 500, "MiB", None, "not measured: the ranks had no CUDA device")
        Verdict([VerdictRow("memory_drift", 0.2, 200, "MiB", True, ""), bad, none]).write(writer.dir / "verdict.json")
        return Run(writer.dir)

    return make


@pytest.mark.drawn(1, of="themes")
@pytest.mark.parametrize("theme_name", THEMES)
def test_it_tells_the_story_and_not_the_bookkeeping(make_offload, theme_name):
    picture = plot_run(make_offload(), theme=theme_name)
    assert picture.get_suptitle() == "offload · 2 ranks · tiny, tp 2 · mode exact · 3 cycles · finished"
    shown = words(picture)
    assert {
        "anonymous",
        "job's weights",
        "job's grads",
        "job's optimizer",
        "peak in the phase",
    } <= shown
    assert {
        "cycle 1",
        "cycles 2 to 3, median",
        "first collective",
        "its groups",
        "its tensors",
        "limit 200 MiB",
    } <= shown
    assert {"cycle 1, n = 1", "later, n = 2 to 3"} <= shown
    assert not {"control", "second_control", "fingerprint", "compare"} & shown
    assert any(word.startswith("not drawn: controls 1.") for word in shown)
    assert not [word for word in shown if "VRAM" in word or "GPU" in word]
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_bars_are_the_bytes_above_the_baseline(make_offload):
    rows = host_memory(read(make_offload(ranks=1)))
    assert rows.attrs["base"] == "320.0 MiB"
    levels = rows[rows["side"] == "process"].set_index(["section", "place"])["anon_rss"] / MIB
    assert list(levels["cycle 1"].index) == ["train", "release", "idle", "reload"]
    assert levels["cycle 1", "train"] == pytest.approx(348.1)
    assert levels["cycle 1", "idle"] == pytest.approx(0.1)
    job = rows[(rows["side"] == "job") & (rows["place"] == "idle")]
    assert job[["words", "tone"]].values.tolist() == [["0", "good"]] * 2


def test_only_a_driver_speaks_for_the_gpu(make_offload):
    picture = plot_run(make_offload(cuda=True))
    assert axes_of(picture, "GPU memory by use (median of 2 ranks)")
    assert {"weights (the job)", "slack (allocator)"} <= words(picture)
    assert axes_of(picture, "Drift of GPU memory while released")
    assert "job's weights" not in words(picture)  # not beside host memory: the weights are on the GPU


def test_what_leaks_is_seen_to_rise(make_offload):
    picture = plot_run(make_offload(leak=3, fault="leak-gloo"))
    axes = axes_of(picture, "Process groups (without a job 1)")
    assert [4, 7, 10] in [line.get_ydata().tolist() for line in axes.lines if len(line.get_ydata()) == 3]
    assert {"✗ FAIL", "3, limit 0", "rank 0 has more", "- not measured", "the ranks had no CUDA device"} <= words(
        picture
    )
    assert "fault: leak-gloo" in picture.get_suptitle()


def test_many_ranks_are_one_cloud_and_one_cycle_is_one_sample(make_offload):
    assert axes_of(plot_run(make_offload(ranks=16)), "Time per phase, all ranks")
    shown = words(plot_run(make_offload(cycles=1)))
    assert "cycle 1, n = 1" in shown


def test_code_that_tells_nothing_of_its_parts(make_offload):
    parts = ("weights_bytes", "grads_bytes", "optimizer_bytes", "groups_seconds", "tensors_seconds")
    picture = plot_run(make_offload(without=parts, implementation="mine.code:Mine"))
    assert "its groups" not in words(picture)
    assert "mine.code:Mine" in picture.get_suptitle()


def test_a_run_that_broke_early_is_drawn_as_any_run(make_offload):
    picture = plot_run(make_offload(until=(1, "fingerprint")))
    assert axes_of(picture, "Timeline of ranks")
    assert axes_of(plot_run(make_offload(until=(1, "idle"))), "Host memory of a rank")


def test_places_are_those_that_were_measured(make_offload):
    assert [place.phase for place in places_of(read(make_offload(until=(1, "idle"))))] == [
        "baseline",
        "build",
        "train",
        "release",
        "idle",
    ]


def test_modes_side_by_side(make_offload):
    runs = [make_offload(), make_offload(mode="manual", leak=3), make_offload(mode="official", leak=17)]
    picture = plot_modes(runs)
    axes = axes_of(picture, "Process groups while released")
    assert [line.get_ydata().tolist() for line in axes.lines[:3]] == [[0, 0, 0], [3, 6, 9], [17, 34, 51]]
    assert {
        "exact",
        "manual",
        "official",
        "groups_return_to_baseline",
        "✗  3",
        "✗  17",
        "Checks: 1 more pass in every run; 1 not measured in any",
    } <= words(picture)
    assert axes_of(picture, "Time for groups (n = 6 each, median)")
    assert "Warning" not in picture.get_suptitle()


def test_modes_of_jobs_of_different_sizes_warn_and_own_code_is_a_mode(make_offload):
    picture = plot_modes([make_offload(), make_offload(implementation="mine:Code", seq=64)])
    assert "Warning: these runs differ in size (seq)" in picture.get_suptitle()
    assert {"exact", "Code"} <= words(picture)


def test_modes_need_runs_that_can_be_distinguished(make_offload, tmp_path):
    with pytest.raises(BadInput, match="two or more runs of the offload lab"):
        plot_modes([make_offload(), Run(create_run(tmp_path, "smoke", {}, {}).dir)])
    with pytest.raises(BadInput, match=r"two of these runs have the same mode.*exact"):
        plot_modes([make_offload(), make_offload()])


def test_a_mode_has_its_own_colour_whichever_are_shown():
    assert look_numbers(["exact", "official"]) == {"exact": 0, "official": 3}
    assert look_numbers(["manual", "mine", "kept-handle"]) == {"manual": 2, "mine": 0, "kept-handle": 1}
    assert len(set(look_numbers([*WAYS, "one", "two"]).values())) == len(WAYS) + 2
