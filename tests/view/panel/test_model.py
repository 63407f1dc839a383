"""The panel's model without ranks and widgets: every setting, refused values, limits, presets, runs from disk."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

import kit
from kit.errors import BadInput
from kit.labs.definition import working
from kit.labs.discover import find, find_fault, tagged
from kit.results import Row, create_run, load_tolerances
from kit.view.model import AS_IT_IS, PanelModel, choices, limits_of, rounded_up, slider_span
from kit.view.progress import EndedBy, marks
from kit.view.tabs import VerdictTab

LABS = sorted(tagged())


pytestmark = pytest.mark.usefixtures("runs")


def smoke_run(runs: Path, *, drift_mib: float = 20, cycles: int = 2, lab: str = "smoke", second: int = 1) -> Path:
    """Write a run as the smoke lab leaves it, without ranks and with only the records that its memory check needs."""
    writer = create_run(runs, lab, {"ranks": 2, "cycles": cycles, "groups": 2}, {})
    rows = [(cycle, rank, 2**28 + (cycle - 1) * drift_mib * 2**20) for cycle in range(1, cycles + 1) for rank in (0, 1)]
    writer.append(
        [
            Row(
                run=writer.id,
                lab=lab,
                cycle=cycle,
                phase="count",
                rank=rank,
                metric="anon_rss",
                value=value,
                unit="B",
                time=1e9,
            )
            for cycle, rank, value in rows
        ]
    )
    writer.finish()
    os.utime(writer.dir / "run.json", (second, second))
    return writer.dir


def passed(model: PanelModel, check: str) -> bool | None:
    return {row.check: row.passed for row in model.verdict}[check]


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LABS)
def test_a_new_panel_has_the_labs_settings_its_plan_and_may_start(name: str) -> None:
    model = PanelModel(find(name))
    config = find(name).config()
    assert model.values == json.loads(json.dumps({field.name: field.default for field in model.fields}))
    assert (model.problems, model.state, model.given) == ({}, "idle", {})
    plan, roles = find(name).plan(config), find(name).roles_of(config)
    assert [(row.place, row.phase) for row in model.phases] == [(step.place, step.phase) for step in plan]
    assert [row.ranks for row in model.phases] == [
        marks(config.ranks, working(step, roles), "waiting") for step in plan
    ]
    assert [row.status for row in model.phases] == ["next"] + ["to do"] * (len(model.phases) - 1)
    assert (model.size, model.progress.total) == (config.ranks, len(model.phases))
    assert model.can == {"start", "step", "run"}


@pytest.mark.drawn(1, of="choices")
@pytest.mark.parametrize("name", LABS)
def test_every_choice_is_refused_beforehand_exactly_where_choosing_it_is_a_problem(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kit.labs.definition.free_memory", lambda: 20 * 2**30
    )  # this machine's free memory changes between calls
    model = PanelModel(find(name))
    tried = 0
    for field in model.fields:
        for choice in choices(field):
            model.reset()
            reported = model.refused.get(field.name, {}).get(choice)
            if choice == model.values[field.name]:
                assert reported is None
                continue
            model.set(field.name, choice)
            tried += 1
            assert model.values[field.name] == choice
            assert (reported in model.problems.values()) if reported else not model.problems, (field.name, choice)
            assert bool(model.can) == (reported is None)
            assert model.phases
    assert tried


@pytest.mark.drawn(1, of="fields")
@pytest.mark.parametrize("name", LABS)
def test_every_field_explains_what_it_cannot_be_at_once(name: str) -> None:
    model = PanelModel(find(name))
    for field in model.fields:
        wrong: object = 5 if field.kind is str else "nonsense"
        if field.option.high is not None:
            wrong = field.option.high + 1
        model.set(field.name, wrong)
        assert model.problems[field.name].startswith(f"{field.name} must be "), field.name
        assert repr(wrong) in model.problems[field.name]
        model.reset()
        assert model.problems == {}


def test_a_rule_among_fields_is_one_sentence_and_the_plan_waits_for_it() -> None:
    model = PanelModel(find("offload"))
    model.set("tp", 3)
    assert model.problems == {"": "tp=3 does not divide 4 heads of this job (size 'tiny')"}
    before = model.phases
    assert (len(before), model.can) == (model.progress.total, frozenset())
    model.set("tp", 1)
    assert model.phases is not before
    assert model.problems == {}
    assert len(model.phases) == model.progress.total > 0


def test_a_choice_that_others_stand_against_says_why() -> None:
    model = PanelModel(find("offload"))
    model.set("mode", "manual")
    assert "needs mode=exact" in model.refused["include_world"][True]
    model.set("mode", "exact")
    assert "include_world" not in model.refused


def test_what_was_wrong_before_does_not_refuse_every_choice() -> None:
    model = PanelModel(find("offload"))
    model.set("cycles", 0)
    assert set(model.problems) == {"cycles"}
    assert model.refused == {}


def test_a_value_that_is_as_without_it_is_no_choice() -> None:
    model = PanelModel(find("smoke"), {"cycles": 5, "size": 8})
    assert model.given == {"cycles": 5, "size": 8}
    model.set("cycles", find("smoke").config().cycles)
    assert model.given == {"size": 8}
    model.set("ranks", 2.0)  # equal to a whole number, but a float
    assert "ranks" in model.problems
    model.reset()
    assert (model.given, model.problems) == ({}, {})


def test_names_that_do_not_exist_raise_with_what_there_is() -> None:
    with pytest.raises(BadInput, match="no setting 'cycle'; did you mean 'cycles'"):
        PanelModel(find("smoke"), {"cycle": 1})
    with pytest.raises(BadInput, match="no fault 'leak'"):
        PanelModel(find("smoke"), fault="leak")
    model = PanelModel(find("smoke"))
    with pytest.raises(BadInput, match="no setting 'cycle'"):
        model.set("cycle", 1)
    with pytest.raises(BadInput, match="no fault 'leak'"):
        model.set_fault("leak")
    with pytest.raises(BadInput, match="unknown tolerance 'drift'"):
        model.move("drift", 1)
    assert (model.given, model.fault, model.tolerances) == ({}, None, {})


def test_a_value_that_json_has_no_word_for_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="implementation is not"):
        PanelModel(find("smoke")).set("implementation", object())


def test_a_faults_settings_come_below_a_persons() -> None:
    fault = find_fault(find("offload"), "slow-leak")
    model = PanelModel(find("offload"), {"cycles": 7})
    model.set_fault("slow-leak")
    wanted = fault.set["cycles"]
    assert (model.values["cycles"], model.values["steps"]) == (7, fault.set["steps"])
    assert model.remark == f"fault slow-leak needs cycles={wanted}; your own values are kept"
    model.set("cycles", wanted)  # the fault's own value, so it is not the user's choice
    assert (model.given, model.remark) == ({}, "")
    assert sum(row.phase == "release" for row in model.phases) == wanted
    model.set_fault(None)
    plain = find("offload").config()
    assert (model.values["cycles"], model.values["steps"]) == (plain.cycles, plain.steps)


@pytest.mark.drawn(1, of="faults")
@pytest.mark.parametrize("name", LABS)
def test_every_fault_can_be_switched_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_VLLM_PYTHON", "python")  # engines, as if they were installed
    monkeypatch.setattr("kit.labs.served.python_has", lambda path, module: True)
    model = PanelModel(find(name))
    for fault in model.definition.faults:
        model.set_fault(fault.name)
        assert model.fault == fault.name
        for setting, value in json.loads(json.dumps(dict(fault.set))).items():
            names = [setting] if setting in model.values else [f"{name}.{setting}" for name in model.groups]
            assert [model.values[name] for name in names] == [value] * len(names)
        assert model.remark == ""
        if "cpu" in fault.devices:
            assert "start" in model.can, (fault.name, model.problems)


def test_what_only_a_start_finds_out_is_shown_and_forbids_nothing() -> None:
    model = PanelModel(find("smoke"), {"implementation": "nowhere:Thing"})
    model.refuse("implementation=nowhere:Thing cannot be loaded by the ranks' Python: no module")
    assert "cannot be loaded" in model.failure.message
    assert (model.problems, "start" in model.can) == ({}, True)
    assert model.phases
    model.set("implementation", "somewhere:Thing")
    assert model.failure is None


def test_code_that_the_kernel_cannot_load_makes_its_setting_invalid_until_it_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_boom.py").write_text("print('imported', file=open('imports', 'a'))\nraise RuntimeError('boom')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = PanelModel(find("stream"))
    model.set("sampler", "slow_boom:X")
    assert model.problems == {
        "sampler": "sampler=slow_boom:X cannot be loaded here: RuntimeError: boom (slow_boom.py, line 2)"
    }
    assert Path("imports").read_text().count("imported") == 1  # a person waits for it
    model.set("sampler", "nope:X")
    assert model.values["sampler"] == "nope:X"
    assert model.problems == {
        "sampler": "sampler=nope:X cannot be loaded here: ModuleNotFoundError: No module named 'nope'"
    }
    assert not {"start", "step", "run"} & model.can
    model.set("sampler", "windowed")
    assert (model.problems, "start" in model.can) == ({}, True)


def test_a_remark_goes_when_something_else_changes(runs: Path) -> None:
    folder = smoke_run(runs)
    model = PanelModel(find("smoke"))
    for change in (
        lambda: model.set("cycles", 3),
        lambda: model.set_fault("leaked-group"),
        lambda: model.pick(folder),
        model.begin,
    ):
        model.reset()
        assert model.remark == "all settings reset to the lab's defaults"
        change()
        assert model.remark == ""


def test_an_earlier_run_is_shown_without_the_end_of_the_last_one(runs: Path) -> None:
    earlier, last = smoke_run(runs, drift_mib=100), smoke_run(runs, second=2)
    model = PanelModel(find("smoke"))
    model.follow(last)
    model.state, model.notice = "failed", "rank 1 raised"
    model.failure = EndedBy("raised", "rank 1 raised", (1,), "talk", "")
    model.phases = tuple(phase._replace(status="done") for phase in model.phases)
    model.pick(earlier)
    assert (model.run.dir, model.state, model.failure, model.notice) == (earlier, "idle", None, "")
    assert {phase.status for phase in model.phases} == {"next", "to do"}
    assert passed(model, "memory_drift") is False
    (earlier / "run.json").unlink()
    model.pick(earlier)
    assert "cannot be shown" in model.trouble


# -- runs, limits, presets -----------------------------------------------------------------------------------------------


def test_the_last_run_of_the_lab_is_shown_and_no_other(runs: Path) -> None:
    smoke_run(runs, second=1)
    newest = smoke_run(runs, second=2)
    smoke_run(runs, lab="offload", second=3)
    model = PanelModel(find("smoke"))
    assert model.run.dir == newest
    assert passed(model, "memory_drift") is True
    assert PanelModel(find("split")).run is None


def test_a_last_run_that_is_damaged_is_reported_and_the_panel_opens(runs: Path) -> None:
    (smoke_run(runs) / "run.json").write_text('{"run": 1}')
    model = PanelModel(find("smoke"))
    assert model.run is None
    assert "the last run cannot be shown" in model.trouble
    assert "start" in model.can


def test_a_moved_limit_judges_at_once_and_measures_nothing_anew(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smoke_run(runs, drift_mib=20)
    model = PanelModel(find("smoke"))
    seen: list[str] = []
    model.observe(lambda change: seen.append(change["name"]), ["verdict", "tolerances", "limits"])
    monkeypatch.setattr("kit.results.run.measure_checks", lambda *_: pytest.fail("nothing is measured twice"))
    assert passed(model, "memory_drift") is True
    model.move("memory_drift", 10)
    assert passed(model, "memory_drift") is False
    assert sorted(seen) == ["tolerances", "verdict"]
    model.move("memory_drift", 50)  # the lab's default again
    assert (passed(model, "memory_drift"), model.tolerances) == (True, {})


def test_presets_replace_the_moved_limits(runs: Path) -> None:
    smoke_run(runs, drift_mib=100)
    model = PanelModel(find("smoke"), tolerances={"groups_return_to_baseline": 3})
    assert list(model.presets) == [AS_IT_IS, "strict", "common practice"]
    model.take(model.presets["common practice"])
    assert passed(model, "memory_drift") is True
    assert "groups_return_to_baseline" not in model.tolerances
    model.take(model.presets["strict"])
    assert passed(model, "memory_drift") is False
    model.take(model.presets[AS_IT_IS])
    assert model.tolerances == {}
    assert passed(model, "memory_drift") is False


def test_tolerances_are_the_file_that_kit_run_takes(tmp_path: Path) -> None:
    model = PanelModel(find("smoke"), tolerances={"memory_drift": 7, "fds_return": 2})
    path = model.save_tolerances(tmp_path / "mine.json")
    assert json.loads(path.read_text()) == load_tolerances(path) == {"memory_drift": 7, "fds_return": 2}
    other = PanelModel(find("smoke"))
    other.load_tolerances(path)
    assert other.tolerances == model.tolerances
    path.write_text('{"peak_ratio": 1}')
    with pytest.raises(BadInput, match="unknown tolerance 'peak_ratio'"):
        other.load_tolerances(path)
    assert other.tolerances == model.tolerances


def test_another_run_is_shown_judged_by_the_same_limits(runs: Path) -> None:
    far, near = smoke_run(runs, drift_mib=30), smoke_run(runs, drift_mib=1, second=2)
    model = PanelModel(find("smoke"), tolerances={"memory_drift": 5})
    assert passed(model, "memory_drift") is True
    before = model.revision
    model.show(kit.load(far))
    assert passed(model, "memory_drift") is False
    assert model.revision > before
    model.show(kit.load(near))
    assert passed(model, "memory_drift") is True
    model.show(None)
    assert (model.run, model.verdict) == (None, None)


def test_sliders_reach_beyond_what_was_measured_so_that_every_verdict_can_be_flipped(runs: Path) -> None:
    smoke_run(runs, drift_mib=3000)
    model = PanelModel(find("smoke"))
    limit = {limit.rule: limit for limit in model.limits}["memory_drift"]
    assert (limit.unit, limit.better, limit.default) == ("MiB", "<=", 50)
    assert (limit.low, limit.high) == (0, 10_000)
    model.move("memory_drift", limit.high)
    assert passed(model, "memory_drift") is True


@pytest.mark.parametrize("name", LABS)
def test_every_tolerance_has_a_limit_whose_slider_holds_its_default(name: str) -> None:
    lab = find(name)
    limits = PanelModel(lab).limits
    asked = [rule for rule in lab.all_rules() if rule.asked(asdict(lab.config()))]
    assert [limit.rule for limit in limits] == [rule.name for rule in asked]
    for limit in limits:
        assert 0 <= limit.low <= limit.default < limit.high, limit


def test_ranges() -> None:
    assert slider_span(0, 3, "1") == (0, 10)
    assert slider_span(0, 700, "1") == (0, 2000)
    assert slider_span(1e-6, 1e-6, "ratio") == (pytest.approx(1e-9), 1.0)  # powers of ten
    assert slider_span(0.9, 1.0, "ratio") == (0, 2)
    assert slider_span(200, 20, "MiB") == (0, 1000)
    assert [rounded_up(value) for value in (0, 1, 1.1, 30, 0.002)] == [0, 1, 2, 50, 0.002]
    assert limits_of((), {}, None, {}) == ()


def test_a_check_that_stumbles_is_reported_and_the_panel_stays(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smoke_run(runs)

    def stumble(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of this test")

    monkeypatch.setattr("kit.results.run.measure_checks", stumble)
    model = PanelModel(find("smoke"))
    assert model.trouble == f"{folder.name} cannot be judged: ZeroDivisionError: of this test"
    assert model.verdict is None
    assert model.limits


# -- a check that only some runs have: the panel shows its limit when the settings need it -----------------------------


def names(model: PanelModel) -> set[str]:
    return {limit.rule for limit in model.limits}


def test_the_limit_comes_and_goes_with_the_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    model = PanelModel(find("smoke"))
    tab = VerdictTab(model)
    assert "routing_effective" not in names(model)
    shown = len(tab.body.children)
    model.set("routing", "torchcomms")
    model.judge()
    tab._order()
    assert "routing_effective" in names(model)
    assert len(tab.body.children) == shown + 1
    model.set("routing", "torch")
    model.judge()
    tab._order()
    assert len(tab.body.children) == shown
