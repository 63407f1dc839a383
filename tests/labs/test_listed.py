"""The runs as a table: filtered by lab, fault, status, verdict and settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kit
from kit.cli import main
from kit.errors import BadInput
from kit.labs.discover import find
from kit.results import Verdict, VerdictRow, create_run
from kit.results.comparison import labelled
from kit.view.tabs import listed_runs


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
    assert list(every.columns) == [
        "run",
        "label",
        "lab",
        "started",
        "status",
        "answer",
        "verdict",
        "fault",
        "set",
        "dir",
    ]
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
    assert (row["set"], row["verdict"], row["answer"]) == ("cycles=5", "1 failed, 0 passed, 0 not measured", "failed")
    assert kit.load(row["dir"]).id == broken


def test_a_run_that_was_stopped_has_not_passed(make: Callable[..., str]) -> None:
    stopped, broken = make("smoke", passed=True, stopped=True), make("smoke", passed=False, stopped=True)
    assert set(kit.runs(verdict="passed")["run"]) == set()
    assert set(kit.runs(verdict="not judged")["run"]) == {stopped}
    assert set(kit.runs(verdict="failed")["run"]) == {broken}


def test_what_cannot_be_asked_is_refused(make: Callable[..., str]) -> None:
    assert kit.runs(tp=2).empty  # there is no run yet
    make("smoke", passed=True)
    with pytest.raises(BadInput, match="there is no status 'stoped'; did you mean 'stopped'"):
        kit.runs(status="stoped")
    with pytest.raises(BadInput, match="no run has a setting 'cyles'; did you mean 'cycles'"):
        kit.runs(cyles=2)
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
    assert [line.split(" · ")[0] for line, _ in listed_runs(run.dir.parent, "driver passed")] == ["the new driver"]
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
