"""The panel's widgets without a browser, on the real model: what they display and what they change in the model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from typing import Annotated, Literal

import ipywidgets as widgets
import pytest

import kit
from kit.labs.definition import Definition, LabConfig, Option
from kit.labs.discover import find
from kit.public import settings_from_file
from kit.results import Verdict, VerdictRow, create_run
from kit.view import look, tabs
from kit.view.model import PanelModel
from kit.view.panel import Buttons, Number, Panel, Parameters, ShownRun
from kit.view.progress import EndedBy, PhaseState, RunProgress

LABS = ("smoke", "offload", "split", "sync")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A real run of two ranks and two cycles."""
    return kit.run("smoke", cycles=2, out=tmp_path_factory.mktemp("run") / "run")


pytestmark = pytest.mark.usefixtures("runs")  # an empty folder, so that no panel shows runs of others


def tree(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from tree(child)


def other(control, value):
    """Return the control's part to set and another value for it."""
    part = control.parts[0]
    if isinstance(part, widgets.Checkbox):
        return part, not part.value
    if isinstance(part, widgets.Dropdown):
        return part, next(choice for _, choice in pairs(part) if choice != value and ":" not in str(choice))
    if isinstance(control, Number):
        return part, "7"
    return part, "3, 4" if isinstance(value, list) else "other.module:thing"


def pairs(drop):
    return [one if isinstance(one, tuple) else (one, one) for one in drop.options]


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.drawn(1, of="controls")
@pytest.mark.parametrize("lab", LABS)
def test_every_control_tells_the_model_and_shows_it(lab):
    model = PanelModel(find(lab))
    settings = Parameters(model)
    assert set(settings.controls) == {field.name for field in model.fields}
    for name, control in settings.controls.items():
        model.reset()
        part, value = other(control, model.values[name])
        part.value = value
        assert model.values[name] == {"3, 4": [3, 4], "7": 7}.get(value, value), name
        model.reset()
        assert control.parts[0].value != value or model.values[name] in {value, 7}


@pytest.mark.parametrize("lab", LABS)
def test_every_control_has_a_label_and_says_what_it_is_for(lab):
    model = PanelModel(find(lab))
    tab = tabs.VerdictTab(model)
    asked = [
        *tree(Parameters(model).widget),
        *tree(tab.widget),
        *tree(tabs.LogsTab(model).widget),
        *tree(look.Strip(model).widget),
    ]
    controls = [
        one
        for one in asked
        if isinstance(one, widgets.ValueWidget | widgets.Button) and not isinstance(one, widgets.HTML)
    ]
    assert len(controls) > 20
    for one in controls:
        assert one.tooltip or one.description, one
    for control in Parameters(model).controls.values():
        assert control.parts[0].description == control.label
        assert control.field.option.help in control.parts[0].tooltip


def test_a_refused_choice_is_marked_and_explained():
    model = PanelModel(find("offload"))
    settings = Parameters(model)
    assert settings.refused.value == ""  # nothing is excluded by settings that nobody touched
    drop = settings.controls["mode"].parts[0]
    assert {"exact", "manual", "official"} <= {label for label, _ in pairs(drop)}
    settings.controls["include_world"].parts[0].value = True
    assert {"exact", "manual (no)", "official (no)"} <= {label for label, _ in pairs(drop)}
    assert drop.value == "exact"
    assert "needs mode=exact" in drop.tooltip
    assert "Not possible here: " in settings.refused.value
    assert "mode=manual, mode=official" in settings.refused.value.partition("</summary>")[0]
    assert "needs mode=exact" in settings.refused.value
    drop.value = "manual"
    assert "include_world=true needs mode=exact" in settings.problems.value
    assert "start" not in model.can
    drop.value = "exact"
    assert settings.problems.value == ""


def test_chosen_settings_are_saved_for_the_command_line(tmp_path):
    model = PanelModel(find("offload"), {"cycles": 2})
    settings = Parameters(model)
    settings.controls["mode"].parts[0].value = "manual"
    settings.path.value = str(tmp_path / "mine.yaml")
    settings.save.click()
    assert f"kit run offload --config {tmp_path}/mine.yaml" in settings.remark.value
    assert settings_from_file(tmp_path / "mine.yaml") == {"cycles": 2, "mode": "manual"}
    settings.controls["include_world"].parts[0].value = True  # refused
    settings.path.value = str(tmp_path / "refused.yaml")
    settings.save.click()
    assert "settings that are refused are not saved" in settings.remark.value
    model.reset()
    settings.path.value = str(tmp_path / "mine.txt")
    settings.save.click()
    assert ".yaml" in settings.remark.value
    assert [path.name for path in tmp_path.glob("*.*")] == ["mine.yaml"]


def test_settings_of_pipelines_are_saved_as_they_are_given(tmp_path):
    model = PanelModel(find("share"), {"a": {"steps": 3}})
    model.save_settings(tmp_path / "two.yaml")
    again = PanelModel(find("share"), settings_from_file(tmp_path / "two.yaml"))
    assert again.given == model.given


def test_a_tick_that_would_be_refused_is_greyed_out():
    model = PanelModel(find("offload"), {"mode": "manual"})
    tick = Parameters(model).controls["include_world"].parts[0]
    assert tick.disabled
    assert "needs mode=exact" in tick.tooltip
    model.set("mode", "exact")
    assert not tick.disabled


def test_what_is_wrong_is_marked_where_it_is():
    model = PanelModel(find("split"))
    settings = Parameters(model)
    box = settings.controls["chunks"]
    box.parts[0].value = "one, two"
    assert "kit-wrong" in box.widget._dom_classes
    assert "chunks must be" in settings.problems.value
    assert "✗" in settings.problems.value
    box.parts[0].value = "1, 5"
    assert model.values["chunks"] == [1, 5]
    assert "kit-wrong" not in box.widget._dom_classes


def test_once_there_is_a_run_the_settings_are_one_line_and_what_is_wrong_unfolds_them(finished):
    model = PanelModel(find("smoke"), {"cycles": 2})
    settings = Parameters(model)
    assert (settings.open, settings.line.description) == (True, "Settings")
    model.show(finished)
    assert (settings.open, settings.line.description) == (False, "Next run: ranks 2, cycles 2, groups 2, size 1024")
    settings.line.click()
    assert settings.open
    settings.line.click()
    model.set_fault("leaked-group")
    assert settings.line.description == "Next run: ranks 2, cycles 2, groups 2, size 1024, fault leaked-group"
    model.set("cycles", 0)
    assert settings.open
    assert "cycles" in settings.problems.value
    model.set("cycles", 3)
    assert settings.open  # for the next setting
    model.show(None)
    model.show(finished)
    assert not settings.open


def test_the_strip_stays_while_a_setting_is_wrong():
    model = PanelModel(find("smoke"))
    shown = look.Strip(model)
    before = shown.grid.value
    assert "kit-strip" in before
    model.set("cycles", 0)
    assert shown.grid.value == before


@pytest.mark.parametrize("written", ["2.5", "99999999", "-3", "2e", "", "nan"])
def test_a_wrong_number_is_outlined_at_once_and_stays_as_it_is_written(written):
    model = PanelModel(find("offload"))
    control = Parameters(model).controls["cycles"]
    (exact,) = control.parts
    assert exact.continuous_update
    exact.value = written
    assert exact.value == written
    assert "kit-wrong" in control.widget._dom_classes
    assert "cycles must be a whole number from 1 to 1000, not " in model.problems["cycles"]
    assert "start" not in model.can
    exact.value = "25"
    assert (model.values["cycles"], "kit-wrong" in control.widget._dom_classes) == (25, False)


def test_a_number_is_not_rewritten_while_it_is_typed():
    model = PanelModel(find("offload"))
    (limit,) = Parameters(model).controls["timeout_s"].parts
    limit.value = "1e1"
    assert (limit.value, model.values["timeout_s"]) == ("1e1", 10.0)
    model.set("timeout_s", 2.5)
    assert limit.value == "2.5"


def test_own_code_goes_beside_the_labs_own_words():
    model = PanelModel(find("sync"))
    drop, own = Parameters(model).controls["transport"].parts
    assert own.layout.display == "none"
    drop.value = drop.options[-1]
    assert own.layout.display is None
    own.value = "mine:Transport"
    assert model.values["transport"] == "mine:Transport"
    model.set("transport", "shm")
    assert (drop.value, own.layout.display) == ("shm", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking(LabConfig):
    """A config whose settings have no defaults."""

    way: Annotated[Literal["left", "right"], Option("which way")]
    loud: Annotated[bool, Option("whether loud")]
    times: Annotated[int, Option("how often", low=1, high=9)]
    share: Annotated[float, Option("which share", low=0, high=1)]
    code: Annotated[str, Option("your code", target=True)]
    route: Annotated[str, Option("which route", target=True, names=("short", "long"))]
    sizes: Annotated[tuple[int, ...], Option("which sizes")]


def test_what_must_be_given_is_asked_for():
    own = Definition(
        name="asking",
        summary="a lab of a test",
        config=Asking,
        plan=lambda _: [],
        phases="no:phases",
        rules="kit.labs.smoke.rules:RULES",
    )
    model = PanelModel(own)
    settings = Parameters(model)
    assert settings.problems.value.count("must be given") == 7
    assert "start" not in model.can
    assert settings.controls["way"].parts[0].value is None
    given = {"way": "left", "times": "3", "share": "0.5", "code": "mine:Code", "route": "long", "sizes": "4, 5"}
    for name, value in given.items():
        settings.controls[name].parts[0].value = value
    settings.controls["loud"].parts[0].value = True
    assert settings.problems.value == ""
    assert {name: model.values[name] for name in given} == {
        **given,
        "times": 3,
        "share": 0.5,
        "sizes": [4, 5],
    }


def test_a_fault_says_what_it_breaks_who_catches_it_and_what_it_sets():
    model = PanelModel(find("offload"))
    settings = Parameters(model)
    settings.fault.value = "missing-rank-in-destroy"
    assert model.fault == "missing-rank-in-destroy"
    assert settings.controls["meet_timeout_s"].parts[0].value == "3.0"
    for words in (
        "last rank does not take part",
        "groups_return_to_baseline",
        "meet_timeout_s=3.0",
        "run must fail with an error",
    ):
        assert words in settings.about.value
    settings.reset.click()
    assert (model.fault, settings.fault.value, settings.about.value) == (None, "", "")


def test_settings_are_locked_while_ranks_work():
    model = PanelModel(find("smoke"))
    settings = Parameters(model)
    model.state = "running"
    assert all(part.disabled for control in settings.controls.values() for part in control.parts)
    assert settings.fault.disabled
    model.state = "finished"
    assert not settings.controls["cycles"].parts[0].disabled


# -- buttons --------------------------------------------------------------------------------------------------------


class Pressed:
    """Stand-in for the controller that only records its calls."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def __getattr__(self, name):
        return lambda: self.reported.append(name)


def test_buttons_are_pressable_where_they_make_sense():
    model, reported = PanelModel(find("smoke")), Pressed()
    buttons = Buttons(model, reported)
    for state in ("idle", "starting", "ready", "running", "stopping", "finished", "failed", "stopped"):
        model.state = state
        assert {name for name, button in buttons.of.items() if not button.disabled} == set(model.can)
    model.state = "idle"
    model.set("ranks", 0)
    assert all(button.disabled for button in buttons.of.values())
    for button in buttons.of.values():
        assert button.description
        assert button.icon
        button.click()
    assert reported.reported == ["start", "step", "run_all", "stop", "restart"]


# -- strip ----------------------------------------------------------------------------------------------------------

DONE = PhaseState("", "baseline", "done", ("done", "done"), (0.5, 12.0), None)


def test_each_phase_and_rank_has_a_sign_a_word_and_a_time():
    running = PhaseState("cycle 1", "make", "running", ("done", "running"), (0.2, None), time.monotonic() - 65)
    to_do = PhaseState("cycle 1", "talk", "to do", ("waiting", "waiting"), (None, None), None)
    rows = re.findall(r"<tr>.*?</tr>", look.grid_html((DONE, running, to_do), 2, None).partition("<tbody>")[2])
    assert [re.findall(r'<td class="kit-(\w+)".*?>(\S)(?:<small>(.*?)</small>)?</td>', row) for row in rows] == [
        [("done", "✓", "0.5 s"), ("done", "✓", "0.2 s"), ("waiting", "·", "")],
        [("done", "✓", "12 s"), ("running", "▶", "65 s"), ("waiting", "·", "")],
    ]
    assert 'title="make, cycle 1, rank 1: running 65 s"' in rows[1]


def test_roles_stand_beside_their_ranks_and_a_rank_without_work_has_an_empty_cell():
    model = PanelModel(find("sync"))
    assert model.roles == {0: "trainer", 1: "trainer", 2: "sleeper", 3: "sleeper", 4: "replica"}
    shown = look.Strip(model)
    assert '<th class="kit-rank" scope="row">rank 4 (replica)</th>' in shown.grid.value
    assert 'title="train, cycle 1, rank 4: no work in this phase"></td>' in shown.grid.value
    assert 'title="train, cycle 1, rank 0: waiting">' in shown.grid.value
    assert tabs.LogsTab(model).rank.options[-1] == "rank 4 (replica)"


def test_above_the_phases_stand_words_and_never_a_number_that_only_the_lab_knows():
    def above(name: str) -> list[str]:
        model = PanelModel(find(name))
        assert "cycle" not in look.progress_words(RunProgress(1, 9), model.phases, "running")
        cells: list[str] = re.findall('<th class="kit-cycle"[^>]*>([^<]*)</th>', look.Strip(model).grid.value)
        return [cell for cell in cells if cell]

    assert above("split")[:2] == ["tokens, plain", "tokens, chunks=1"]
    assert above("stream") == above("share") == []


def test_the_culprit_is_red_and_its_traceback_is_folded():
    model = PanelModel(find("smoke"))
    shown = look.Strip(model)
    model.size = 2
    model.phases = (PhaseState("cycle 1", "talk", "failed", ("waiting", "failed"), (None, None), None),)
    model.failure = EndedBy("raised", "rank 1 raised <b>ValueError</b>\nmore", (1,), "talk", "Traceback:\n  <script>")
    assert shown.grid.value.count('<tr class="kit-culprit">') == 1
    assert '<tr class="kit-culprit"><th class="kit-rank" scope="row">✗ rank 1</th>' in shown.grid.value
    assert '<td class="kit-failed"' in shown.grid.value
    message = shown.failure.value
    assert "<details><summary>" in message
    assert "✗ rank 1 raised in phase talk" in message
    assert "&lt;b&gt;ValueError" in message
    assert "&lt;script&gt;" in message
    assert "<script>" not in message
    model.failure = EndedBy("stopped", "stopped in phase 'talk': 1 of 4 phases were done", (), "talk", "")
    assert "kit-bad" not in shown.failure.value  # stopped by a person
    model.failure = None
    assert shown.failure.value == ""


def test_the_verdict_is_reported_in_words(finished):
    model = PanelModel(find("smoke"), {"cycles": 2})
    shown = look.Strip(model)
    assert "checks" not in shown.notice.value
    model.show(finished)
    model.state = "finished"
    asked = sum(row.passed is not None for row in model.verdict)
    assert f'<b><span class="kit-good">✓ all {asked} checks pass' in shown.notice.value
    assert "<details>" in shown.grid.value  # the picture comes before the table
    model.move("memory_drift", -1)
    assert f'<span class="kit-bad">✗ 1 of {asked} checks fails: memory_drift</span>' in shown.notice.value
    for state in ("running", "starting"):
        model.state = state
        assert "memory_drift" not in shown.notice.value


def test_a_verdict_names_its_run_and_the_next_one_is_apart(finished):
    model = PanelModel(find("smoke"), {"cycles": 2})
    shown, settings = look.Strip(model), Parameters(model)
    model.finished(finished)
    model.state = "finished"
    model.set_fault("leaked-group")
    assert f"</span></b> · {finished.dir} · finished</div>" in shown.notice.value
    assert "leaked-group" not in shown.notice.value
    assert settings.line.description.startswith("Next run: ")
    assert settings.line.description.endswith(", fault leaked-group")
    model.begin()
    assert str(finished.dir) not in shown.notice.value
    assert "phases done" not in shown.bar.value or "0 of" in shown.bar.value
    model.state = "idle"
    model.refuse("implementation=nowhere:Thing cannot be loaded")
    assert "✗ not started" in shown.failure.value
    assert f"</span></b> · {finished.dir} · finished</div>" in shown.notice.value
    assert shown.bar.value == ""


def test_earlier_runs_are_a_menu_with_the_newest_finished_one_first(tmp_path):
    folders = []
    for second, finish in ((1, True), (2, True), (3, False)):
        writer = create_run(tmp_path / "runs", "smoke", {"ranks": 2, "cycles": second}, {}, fault=None)
        if finish:
            writer.write_verdict(Verdict([VerdictRow("fds_return", 1.0, 0.0, "1", False, "")]))
            writer.finish()
        else:
            writer.finish("it broke")
        os.utime(writer.dir / "run.json", (second, second))
        folders.append(str(writer.dir))
    model = PanelModel(find("smoke"))
    menu = ShownRun(model).widget
    assert [folder for _, folder in menu.options] == [folders[1], folders[0], folders[2]]
    assert menu.value == folders[1] == str(model.run.dir)
    assert " · checks failed · " in menu.options[0][0]
    assert " · failed · not judged · " in menu.options[2][0]
    menu.value = folders[2]
    assert (str(model.run.dir), model.state) == (folders[2], "idle")
    model.state = "running"
    assert menu.layout.display == "none"
    model.state = "finished"
    assert menu.layout.display is None


def test_a_tick_leaves_the_unfolded_traceback_alone():
    model = PanelModel(find("smoke"))
    shown = look.Strip(model)
    model.failure = EndedBy("died", "rank 0 died", (0,), "talk", "stack")
    sent = []
    shown.failure.observe(sent.append, "value")
    model.state = "running"
    model.progress = RunProgress(1, 5, 2.0, None)
    assert sent == []


def test_the_bar_says_in_words_how_far_it_is():
    phases = (DONE, PhaseState("cycle 1", "make", "running", ("running", "running"), (None, None), time.monotonic()))
    words = look.progress_words(RunProgress(6, 22, 12.3, 20.4), phases, "running")
    assert words == "phase 7 of 22 (make, cycle 1), 12 s, about 20 s left"
    assert look.progress_words(RunProgress(6, 22, 12.3, None), phases, "running").endswith("12 s")
    bar = look.progress_bar_html(RunProgress(11, 22, 12.3, None), phases, "ready")
    for part in (
        'role="progressbar"',
        'aria-valuenow="11"',
        'aria-valuemax="22"',
        "width:50.0%",
        "11 of 22 phases done",
    ):
        assert part in bar


def test_what_is_reported_is_a_live_line():
    model = PanelModel(find("smoke"))
    shown = look.Strip(model)
    model.notice = "a <tag>"
    assert shown.notice.value == (
        '<div role="status" aria-live="polite"><div><b class="kit-faint">· not started</b> a &lt;tag&gt;</div></div>'
    )


def test_of_many_ranks_fewer_phases_are_sent_at_once():
    model = PanelModel(find("smoke"), {"cycles": 30})
    shown = look.Strip(model)
    for ranks in (2, 8, 64):
        model.size = ranks
        model.phases = tuple(phase._replace(ranks=("done",) * ranks, seconds=(1.5,) * ranks) for phase in model.phases)
        assert shown.grid.value.count("<td") == ranks * look.phase_columns(ranks)
        assert len(shown.grid.value) < 100_000


def test_of_a_long_plan_the_phases_near_the_one_under_way_are_shown():
    model = PanelModel(find("offload"), {"cycles": 30})
    shown = look.Strip(model)
    total = len(model.phases)
    assert shown.grid.value.count('scope="col"') == look.COLUMNS < total
    phases = [phase._replace(status="done" if index < 100 else "to do") for index, phase in enumerate(model.phases)]
    phases[100] = phases[100]._replace(status="running")
    model.phases = tuple(phases)
    assert shown.grid.value.count("kit-now") == 1
    heads = re.findall(r'scope="col">(.*?)</th>', shown.grid.value)
    first = 100 - look.COLUMNS // 2
    assert heads == [phase.phase for phase in phases[first : first + look.COLUMNS]]


# -- logs -----------------------------------------------------------------------------------------------------------


def test_logs_by_rank_the_last_lines_and_the_error():
    model = PanelModel(find("smoke"))
    tab = tabs.LogsTab(model)
    model.log = tuple((index % 2, f"line {index} <i>") for index in range(600))
    assert tab.lines.value == ""  # the tab is not visible
    tab.visible = True
    assert "500 of 600 lines" in tab.lines.value
    assert "line 599 &lt;i&gt;" in tab.lines.value
    assert "line 99" not in tab.lines.value
    tab.rank.value = "rank 1"
    assert "line 599" in tab.lines.value
    assert "line 598" not in tab.lines.value
    model.log = (*model.log, (1, "new"))
    assert "new" in tab.lines.value
    model.failure = EndedBy("raised", "it broke", (0,), "talk", "")
    assert "it broke" not in tab.lines.value
    tab.rank.value = tabs.ALL
    assert '<span class="kit-bad">✗ raised: it broke</span>' in tab.lines.value


# -- sliders --------------------------------------------------------------------------------------------------------


def test_a_slider_has_whole_places_that_a_browser_cannot_round():
    for found in (
        tabs.slider_scale(0, 10, whole=True),
        tabs.slider_scale(1e-9, 1.0),
        tabs.slider_scale(0, 200.0),
        tabs.slider_scale(0, 5000, whole=True),
        tabs.slider_scale(1e-6, 2.0),
        tabs.slider_scale(0, 0),
    ):
        assert found == sorted(set(found))
        for place in range(0, len(found), 7):
            assert tabs.nearest(found, found[place]) == place
        assert tabs.nearest(found, found[-1] + 1e9) == len(found) - 1
        assert tabs.nearest(found, found[0] - 1e9) == 0
    assert [tabs.slider_scale(1e-9, 1.0)[place] for place in (0, 60, 61, 120, -1)] == [1e-9, 1e-6, 1.12e-6, 1e-3, 1.0]
    assert (tabs.slider_scale(0, 10, whole=True), tabs.slider_scale(0, 0)) == ([*range(11)], [0])
    assert tabs.slider_scale(0, 200.0)[-2:] == [199.5, 200]
    for row in tabs.VerdictTab(PanelModel(find("split"))).rows.values():
        assert isinstance(row.slider, widgets.IntSlider)


# -- verdict --------------------------------------------------------------------------------------------------------


def test_a_limit_that_moves_flips_its_row_and_rebuilds_nothing(finished):
    model = PanelModel(find("smoke"))
    tab = tabs.VerdictTab(model)
    assert "Not judged yet" in tab.head.value
    model.show(finished)
    assert "0 failed, 7 passed" in re.sub("<.*?>", "", tab.head.value)
    rows, children = dict(tab.rows), tab.body.children
    row = rows["groups_return_to_baseline"]
    row.exact.value = -1
    assert "✗ FAIL" in row.html.value
    assert "limit ≤ -1" in row.html.value
    assert "(lab: 0)" in row.html.value
    assert "1 failed, 6 passed" in re.sub("<.*?>", "", tab.head.value)
    row.slider.value = 3
    assert "✓ pass" in row.html.value
    assert row.exact.value == 3
    assert model.tolerances == {"groups_return_to_baseline": 3.0}
    row.exact.value = 0
    assert model.tolerances == {}
    assert row.slider.value == row.exact.value == 0
    assert (tab.rows, tab.body.children) == (rows, children)


def test_rows_are_made_when_somebody_looks_and_then_know_what_was_measured_before(finished):
    model = PanelModel(find("smoke"))
    tab = tabs.VerdictTab(model, visible=False)
    made = len(list(tree(tab.widget)))
    model.show(finished)
    model.move("groups_return_to_baseline", -1)
    assert "1 failed, 6 passed" in re.sub("<.*?>", "", tab.head.value)
    assert (tab.rows, len(list(tree(tab.widget)))) == ({}, made)
    tab.visible = True
    assert "✗ FAIL" in tab.rows["groups_return_to_baseline"].html.value
    assert tab.body.children[0] is tab.rows["groups_return_to_baseline"].widget
    assert tab.rows["groups_return_to_baseline"].exact.value == -1
    rows = dict(tab.rows)
    tab.visible = False
    model.take({})
    assert "✓ pass" in tab.rows["groups_return_to_baseline"].html.value
    tab.visible = True
    assert tab.rows == rows


def test_the_worst_come_first_and_stay_there_until_a_verdict_says_otherwise(finished):
    model = PanelModel(find("smoke"))
    tab = tabs.VerdictTab(model)
    model.take({"memory_drift": -1e6})
    model.show(finished)
    ordered = tab.body.children
    assert ordered[0] is tab.rows["memory_drift"].widget
    moves: list = []
    tab.body.observe(moves.append, "children")
    verdict = model.verdict
    model.set_trait("verdict", None)
    model.set_trait("verdict", verdict)
    assert (tab.body.children, moves) == (ordered, [])


@pytest.mark.parametrize("lab", LABS)
def test_every_limit_has_one_row_and_its_slider_holds_the_default(lab):
    model = PanelModel(find(lab))
    tab = tabs.VerdictTab(model)
    asked = [rule.name for rule in model.rules if rule.asked(model.values)]
    assert len(tab.body.children) == len(asked)
    assert {row.limit.rule for row in tab.rows.values()} == {*asked}
    for row in tab.rows.values():
        if row.limit.better == "==":
            assert row.slider is None
        else:
            assert row.scale[row.slider.value] == pytest.approx(row.limit.default, rel=0.05)
            assert row.exact.value == row.limit.default
    assert model.tolerances == {}


def test_another_run_moves_the_ends_of_a_slider_and_makes_no_new_one(finished):
    model = PanelModel(find("smoke"))
    tab = tabs.VerdictTab(model)
    row, made = tab.rows["memory_drift"], len(list(tree(tab.widget)))
    model.take({"memory_drift": 9000.0})
    assert row.exact.value == 9000
    assert row.scale[-1] < 9000  # the scale's ends stay while a limit is moved
    assert row.slider.value == row.slider.max
    model.show(finished)
    assert row.scale[-1] >= 9000
    assert row.scale[row.slider.value] == pytest.approx(9000, rel=0.02)
    assert model.tolerances == {"memory_drift": 9000.0}
    assert len(list(tree(tab.widget))) == made


def test_presets_and_files(finished, tmp_path):
    model = PanelModel(find("smoke"))
    tab = tabs.VerdictTab(model)
    model.show(finished)
    tab.rows["memory_drift"].exact.value = 7
    tab.path.value = str(tmp_path / "mine.json")
    tab.save.click()
    assert json.loads((tmp_path / "mine.json").read_text()) == {"memory_drift": 7.0}
    for name, preset in model.presets.items():
        tab.preset.value = name
        assert model.tolerances == preset
    tab.load.click()
    assert model.tolerances == {"memory_drift": 7.0}
    assert tab.rows["memory_drift"].exact.value == 7
    assert tab.preset.value == ""
    tab.path.value = str(tmp_path / "none.json")
    tab.load.click()
    assert "kit-bad" in tab.notice.value
    assert "none.json" in tab.notice.value
    assert model.tolerances == {"memory_drift": 7.0}


def test_of_many_answers_the_failed_ones_are_written_out():
    limit = verdict_limit()
    rows = [answer("parity", 2.0, passed=False), *(answer(f"parity/t{n}", 2.0, passed=n > 8) for n in range(12))]
    shown = tabs.check_html(limit, rows, moved=False)
    assert shown.count("✗ FAIL") == 1 + tabs.FEW
    assert "12 answers, 3 more fail" in shown


def answer(check, measured, *, passed):
    return VerdictRow(check, measured, 1.0, "ratio", passed, "")


def verdict_limit():
    from kit.view.model import PanelLimit

    return PanelLimit("parity", "Are they equal?", 1.0, "ratio", "<=", 0.0, 2.0)


# -- the whole panel -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_a_panel_is_stepped_with_its_buttons():
    panel = kit.panel("smoke", cycles=1)
    assert isinstance(panel, Panel)
    assert panel.tab.titles == ("Plots", "Verdict", "Tables", "Logs", "Runs")
    assert [tab.visible for tab in panel.tabs.values()] == [True, False, False, False, False]
    assert "application/vnd.jupyter.widget-view+json" in panel._repr_mimebundle_()
    try:
        panel.buttons.of["step"].click()
        panel.controller.wait(60)
        assert panel.strip.grid.value.count('class="kit-done"') == 2
        panel.buttons.of["run"].click()
        panel.controller.wait(60)
        assert panel.strip.grid.value.count('class="kit-done"') == 2 * len(panel.model.phases)
        assert "checks pass" in panel.strip.notice.value
        assert "0 failed" in panel.tabs["Verdict"].head.value
    finally:
        panel.close()


def test_nothing_is_fetched_for_the_sheet():
    assert re.findall(r"url\(.{6}", look.sheet().value) == ['url("data:']
    assert "@import" not in look.CSS


def test_the_phase_under_way_is_held_in_sight_only_while_it_moves():
    model = PanelModel(find("smoke"))
    shown = look.Strip(model)
    for state, held in (("idle", False), ("running", True), ("ready", True), ("finished", False), ("failed", False)):
        model.state = state
        assert ("kit-follow" in shown.scroll._dom_classes) is held
