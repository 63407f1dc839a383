"""The report: a single page without external parts, worst results first, and a note where it is partial."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import re
import signal
from html.parser import HTMLParser

import pytest

import kit
from kit.draw.data import read
from kit.draw.general import phase_times, time_of_phases
from kit.draw.picture import PLACES, image_uri
from kit.draw.style import LIGHT
from kit.errors import BadInput, KitError
from kit.labs.discover import rules_of
from kit.results import VerdictRow, trace
from kit.results.comparison import Comparison, run_differences
from kit.results.records import to_json
from kit.results.units import ROW
from kit.results.verdict import Verdict
from kit.view import report
from kit.view.report import CHANGES, MOST, changed_answers, report_page, table_cells, tail, write_report


@pytest.fixture
def make_run(make_run):
    """Load a run as the command does, with its lab's checks."""
    return lambda **options: kit.load(make_run(**options).dir)


class Reader(HTMLParser):
    """Collects what a page would load, its text, its headings and its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in {"src", "srcset", "href", "data", "action"}]

    def handle_data(self, data):
        if self.tags[-1:] not in (["style"], ["script"]):
            self.text.append(data)

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_a_run_that_a_person_named_has_its_name_at_its_head(make_run):
    run = make_run()
    run.label = "before the upgrade"
    text = report_page([run])
    assert ">before the upgrade</h2>" in text
    assert run.id in Reader(text).words()


def test_everything_is_inside_the_page(make_run):
    run = make_run()
    text = report_page([run])
    read = Reader(text)
    assert all(load.startswith(("data:image/svg+xml;base64,", "#")) for load in read.loads)
    [picture] = [base64.b64decode(load.partition(",")[2]).decode() for load in read.loads if load.startswith("data:")]
    paper = PLACES[LIGHT.paper]
    light, dark = picture.split("@media (prefers-color-scheme: dark)")
    assert f"{paper}:#ffffff;" in light
    assert f"{paper}:#161b22;" in dark
    assert f"fill: var({paper})" in dark
    assert set(re.findall(r"url\((.)", picture)) == {"#"}
    assert 'href="http' not in picture
    assert image_uri(kit.load(run.dir).plot()) in text  # the same run gives the same bytes
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert 'content="width=device-width' in text
    assert len(text) < 700_000
    words = read.words()
    assert run.id in words
    assert "Time per phase and rank" in words
    assert "Partial" not in words
    questions = {rule.name: rule.question for rule in rules_of("smoke")}
    assert f"groups_are_distinct {questions['groups_are_distinct']}" in words
    assert (
        "nothing was recorded in phase 'count' (groups_return_to_baseline, " in words
    )  # several share a reason and a line


@pytest.mark.slow
def test_memory_snapshots_are_named_with_how_to_open_them_or_why_there_are_none(make_run):
    run = make_run()
    assert "memory snapshots" not in Reader(report_page([run])).words()
    path = run.dir / "run.json"
    info = json.loads(path.read_text())
    info["config"]["memory_snapshot"] = True
    info["provenance"] = {"world": {"device": "cpu"}}
    path.write_text(json.dumps(info))
    assert "memory snapshots none: the ranks worked on the CPU" in Reader(report_page([kit.load(run.dir)])).words()
    for rank in (10, 2):
        (run.dir / "memory").mkdir(exist_ok=True)
        (run.dir / "memory" / f"rank{rank}.pickle").write_bytes(b"")
    words = Reader(report_page([kit.load(run.dir)])).words()
    assert "memory/rank2.pickle, memory/rank10.pickle; drop one on https://pytorch.org/memory_viz" in words


def test_the_worst_comes_first(make_run):
    run = make_run()
    rows = [
        VerdictRow("memory_drift", 1.0, 50.0, "MiB", True, "fine"),
        VerdictRow("fds_return", None, 0.0, "1", None, "not measured: nobody looked"),
        VerdictRow("groups_return_to_baseline", 3.0, 2.0, "1", False, "rank 1 keeps <three>"),
    ]
    Verdict(rows).write(run.dir / "verdict.json")
    words = Reader(report_page([run])).words()
    assert "1 failed, 1 passed, 1 not measured" in words
    places = [words.index(row.check) for row in rows]
    assert places == sorted(places, reverse=True)
    assert "limit" in words
    assert "≤ 2 moved from the lab's 0" in words  # the stored verdict's limit, not the lab's
    assert "rank 1 keeps <three>" in words  # escaped, not as a tag


@pytest.mark.slow
def test_runs_are_reported_worst_first_and_compared(make_run, tmp_path):
    good = make_run()
    slow = make_run(more=(("groups_made", 2, "1"),))
    broken = make_run(finish=False)
    info = json.loads((broken.dir / "run.json").read_text())
    (broken.dir / "run.json").write_text(json.dumps({**info, "status": "failed", "error": "RankDied: rank 1 <gone>"}))
    (broken.dir / "logs" / "error.txt").write_text("RankDied: rank 1 <gone>\nsee dmesg\n")
    (broken.dir / "logs" / "rank1.log").write_text("\x1b[31mlast words\x1b[0m\n")
    lines = (
        (slow.dir / "records.jsonl")
        .read_text()
        .replace('"value": 20.0', '"value": 40.0')
        .replace('"value":20', '"value":40')
    )
    (slow.dir / "records.jsonl").write_text(lines)
    words = Reader(report_page([good, slow, broken])).words()
    first = words[: words.index("Largest changes")]
    assert first.index(broken.id) < first.index(good.id)
    assert "the run broke" in first
    assert (
        "Partial: the numbers and answers cover only what was measured. the run failed: RankDied: rank 1 <gone>"
        in words
    )
    assert "RankDied: rank 1 <gone> see dmesg" in words
    assert "last words" in words
    assert "Settings that differ" not in words  # their settings are equal
    told: list[str] = []
    again = report_page([good, slow, broken, good], processes=2, tell=told.append)
    stamp = re.compile(r"\d\d:\d\d UTC")
    assert stamp.sub("", Reader(again).words()) == stamp.sub(
        "", words
    )  # given twice, shown once; and two processes write the same page
    assert told == [f"{number} of 3 runs are drawn" for number in range(4)]
    table = changed_answers(Comparison([good, slow, broken]))
    assert [text for text, _ in table["rows"][0]][:4] == [slow.id, "create", "fds", "0"]
    assert table["rows"][0][6] == ("2", 2.0)
    assert len(table["rows"]) <= CHANGES


class TwoWords(Exception):  # noqa: N818 - pickle makes it from its message alone, and fails
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def raises_two_words(*_):
    raise TwoWords("not", "drawn")


@pytest.mark.parametrize("breaks", [killed, raises_two_words])
def test_a_drawing_process_that_breaks_ends_the_report(make_run, monkeypatch, breaks):
    monkeypatch.setattr(report, "comparison", breaks)
    monkeypatch.setattr(report, "chapter", lambda *_: {})
    with pytest.raises(KitError, match="a process that draws it broke"):
        report.make_parts([make_run(), make_run()], processes=2, tell=str)
    assert report.PARTS == []


def test_what_passed_is_folded_and_what_was_not_measured_for_one_reason_is_one_row(make_run):
    run = make_run()
    null = [VerdictRow(name, None, 0.0, "1", None, "not measured: no GPU") for name in ("fds_return", "threads_return")]
    bad = VerdictRow("groups_return_to_baseline", 3.0, 0.0, "1", False, "rank 1 keeps three")
    Verdict([VerdictRow("memory_drift", 1.0, 50.0, "MiB", True, "fine"), *null, bad]).write(run.dir / "verdict.json")
    text = report_page([run])
    above, passed = text.split("<summary>1 check passed</summary>")
    assert "rank 1 keeps three" in above
    assert ">no GPU (fds_return, threads_return)<" in above
    assert "<td>memory_drift" not in above
    assert "<td>memory_drift" in passed.split("</details>")[0]


def test_a_limit_that_the_config_of_an_older_kit_cannot_give_is_neither_printed_nor_moved(make_run):
    run = make_run()
    unknown = VerdictRow("fds_return", None, math.nan, "1", None, "not measured: the run's config has no 'size'")
    (row,) = report.answer_rows(run, Verdict([unknown]))
    assert ("nan" in f"{row}", row["moved"]) == (False, "")
    assert report.moved_limits(run, Verdict([unknown])) == {}


def test_the_runs_stand_worst_first_and_the_index_says_what_differs(make_run):
    good, bad = make_run(), make_run(cycles=4, fault="leaked-group")
    Verdict([VerdictRow("fds_return", 0.0, 0.0, "1", True, "")]).write(good.dir / "verdict.json")
    Verdict([VerdictRow("fds_return", 3.0, 0.0, "1", False, "")]).write(bad.dir / "verdict.json")
    text = report_page([good, bad])
    assert text.index(f">{bad.id}</h2>") < text.index(f">{good.id}</h2>")
    (first, second) = run_differences([good, bad])
    assert f'data-label="differs in">{second}<' in text
    assert second.endswith("fault leaked-group")
    assert first != second


def test_the_timeline_is_on_the_page_for_perfetto(make_run):
    run = make_run()
    (packed,) = re.findall(r'data-trace="([^"]+)"', report_page([run]))
    assert json.loads(gzip.decompress(base64.b64decode(packed))) == json.loads(to_json(trace(run)))
    assert "data-trace=" not in report_page([make_run(cycles=0, finish=False)])  # nothing was timed


def test_a_run_that_has_only_begun_and_one_of_a_script(make_run, tmp_path):
    empty = make_run(cycles=0, finish=False)
    words = Reader(report_page([empty])).words()
    assert "running" in words
    assert "the run has not finished" in words
    info = json.loads((empty.dir / "run.json").read_text())
    (empty.dir / "run.json").write_text(json.dumps({**info, "lab": "mine", "status": "finished"}))
    assert "no checks" in Reader(report_page([empty])).words()


def test_times_are_by_phase_and_rank(make_run):
    table = table_cells(time_of_phases(read(make_run(ranks=2))), "times", {"median": "s"}, worst="median")
    assert table["head"] == ["phase", "rank", "n", "median", "min", "max"]
    assert [text for text, _ in table["rows"][0]][:4] == ["create", "rank 0", "3", "10 ms"]


def test_ranks_stand_in_their_order_although_the_last_answers_first(make_run):
    run = make_run(ranks=2)
    path = run.dir / "records.jsonl"
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True), key=lambda line: '"rank":0' in line)))
    data = read(kit.load(run.dir))
    assert data.of("seconds")["rank"].iloc[0] == 1
    assert list(phase_times(data)["lane"].unique()) == ["rank 0", "rank 1"]


def test_long_tables_say_what_is_left_out(make_run):
    frame = make_run(ranks=4, cycles=6).frame()[["metric", "value", "unit"]]
    assert len(frame) > MOST
    table = table_cells(frame, "everything", {"value": ROW})
    assert len(table["rows"]) == MOST
    assert table["more"].startswith(f"{len(frame) - MOST} more rows")
    assert table["rows"][0][1] == ("10 ms", 0.01)  # in the row's unit
    assert table_cells(frame.head(3), "few", {})["more"] == ""


def test_a_tail_says_how_much_came_before(tmp_path):
    path = tmp_path / "rank0.log"
    path.write_text("\n".join(f"line {number}" for number in range(100)))
    lines = tail(path).splitlines()
    assert lines[0] == "... 40 lines before"
    assert lines[-1] == "line 99"


def test_bad_places_and_no_runs(make_run, tmp_path):
    run = make_run(cycles=1)
    with pytest.raises(BadInput, match=r"must end in .html or .htm, not 'report.pdf'"):
        write_report([run], tmp_path / "report.pdf")
    with pytest.raises(BadInput, match="cannot make the folder /dev/null/nowhere: Not a directory"):
        write_report([run], "/dev/null/nowhere/report.html")
    with pytest.raises(BadInput, match="at least one run"):
        report_page([])
    written = write_report([run], tmp_path / "report.html")
    assert re.match("<!DOCTYPE html>", written.read_text())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
