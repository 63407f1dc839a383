from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from kit import machine
from kit.errors import BadInput
from kit.results import (
    Measured,
    NotMeasured,
    Row,
    RowWriter,
    Rule,
    Run,
    Verdict,
    VerdictRow,
    create_run,
    list_runs,
    newest_run,
    select,
    with_ids,
)
from kit.results import (
    run as run_module,
)
from kit.results.records import read_bytes
from kit.results.rules import TooFewCycles, null
from kit.results.run import EDITED, INDEX, UNSEALED, find_run, write_junit


def drift(frame, config):
    return Measured(float(select(frame, metric="rss")["value"].max()) / 2**20)


CHECKS = {"smoke": [Rule("rss drift", "Does memory come back?", drift, limit=10.0, unit="MiB")]}


def checks(lab):
    return CHECKS.get(lab, [])


@pytest.fixture
def folder(make_run, record):
    return make_run([record(), record(metric="rss", value=20 * 2**20, unit="B")])


def test_a_finished_run_says_what_it_is(folder):
    run = Run(folder)
    assert (run.lab, run.status, run.partial, run.notes) == ("smoke", "finished", False, [])
    assert run.config == {"cycles": 2}
    assert run.provenance == {"torch": "2.13"}
    assert run.dir == folder
    assert "smoke" in repr(run)
    assert "finished" in repr(run)


def test_too_few_cycles_are_known_by_their_kind_and_not_by_their_words(folder):
    def alike(frame, config):
        raise NotMeasured("needs at least 9 cycles")

    def in_parts(frame, config):
        return [null(TooFewCycles(3), of="idle"), null(NotMeasured("no GPU"), of="train")]

    rules = [
        Rule("enough", "?", drift, limit=10.0, cycles=2),
        Rule("few", "?", drift, limit=10.0, cycles=4),
        Rule("alike", "?", alike),
        Rule("in_parts", "?", in_parts),
    ]
    run = Run(folder, rules=lambda _: rules)
    assert run.cycles_needed() == {"few": 4, "in_parts/idle": 3}
    whys = {row.check: row.why for row in run.verdict()}
    assert whys["few"] == "not measured: needs at least 4 cycles"
    assert Run(folder).cycles_needed() == {}


def test_the_frame_follows_the_file_and_is_the_callers_own(folder, record):
    run = Run(folder)
    mine = run.frame()
    mine["value"] = 0.0
    assert run.frame()["value"].tolist() == [0.5, 20 * 2**20]
    with (folder / "records.jsonl").open("a") as file:
        file.write(record(cycle=1).to_line())
    assert len(run.frame()) == 3


def test_a_killed_run_loads_is_partial_and_exports(folder, tmp_path):
    info = json.loads((folder / "run.json").read_text())
    gone = f"{machine.namespace()}:{2**30}:1"
    (folder / "run.json").write_text(json.dumps({**info, "status": "running", "finished": None, "owner": gone}))
    (folder / "records.jsonl").write_bytes((folder / "records.jsonl").read_bytes()[:-9])
    run = Run(folder)
    assert run.partial
    assert (run.status, run.broke) == ("interrupted", True)
    assert len(run.frame()) == 1
    assert run.notes == [
        "the run was interrupted: the process that wrote it is gone",
        "records.jsonl: 1 unreadable line was dropped (line 2)",
    ]
    run.save(tmp_path / "t.json")
    about = json.loads((tmp_path / "t.json.provenance.json").read_text())
    assert about["torch"] == "2.13"
    assert about["run"]["partial"] is True


@pytest.mark.parametrize(
    ("device", "gpus", "ranks", "says"),
    [("cuda", 1, 2, True), ("cuda", 1, 1, False), ("cuda", 2, 2, False), ("cpu", 0, 2, False)],
)
def test_ranks_that_share_the_only_gpu_say_nothing_of_nvlink(folder, device, gpus, ranks, says):
    info = json.loads((folder / "run.json").read_text())
    about = {**info["provenance"], "world": {"device": device}, "gpu": {"gpus": [{"name": "H100"}] * gpus}}
    (folder / "run.json").write_text(json.dumps({**info, "provenance": about, "config": {"ranks": ranks}}))
    assert any("say nothing of NVLink" in note for note in Run(folder).notes) == says


@pytest.mark.parametrize(
    ("info", "complete", "passed"),
    [
        ({"status": "finished", "fault": "leak"}, False, False),
        ({"status": "finished", "config": {"implementation": "mine:Own"}}, False, False),
        ({"status": "finished"}, False, None),
        ({"status": "running", "fault": "leak"}, False, None),
        ({"status": "failed", "error": "x", "fault": "leak"}, False, None),
        ({"status": "running", "fault": "leak"}, True, False),
    ],
)
def test_records_that_a_complete_run_lacks(folder, info, complete, passed):
    (folder / "records.jsonl").write_text("")
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sealed": None, **info}))
    row = Run(folder, rules=checks, complete=complete).verdict()[0]
    assert (row.passed, row.measured) == (passed, None)


def test_what_is_missing_is_judged_anew_when_the_run_ends(folder):
    (folder / "records.jsonl").write_text("")
    path = folder / "run.json"
    info = {**json.loads(path.read_text()), "sealed": None, "fault": "leak"}
    path.write_text(json.dumps({**info, "status": "running"}))
    run = Run(folder, rules=checks)
    assert run.verdict()[0].passed is None
    path.write_text(json.dumps(info))
    os.utime(path, ns=(0, 0))
    assert run.verdict()[0].passed is False


def test_torn_records_make_a_finished_run_partial(folder):
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"run": "r1", "la')
    assert Run(folder).status == "finished"
    assert Run(folder).partial


def lose_rows(folder):
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[3:]))


def double_a_row(folder):
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join([*lines, lines[0]]))


def edit_a_row(folder):
    text = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(text.replace('"value":7.0', '"value":1.0'))


def copy_rows(folder):
    shutil.copy(folder / "records.jsonl", folder / "records (1).jsonl")


def lose_rows_and_edit_the_verdict(folder):
    lose_rows(folder)
    edit_the_verdict(folder)


def edit_the_verdict(folder):
    rows = json.loads((folder / "verdict.json").read_text())
    (folder / "verdict.json").write_text(json.dumps([{**row, "passed": True} for row in rows]))


def edit_the_config(folder):
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "config": {"cycles": "3"}}))


def remove_the_seal(folder):
    info = json.loads((folder / "run.json").read_text())
    del info["sealed"]
    (folder / "run.json").write_text(json.dumps(info))


def edit_the_fault(folder):
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "fault": "leak"}))


def edit_the_lab(folder):
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "lab": "other"}))


def break_the_verdict(folder):
    (folder / "verdict.json").write_text("[")


def lose_the_verdict(folder):
    (folder / "verdict.json").unlink()


def respell_the_verdict(folder):
    (folder / "verdict.json").write_text(json.dumps(json.loads((folder / "verdict.json").read_text())))


@pytest.fixture
def judged(tmp_path, record):
    writer = create_run(tmp_path, "smoke", {}, {}, out=tmp_path / "judged")
    writer.append([record(metric="rss", value=float(value), unit="B") for value in range(10)])
    writer.append([record(metric="rss", value=20.0 * 2**20, unit="B")])
    writer.write_verdict(Run(writer.dir, rules=checks).verdict())
    writer.finish()
    return writer.dir


def test_a_run_whose_records_are_gone_when_it_ends_can_be_read(tmp_path):
    writer = create_run(tmp_path, "mine", {"cycles": 2}, {})
    (writer.dir / "records.jsonl").unlink()
    writer.finish()
    assert Run(writer.dir).info()["status"] == "finished"


CONFIGS = [
    {10: (1, 2), 2: None},
    {"path": "\udcff"},
    {"limit": float("inf"), "a": float("nan")},
    {"text": "x\x1b[0mY"},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_any_config_of_a_persons_own_job_is_found_as_it_was_written(tmp_path, config):
    writer = create_run(tmp_path, "mine", config, {})
    writer.finish()
    run = Run(writer.dir)
    assert (run.info()["status"], run.alterations) == ("finished", [])


@pytest.mark.parametrize(
    ("accident", "notes"),
    [
        (respell_the_verdict, []),
        (lose_rows, ["records.jsonl: 3 rows of 11 are missing"]),
        (double_a_row, ["records.jsonl: 1 row was added after the run ended"]),
        (edit_a_row, ["records.jsonl was edited after the run ended"]),
        (copy_rows, ["records (1).jsonl was added after the run ended"]),
        (edit_the_verdict, ["the stored verdict was edited: `kit check` judges the records again"]),
        (edit_the_config, ["run.json: the config was edited after the run ended"]),
        (edit_the_fault, ["run.json: the fault was edited after the run ended"]),
        (edit_the_lab, ["run.json: the lab was edited after the run ended"]),
        (remove_the_seal, [UNSEALED]),
        (break_the_verdict, ["the stored verdict is damaged: `kit check` judges the records again"]),
        (lose_the_verdict, ["the stored verdict is missing: `kit check` judges the records again"]),
        (
            lose_rows_and_edit_the_verdict,
            [
                "records.jsonl: 3 rows of 11 are missing",
                "the stored verdict was edited: `kit check` judges the records again",
            ],
        ),
    ],
)
def test_what_an_accident_changed_in_a_run_that_has_ended_is_named(judged, accident, notes):
    run = Run(judged, rules=checks)
    run.frame()
    accident(judged)
    for seen in (run, Run(judged, rules=checks)):
        assert (seen.alterations, seen.notes, seen.partial) == (notes, notes, bool(notes))
        assert not seen.verdict().passed  # the checks can run again
    suite = write_junit([(run, run.verdict())], judged / "checks.xml").read_text()
    assert all(note in suite for note in notes)
    assert suite.count("<error") == bool(notes)


def test_no_check_measures_a_run_whose_config_was_edited(judged):
    edit_the_config(judged)
    verdict = Run(judged, rules=checks).verdict()
    assert {(row.measured, row.passed, row.why) for row in verdict} == {
        (None, False, f"could not be judged: {EDITED.format('config')}")
    }


def test_a_run_that_is_held_sees_an_edit_of_its_fault_and_that_it_was_taken_back(judged):
    run = Run(judged, rules=checks)
    right = (judged / "run.json").read_text()
    before = [(row.passed, row.why) for row in run.verdict()]
    edit_the_fault(judged)
    assert {row.passed for row in run.verdict()} == {False}
    (judged / "run.json").write_text(right)
    os.utime(judged / "run.json", ns=(0, 0))
    assert [(row.passed, row.why) for row in run.verdict()] == before


@pytest.mark.parametrize("size", [None, "many"])
def test_a_damaged_seal_is_of_its_run_alone(judged, size):
    info = json.loads((judged / "run.json").read_text())
    info["sealed"]["records"]["records.jsonl"]["bytes"] = size
    (judged / "run.json").write_text(json.dumps(info))
    with pytest.raises(BadInput, match="sealed must have the count and digest"):
        Run(judged, rules=checks).info()


def test_a_verdict_that_is_written_after_the_end_belongs_to_the_run(tmp_path, record):
    writer = create_run(tmp_path, "smoke", {}, {}, out=tmp_path / "run")
    writer.append([record(metric="rss", value=1.0, unit="B")])
    writer.finish()
    run = Run(tmp_path / "run", rules=checks)
    writer.write_verdict(run.verdict())
    assert run.alterations == []
    edit_the_verdict(tmp_path / "run")
    assert run.alterations == []  # it had passed already
    lose_the_verdict(tmp_path / "run")
    assert len(run.alterations) == 1


def test_a_run_that_lost_its_records_says_so(folder):
    (folder / "records.jsonl").unlink()
    run = Run(folder)
    assert run.partial
    assert run.notes == ["records.jsonl is missing: the records of this run are lost"]


@pytest.mark.parametrize("name", ["records.jsonl", "run.json"])
def test_a_file_that_cannot_be_read_is_one_sentence(folder, name):
    """A folder in the file's place cannot be read by anyone, root included."""
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(BadInput, match=f"{name}: Is a directory|has no run.json"):
        Run(folder).frame()


def test_a_config_without_what_a_check_asks_for_is_not_measured(folder):
    """Such as a run of an older kit, or a user's own run with a lab's name."""
    ask = Rule("asks", "", lambda frame, config: Measured(config["gone"]), better="==")
    (row,) = Run(folder, rules=lambda _: [ask]).verdict()
    assert (row.passed, row.why) == (None, "not measured: the run's config has no 'gone'")


def test_a_run_without_any_record_is_an_empty_table(make_run):
    assert Run(make_run([])).frame().empty


def test_verdict_with_the_labs_checks_and_a_moved_limit(folder):
    run = Run(folder, rules=checks)
    assert [row.passed for row in run.verdict()] == [False]
    assert [row.passed for row in run.verdict(**{"rss drift": 50})] == [True]
    with pytest.raises(BadInput, match="unknown tolerance 'rss_drift'; did you mean 'rss drift'"):
        run.verdict(rss_drift=50)


def test_a_lab_without_checks_shows_the_stored_verdict(folder):
    stored = Verdict([VerdictRow("mine", 1.0, 2.0, "s", True, "")])
    assert len(Run(folder).verdict()) == 0
    stored.write(folder / "verdict.json")
    assert Run(folder).verdict() == stored
    with pytest.raises(BadInput, match="takes no tolerances"):
        Run(folder, rules=lambda _: []).verdict(memory_drift=1)


def made_by_an_older_kit(folder):
    info = json.loads((folder / "run.json").read_text())
    del info["schema"]
    (folder / "run.json").write_text(json.dumps(info))


def about_ids(frame, config):
    errors = with_ids(select(frame, metric="error"), "tensor")
    return [Measured(float(rows["value"].max()), "now", of=str(name)) for name, rows in errors.groupby("tensor")]


def raising(frame, config):
    return Measured(frame[frame["metric"] == "gone"]["value"].iloc[0])


OF_IDS = Rule("errors", "?", about_ids, limit=1.0)
RAISES = Rule("raises", "?", raising, limit=1.0)


def test_an_older_run_is_judged_as_far_as_its_records_tell_and_shown_as_it_was_judged(folder):
    stored = Verdict([VerdictRow("errors", 0.5, 9.0, "1", True, "w")])
    stored.write(folder / "verdict.json")
    every = [*CHECKS["smoke"], OF_IDS, RAISES]
    today = {row.check: row for row in Run(folder, rules=lambda _: every).verdict()}
    assert (today["raises"].passed, "the check raised IndexError" in today["raises"].why) == (False, True)
    made_by_an_older_kit(folder)
    run = Run(folder, rules=lambda _: every)
    assert [row.passed for row in run.verdict()] == [False, None, None]
    assert run.shown_verdict() == stored


def test_a_run_that_broke_is_judged_as_far_as_its_records_go(make_run, record, tmp_path):
    writer = create_run(tmp_path, "smoke", {}, {}, out=tmp_path / "broke")
    writer.append([record(metric="rss", value=2**20, unit="B")])
    writer.finish("RankDied: rank 1 is gone")
    run = Run(writer.dir, rules=lambda _: [*CHECKS["smoke"], OF_IDS, RAISES])
    assert [row.passed for row in run.verdict()] == [True, None, None]
    assert run.verdict()[2].why.startswith(
        "not measured: the records of this run lack what the check needs (IndexError"
    )


def test_plot_goes_to_the_plotter(folder):
    assert Run(folder, plotter=lambda run, name, theme: (run.id, name, theme)).plot("drift", theme="dark") == (
        Run(folder).id,
        "drift",
        "dark",
    )
    with pytest.raises(BadInput, match="plotter"):
        Run(folder).plot()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object with run, lab and status"),
        ('{"run": "a", "lab": "b"}', "JSON object with run, lab and status"),
        ('{"run": "a", "lab": "b", "status": "gone"}', "allowed are running, finished, stopped, failed"),
        ('{"run": "a", "lab": "b", "status": "failed", "config": 3}', "config must be a JSON object"),
        (r'{"run": "\\input{/etc/passwd}", "lab": "b", "status": "failed"}', "the run's id .* has a slash"),
        ('{"run": "../../a", "lab": "b", "status": "failed"}', "the run's id '../../a' has a slash"),
        ('{"run": "", "lab": "b", "status": "failed"}', "the run's id '' has a slash, or is too long"),
        ('{"run": "a", "lab": "b", "status": "failed", "sealed": {"records": {"r": 3}}}', "sealed must have the count"),
        ("\udce9", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"run": "a", "lab": "b", "status": "failed", "config": {"cycles": 1e400}}', "the number 1e400 is too large"),
        ('{"run": "a", "lab": "b", "status": "failed", "n": 1' + "0" * 400 + "}", "the number 10000000000000000000 is"),
        ('{"run": "a", "lab": "b", "status": "failed", "n": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_damaged_run_json_is_one_sentence(folder, text, sentence):
    (folder / "run.json").write_text(text, errors="surrogateescape")
    with pytest.raises(BadInput, match=sentence) as caught:
        Run(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_folder_that_is_no_run_are_bad_input(tmp_path):
    with pytest.raises(BadInput, match="there is no run folder"):
        Run(tmp_path / "gone")
    with pytest.raises(BadInput, match="it has no run"):
        Run(tmp_path)


def test_list_runs_newest_first(make_run, tmp_path):
    old, new = make_run([], "b-old"), make_run([], "a-new")
    os.utime(old / "run.json", (1, 1))
    (tmp_path / "no-run").mkdir()
    assert list_runs(tmp_path) == [new, old]
    assert list_runs(tmp_path / "gone") == []


def test_what_is_appended_is_read_without_the_rest(folder, record, monkeypatch):
    with closing(RowWriter(folder / "records.jsonl")) as writer:
        writer.append([record()] * 5)
    run = Run(folder)
    first = run.frame()
    size = (folder / "records.jsonl").stat().st_size
    starts = []
    monkeypatch.setattr(run_module, "read_bytes", lambda path, start=0: starts.append(start) or read_bytes(path, start))
    with closing(RowWriter(folder / "records.jsonl")) as writer:
        writer.append([record(cycle=7), record(cycle=8)])
    assert list(run.frame()["cycle"]) == [*first["cycle"], 7, 8]
    assert starts == [size - run_module.KNOWN_BY]
    pd.testing.assert_frame_equal(run.frame(), Run(folder).frame())


def test_lines_are_counted_through_what_was_read_before(folder, record):
    path = folder / "records.jsonl"
    run = Run(folder)
    lines = len(run.frame())
    path.write_bytes(path.read_bytes() + b"torn\n" + record(cycle=9).to_line().encode())
    assert run.notes[0] == f"records.jsonl: 1 unreadable line was dropped (line {lines + 1})"
    path.write_bytes(path.read_bytes() + b"\nagain\n" + record(cycle=9).to_line().encode())
    assert run.notes == Run(folder).notes
    assert run.notes[:1] == [f"records.jsonl: 2 unreadable lines were dropped (lines {lines + 1}, {lines + 4})"]


@pytest.mark.parametrize("ending", [b"", b"torn", b"\n"])
def test_a_large_file_is_read_in_blocks_of_whole_lines(folder, record, monkeypatch, ending):
    lines = [record(cycle=cycle, text="é" * cycle).to_line().encode() for cycle in range(40)]
    lines[7] = b"no row\n"
    (folder / "records.jsonl").write_bytes(b"".join(lines) + ending)
    whole, blocks = Run(folder), []
    expected, notes = whole.frame(), whole.notes
    parse_lines = run_module.parse_lines
    monkeypatch.setattr(run_module, "BLOCK", 1000)
    monkeypatch.setattr(run_module, "parse_lines", lambda data: blocks.append(data) or parse_lines(data))
    run = Run(folder)
    pd.testing.assert_frame_equal(run.frame(), expected)
    assert (len(expected), run.notes) == (39, notes)
    assert len(blocks) > 5
    assert all(len(block) <= 1000 + max(map(len, lines)) for block in blocks)
    assert b"".join(blocks) == (folder / "records.jsonl").read_bytes()


def test_a_file_that_was_cut_or_written_anew_is_read_as_it_is(folder, record):
    path = folder / "records.jsonl"
    run = Run(folder)
    whole = path.read_bytes()
    assert len(run.frame())
    path.write_bytes(whole.replace(b'"cycle":', b'"cycle": ') + record(cycle=5).to_line().encode())
    pd.testing.assert_frame_equal(run.frame(), Run(folder).frame())
    path.write_bytes(whole[: len(whole) // 2])
    pd.testing.assert_frame_equal(run.frame(), Run(folder).frame())
    path.write_bytes(whole)
    pd.testing.assert_frame_equal(run.frame(), Run(folder).frame())


def test_checks_are_asked_once_until_records_grow(folder, record):
    asked = []

    def measure(frame, config):
        asked.append(len(frame))
        return Measured(3.0)

    run = Run(folder, rules=lambda lab: [Rule("c", "?", measure, limit=5)])
    assert [run.verdict(c=limit)[0].passed for limit in (5, 2, 3)] == [True, False, True]
    assert len(asked) == 1
    with closing(RowWriter(folder / "records.jsonl")) as writer:
        writer.append([record()])
    assert run.verdict()[0].passed
    assert asked == [asked[0], asked[0] + 1]


def test_a_run_under_way_has_not_passed_and_another_systems_ledger_may_stay_so(tmp_path):
    writer = create_run(tmp_path, "smoke", {}, {})
    writer.write_verdict(Verdict([VerdictRow("x", 1.0, 1.0, "1", True, "")]))
    run = Run(writer.dir)
    assert (run.ended, run.stored_verdict().passed) == ("running", False)
    assert Run(writer.dir, complete=True).stored_verdict().passed
    info = json.loads((writer.dir / "run.json").read_text())
    (writer.dir / "run.json").write_text(json.dumps({name: value for name, value in info.items() if name != "owner"}))
    assert Run(writer.dir).stored_verdict().passed


def test_records_that_could_not_be_read_are_read_later(make_run, monkeypatch):
    run = Run(make_run([Row(metric="x", value=1.0, time=1.0)]))
    with monkeypatch.context() as patched:
        patched.setattr("kit.results.run.read_bytes", broken_disk)
        with pytest.raises(OSError, match="stale"):
            run.frame()
    assert len(run.frame()) == 1


def broken_disk(*_: object) -> bytes:
    raise OSError("stale file handle")


def test_the_newest_run_of_a_lab(make_run, tmp_path):
    for name, lab, second, error in (
        ("stopped", "mine", 5, "interrupted"),
        ("own", "mine", 3, None),
        ("offload-20260101-000000-abcd", "offload", 2, "rank 1 died"),
        ("old", "mine", 1, None),
    ):
        writer = create_run(tmp_path, lab, {}, {}, out=tmp_path / name)
        writer.finish(error, stopped=name == "stopped")
        os.utime(writer.dir / "run.json", (second, second))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert newest_run(tmp_path, "mine") == tmp_path / "own"
    assert newest_run(tmp_path, "offload") == tmp_path / "offload-20260101-000000-abcd"
    assert newest_run(tmp_path, "other") is None
    assert newest_run(tmp_path / "nowhere", "mine") is None


def test_a_run_is_found_by_path_id_and_age_also_in_a_sweep(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    with pytest.raises(BadInput, match="there is no run in"):
        find_run()
    old, new = make_run([], "sweep/01"), make_run([], "new")
    assert list_runs(tmp_path) == [new]
    (tmp_path / "sweep" / INDEX).touch()
    os.utime(old / "run.json", (1, 1))
    assert list_runs(tmp_path) == [new, old]
    assert find_run() == new
    assert find_run("new") == find_run(new) == find_run(Run(new).id) == new
    assert find_run(Run(old).id) == old
    assert find_run("nowhere") == Path("nowhere")  # load() reports that it does not exist
    assert find_run("sweep/01") == find_run("01") == old
    assert find_run("sweep") == tmp_path / "sweep"
    (tmp_path.parent / f"beside-{tmp_path.name}").mkdir()
    assert find_run(f"../beside-{tmp_path.name}") == Path(f"../beside-{tmp_path.name}")  # not among the runs
    make_run([], "later/01")
    (tmp_path / "later" / INDEX).touch()
    with pytest.raises(BadInput, match=r"2 runs are called '01': later/01, sweep/01; name one of them so"):
        find_run("01")
    assert find_run("sweep/01") == old
    with pytest.raises(BadInput, match="it holds the runs of a sweep: `kit runs DIR` lists them"):
        Run(tmp_path / "sweep")


def test_a_table_has_a_column_per_rank_and_knows_where_it_is_from(make_run, record):
    rows = [record(cycle=cycle, phase=phase, rank=rank, value=10.0 * cycle + rank, time=10.0 * cycle + (phase == "a"))
            for cycle in (1, 2) for phase in ("b", "a") for rank in (0, 1)]  # fmt: skip
    rows += [
        record(metric="error", ids={"tensor": name}, value=value, unit="1") for name, value in (("w", 1.0), ("b", 2.0))
    ]
    run = Run(make_run(rows))
    table = run.table("seconds")
    assert list(table.index) == [(1, "b"), (1, "a"), (2, "b"), (2, "a")]
    assert table.loc[(2, "a")].to_dict() == {0: 20.0, 1: 21.0}
    assert run.table("error").xs("b", level="tensor").to_numpy().tolist() == [[2.0]]
    for frame in (run.frame(), run.frame().head(1), table):
        assert frame.attrs["provenance"]["run"]["id"] == run.id
    assert (table.attrs["unit"], run.table("error").attrs["unit"]) == ("s", "1")
    with pytest.raises(BadInput, match="has no metric 'secnds'; did you mean 'seconds'"):
        run.table("secnds")


def test_a_table_of_many_ids_has_only_the_rows_that_were_recorded(make_run, record):
    ids = [{"group": number, "sample": number * 3 % 601, "version": number * 7 % 601} for number in range(601)]
    rows = [record(metric="tokens", ids=row, value=1.0, unit="1", rank=rank) for row in ids for rank in (0, 1)]
    rows += [record(metric="completed", ids=row, value=None, unit="1") for row in ids]
    run = Run(make_run(rows))
    assert run.table("tokens").shape == (601, 2)
    with pytest.raises(BadInput, match="'completed' has no numbers"):
        run.table("completed")
