"""The runs as a table: filtered by lab, fault, status, verdict and settings."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import kit
from kit.cli import main
from kit.errors import BadInput
from kit.labs.bench_view.made_up import made_up_runs
from kit.labs.discover import describe_folder, discover, find, select_runs
from kit.results import Row, Verdict, VerdictRow, create_run, list_runs
from kit.results.comparison import labelled
from kit.results.records import seal
from kit.results.run import INDEX
from kit.results.runtable import COMMON, pickable, run_frame, sweep_frame
from kit.view.runs import save_runs


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that makes a run, judged with one row or not at all, and returns its id."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))

    def run(
        lab: str, passed: bool | None = None, fault: str | None = None, stopped: bool = False, **config: object
    ) -> str:
        defaults = dataclasses.asdict(find(lab).config(**config))
        writer = create_run(tmp_path, lab, defaults, {}, fault=fault)
        if passed is not None:
            writer.write_verdict(Verdict([VerdictRow("fds_return", 1.0, 0.0, "1", passed, "")]))
        writer.finish("interrupted" if stopped else None, stopped=stopped)
        return writer.id

    return run


def test_runs_are_filtered(make: Callable[..., str]) -> None:
    plain, broken = make("smoke", passed=True), make("smoke", passed=False, fault="leaked-group", cycles=5)
    open_one = make("offload", tp=2)
    every = kit.runs()
    assert set(every["run"]) == {plain, broken, open_one}
    assert {*every.columns} == {*COMMON} - {"differs"} | {"set", "answer", "dir"}
    for asked, found in (
        ({"lab": "smoke"}, {plain, broken}),
        ({"fault": "leaked-group"}, {broken}),
        ({"fault": "", "lab": "smoke"}, {plain}),
        ({"verdict": "failed"}, {broken}),
        ({"verdict": "passed"}, {plain}),
        ({"verdict": "not judged"}, {open_one}),
        ({"status": "failed"}, set()),
        ({"tp": 2}, {open_one}),
        ({"cycles": 5}, {broken}),
    ):
        assert set(kit.runs(**asked)["run"]) == found, asked
    row = every.set_index("run").loc[broken]
    assert (row["set"], row["verdict"], row["answer"]) == ("cycles=5", "1 failed, 1 of 1 measured", "failed")
    assert kit.load(row["dir"]).id == broken


@pytest.mark.parametrize("width", [None, 40, 80, 200])
def test_the_answer_of_a_run_is_never_cut(
    make: Callable[..., str], width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = make("smoke", passed=True)
    failed = make("smoke", passed=False, fault="leaked-group", cycles=5, ranks=1, groups=7)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)  # as without a terminal
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    assert main(["runs", "--columns", "fds_return"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line for line in lines}
    assert "all passed" in found[passed]
    assert "1 failed" in found[failed]
    assert head.endswith("fds_return")
    assert all(line.endswith("1") for line in lines)
    assert ("cycles=5 groups=7" in found[failed]) is (width in (None, 200))  # a pipe gets all, for `grep`
    assert width in (None, 40) or max(map(len, lines)) <= width


def test_a_run_that_was_stopped_has_not_passed(make: Callable[..., str]) -> None:
    stopped, broken = make("smoke", passed=True, stopped=True), make("smoke", passed=False, stopped=True)
    assert set(kit.runs(verdict="passed")["run"]) == set()
    assert set(kit.runs(verdict="not judged")["run"]) == {stopped}
    assert set(kit.runs(verdict="failed")["run"]) == {broken}


def test_a_verdict_that_was_edited_has_not_passed(make: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / make("smoke", passed=False) / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text())))  # spelled in another way
    assert list(kit.runs()["answer"]) == ["failed"]
    path.write_text(path.read_text().replace("false", "true"))
    assert kit.runs().iloc[0][["answer", "verdict"]].to_list() == ["not judged", "edited after the run ended"]
    assert kit.runs(verdict="passed").empty


def test_a_run_that_lost_rows_has_not_passed(make: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / make("smoke", passed=True) / "records.jsonl"
    assert list(kit.runs()["answer"]) == ["passed"]
    path.write_text(path.read_text() + "\n")
    assert kit.runs().iloc[0][["answer", "verdict"]].to_list() == ["not judged", "edited after the run ended"]


def test_an_edited_config_lost_rows_and_rows_of_another_node_show_in_the_list(tmp_path: Path) -> None:
    writer = create_run(tmp_path, "smoke", {"cycles": 4}, {}, out=tmp_path / "run")
    (tmp_path / "run" / "records.jsonl").write_text("\n\n")
    other = tmp_path / "run" / "records.node1.jsonl"
    other.write_text("\n\n")
    writer.write_verdict(Verdict([VerdictRow("fds_return", 1.0, 0.0, "1", True, "")]))
    writer.finish()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["sealed"]["records"][other.name] = seal(other)

    def shown(**fields: object) -> list[str]:
        (tmp_path / "run" / "run.json").write_text(json.dumps(info | fields))
        facts = describe_folder(tmp_path / "run")
        return [facts["answer"], facts["verdict"]]

    judged, edited = ["passed", "all passed, 1 of 1 measured"], ["not judged", "edited after the run ended"]
    assert shown() == judged
    assert shown(config={"cycles": 5}) == edited
    assert (
        shown(config={"cycles": 5}, status="running")[1] == "1 of 1 measured, so far"
    )  # what a run still writes is no edit
    assert shown() == judged
    other.write_text("\n")
    lost = ["not judged", "records were lost after the run ended"]
    assert shown() == lost
    other.unlink()
    assert shown() == lost
    del info["sealed"]
    assert shown() == edited


def test_runs_that_a_bench_makes_up_are_listed_as_judged(tmp_path: Path) -> None:
    made_up_runs(tmp_path, 3)
    assert {describe_folder(path)["answer"] for path in list_runs(tmp_path)} == {"failed"}


def test_a_lab_that_runs_may_have_is_no_unknown_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(discover().broken, "torn", "it cannot be loaded")
    assert [select_runs([], lab=name) for name in ("own", "torn")] == [[], []]


def test_what_cannot_be_asked_is_refused(make: Callable[..., str]) -> None:
    assert kit.runs(tp=2).empty  # there is no run yet
    make("smoke", passed=True)
    with pytest.raises(BadInput, match="there is no status 'stoped'; did you mean 'stopped'"):
        kit.runs(status="stoped")
    with pytest.raises(BadInput, match="no run has a setting 'cyles'; did you mean 'cycles'"):
        kit.runs(cyles=2)
    with pytest.raises(BadInput, match="there is no lab 'smok'; did you mean 'smoke'"):
        kit.runs(lab="smok")
    with pytest.raises(BadInput, match="there is no fault 'leaked'"):
        kit.runs(fault="leaked")
    with pytest.raises(BadInput, match="there is no verdict 'fail'; did you mean 'failed'"):
        kit.runs(verdict="fail")


def test_a_damaged_run_hides_no_other(make: Callable[..., str], tmp_path: Path) -> None:
    good = make("smoke", passed=True)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    assert list(kit.runs()["run"]) == [good]


def test_a_run_has_a_name_of_a_persons_own(make: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make("smoke", passed=True), make("smoke", passed=False, cycles=5)
    assert main(["label", first, " the new \n driver"]) == 0
    assert f"{first} is now labelled 'the new driver'" in capsys.readouterr().out
    row = kit.runs().set_index("run").loc[first]
    run, other = kit.load(row["dir"]), kit.load(kit.runs(cycles=5)["dir"][0])
    assert row["label"] == run.label == "the new driver"
    assert labelled([run, other]) == {first: "the new driver, cycles=4", second: f"{second}, cycles=5"}
    main(["show", first])
    assert "label: the new driver" in capsys.readouterr().out
    main(["label", first, ""])
    assert run.label == ""
    with pytest.raises(BadInput, match="the label has 121 characters; at most 120 fit"):
        run.label = "x" * 121


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--lab", "smoke"], [1, 0]),
        (["--verdict", "failed"], [1]),
        (["--fault", ""], [2, 0]),
        (["--set", "tp=2"], [2]),
        (["--set", "cycles=5", "--lab", "offload"], []),
    ],
    ids=lambda one: " ".join(map(str, one)) or "none",
)
def test_the_command_filters_as_the_table(
    make: Callable[..., str], capsys: pytest.CaptureFixture[str], words: list[str], found: list[int]
) -> None:
    ids = [
        make("smoke", passed=True),
        make("smoke", passed=False, fault="leaked-group", cycles=5),
        make("offload", tp=2),
    ]
    assert main(["runs", *words, "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [ids[number] for number in found]
    main(["runs", *words])
    assert ("there is no run like that in" in capsys.readouterr().out) == (not found)


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep over two numbers of cycles, twice each, and a run beside it that was stopped."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    folder = tmp_path / "smoke-sweep-20260101-120000-0a1b"
    for number, (cycles, seconds, drift) in enumerate(
        [(2, 1.0, 5.0), (4, 3.0, 6.0), (2, 2.0, 9.0), (4, 7.0, None)], start=1
    ):
        config = dataclasses.asdict(find("smoke").config(cycles=cycles))
        writer = create_run(
            tmp_path, "smoke", config, {"host": "box-7", "cpu": {"affinity": 2}}, out=folder / f"{number:02}"
        )
        about = {"run": writer.id, "lab": "smoke", "phase": "make", "rank": 0, "time": 1e9}
        writer.append([Row(**about, cycle=cycle, metric="seconds", value=seconds, unit="s") for cycle in range(cycles)])
        passed = None if drift is None else drift < 8
        writer.write_verdict(
            Verdict(
                [
                    VerdictRow("memory_drift", drift, 8.0, "MiB", passed, ""),
                    VerdictRow("fds_return", 0.0, 0.0, "1", True, ""),
                ]
            )
        )
        writer.finish()
    (folder / INDEX).write_text("{}")
    stopped = create_run(tmp_path, "smoke", dataclasses.asdict(find("smoke").config()), {})
    stopped.write_verdict(Verdict([VerdictRow("fds_return", 0.0, 0.0, "1", True, "")]))
    stopped.finish("stopped", stopped=True)
    return tmp_path


def test_what_differs_between_the_runs_of_a_table_comes_first(swept: Path) -> None:
    row = describe_folder(list_runs(swept)[0])
    settings = [{"ranks": 1, "groups": groups} for groups in (1, 2)]
    frame = run_frame([{**row, "config": values, "set": values} for values in settings])
    assert frame["differs"].tolist() == ["groups=1 ranks=1", "groups=2 ranks=1"]


def test_a_setting_a_check_and_a_metric_are_columns_of_the_table_of_runs(swept: Path) -> None:
    rows = sorted(map(describe_folder, list_runs(swept)), key=lambda row: row["name"])
    assert pickable(rows)[:3] == ["cycles", "fds_return", "memory_drift"]  # what differs, then the checks
    assert "make/seconds" in pickable(rows[1:])
    frame = run_frame(rows, ["cycles", "memory_drift", "make/seconds"])
    assert list(frame.columns) == [*COMMON, "cycles", "memory_drift [MiB]", "make/seconds [s]"]
    picked = frame.set_index("run")[["cycles", "memory_drift [MiB]", "make/seconds [s]"]]
    sweep = "smoke-sweep-20260101-120000-0a1b"
    assert picked.loc[f"{sweep}/03"].tolist() == [2, 9.0, 2.0]
    assert picked.loc[f"{sweep}/04"].isna().tolist() == [False, True, False]
    assert frame.set_index("run")["verdict"].tolist() == [
        "1 of 1 measured, so far",
        "all passed, 2 of 2 measured",
        "all passed, 2 of 2 measured",
        "1 failed, 2 of 2 measured",
        "all passed, 1 of 2 measured",
    ]
    assert frame["sweep"].tolist() == ["", *[sweep] * 4]
    assert frame["machine"].tolist()[1] == "box-7, 2 cores"
    unset = [{**row, "config": {**row["config"], "layers": None}} for row in rows]
    assert run_frame(unset, ["layers"])["layers"].isna().all()  # null in every run, and offered by `pickable`
    with pytest.raises(
        BadInput, match="no run has a setting, check or PHASE/METRIC 'memory_drif'; did you mean 'memory_drift'"
    ):
        run_frame(rows, ["memory_drif"])
    many = [{**row, "config": {f"setting_{number}": number for number in range(200)}} for row in rows]
    with pytest.raises(BadInput) as caught:
        run_frame(many, ["settin_7"])
    assert "did you mean 'setting_7'? allowed are " in str(caught.value)
    assert re.search(r" and \d+ more; `kit labs LAB` lists settings, `kit show` checks and phases$", str(caught.value))
    assert len(str(caught.value)) < 500


def test_a_sweep_has_a_row_for_each_combination_with_the_spread_of_every_number(swept: Path) -> None:
    rows = sorted(map(describe_folder, list_runs(swept)), key=lambda row: row["name"])
    frame = sweep_frame(rows, ["memory_drift", "make/seconds"]).set_index("differs")
    assert list(frame.index) == ["cycles=2", ""]  # 4 cycles are the lab's own
    assert frame.loc["cycles=2", ["runs", "runs that passed", "memory_drift [MiB]", "make/seconds [s]"]].tolist() == [
        2,
        "1 of 2",
        "7 (5 to 9)",
        "1.5 (1 to 2)",
    ]
    assert frame.loc["", "memory_drift [MiB]"] == "6"


def test_facts_of_a_run_follow_its_files(swept: Path) -> None:
    folder = next(path for path in list_runs(swept) if path.name == "01")
    assert describe_folder(folder)["label"] == ""
    kit.load(folder).label = "the first"
    assert describe_folder(folder)["label"] == "the first"


def test_the_command_shows_picked_columns_and_writes_a_page_that_needs_no_network(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--columns", "make/seconds", "--lab", "smoke", "--status", "finished"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "run"
    assert "make/seconds [s]" in head
    assert len(lines) == 4
    assert main(["runs", "--sweeps", "--columns", "make/seconds"]) == 0
    assert "1.5 (1 to 2)" in capsys.readouterr().out
    assert main(["runs", "--columns", "nothing"]) == 2
    assert main(["runs", "--to", str(swept / "runs.html")]) == 0
    page = (swept / "runs.html").read_text()
    assert "smoke-sweep-20260101-120000-0a1b/03" in page
    assert "searchList" in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//(?!itables\.org)""", page)
    assert main(["runs", "--to", str(swept / "runs.csv")]) == 0
    assert (swept / "runs.csv").read_text().count("smoke") >= 5
    with pytest.raises(BadInput, match="no known ending"):
        save_runs(run_frame([]), swept / "runs.doc")
