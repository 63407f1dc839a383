"""Verdicts as JUnit XML, which CI systems read: a suite for each run, a case for each check."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from kit.results.files import make_folder, write_text
from kit.results.marks import tally

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kit.results.marks import Verdict
    from kit.results.run import Run

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(runs: Sequence[tuple[Run, Verdict]], path: Path) -> Path:
    """A check that failed is a failure, one that was not measured is skipped, and a run that broke has an error."""
    top = ET.Element("testsuites", name="Lifecycle Kit")
    for run, rows in runs:
        suite = ET.SubElement(top, "testsuite", name=f"{run.lab} {run.id}")
        for row in rows:
            case = ET.SubElement(suite, "testcase", classname=run.lab, name=row.check)
            if row.passed is not True:
                kind = "skipped" if row.passed is None else "failure"
                ET.SubElement(case, kind, message=NOT_XML.sub("", row.why))
        if run.status != "finished":
            case = ET.SubElement(suite, "testcase", classname=run.lab, name="run")
            ET.SubElement(case, "error", message=NOT_XML.sub("", "; ".join(run.notes)))
        for count, kind in (
            ("tests", "testcase"),
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        ):
            suite.set(count, str(len(suite.findall(f".//{kind}"))))
        ET.SubElement(suite, "system-out").text = f"{tally(rows)}; {run.dir}"
    ET.indent(top)
    path = path.expanduser()
    make_folder(path.parent)
    write_text(path, ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n")
    return path
