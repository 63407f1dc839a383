"""Verdicts as JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from kit.results import Run, VerdictRow
from kit.results.timeline import write_junit
from kit.results.verdict import Verdict


def test_a_case_for_each_check_and_an_error_for_a_run_that_did_not_finish(make_run, tmp_path):
    rows = [VerdictRow("fine", 0, 0, "1", True, ""), VerdictRow("leak", 3, 0, "1", False, 'rank <0>\x1b["')]
    verdict = Verdict([*rows, VerdictRow("gpu", None, 0, "B", None, "no GPU")])
    finished, broken = Run(make_run([], "one")), Run(make_run([], "two"))
    info = (broken.dir / "run.json").read_text()
    (broken.dir / "run.json").write_text(info.replace('"finished",', '"failed",', 1))
    path = write_junit([(finished, verdict), (broken, Verdict([]))], tmp_path / "new" / "checks.xml")
    one, two = ET.fromstring(path.read_text())
    assert {name: one.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3", "failures": "1", "errors": "0", "skipped": "1",
    }  # fmt: skip
    assert [(case.get("name"), [(child.tag, child.get("message")) for child in case]) for case in one.iter("testcase")] == [
        ("fine", []), ("leak", [("failure", 'rank <0>["')]), ("gpu", [("skipped", "no GPU")]),
    ]  # fmt: skip
    assert two.get("errors") == "1"
    assert "the run failed" in two.find("testcase/error").get("message")
