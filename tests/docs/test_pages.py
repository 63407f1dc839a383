"""The docs work as printed: the README's snippets, the reference generated from the code, and the lab of CONTRIBUTING."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kit
from docs import api
from docs.examples.tiny_lab import LAB
from kit.labs.lab import Lab

ROOT = Path(__file__).resolve().parents[2]


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_reference_is_that_of_the_code() -> None:
    assert api.PAGE.read_text() == api.text(), "run `python -m docs.api`"
    for name in ("World(", "Recorder(", ".phase(", ".submit(", "`bucket_mib`", "`cycles`"):
        assert name in api.text()


def test_the_first_snippets_of_the_readme_run_as_pasted(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    names: dict[str, Any] = {}
    first, second, *_ = snippets("README.md")
    exec(first, names)
    assert capfd.readouterr().out.splitlines() == ["[0] x is 3.0", "[1] x is 3.0", "[3.0, 3.0]"]
    with pytest.raises(kit.RankTimeout, match="rank 0 in a collective, waiting for rank 1"):
        exec(second, names)


def test_the_first_result_comes_soon() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page[: page.index("```\n[0] x is 3.0")].split()) <= 350
    cells = json.loads((ROOT / "notebooks" / "00_start.ipynb").read_text())["cells"]
    first = next(
        at for at, cell in enumerate(cells) if "doctor" in "".join(cell["source"]) and cell["cell_type"] == "code"
    )
    assert sum(len("".join(cell["source"]).split()) for cell in cells[: first + 1]) <= 350


def test_the_pages_stay_short() -> None:
    """Pages written by hand; api.md, examples.md and mutants.md are generated."""
    pages = {page for page in (ROOT / "docs").glob("*.md") if page.stem not in {"api", "examples", "mutants"}}
    assert len(pages) > 15
    assert sum(len(page.read_text().split()) for page in pages) <= 25_000


def test_the_lab_of_contributing_passes_and_catches_its_fault(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    monkeypatch.chdir(ROOT)
    with kit.World(2, device="cpu") as world:
        for fault, passed in ((None, True), ("forgets", False)):
            with Lab(LAB, {"cycles": 3}, fault=fault, world=world) as lab:
                verdict = {row.check: row.passed for row in lab.run().verdict()}
            assert verdict["sums_are_exact"] is passed
            assert set(verdict.values()) <= {passed, True, None}


def test_the_code_of_contributing_can_be_imported() -> None:
    """All import lines are valid, and every name used in the snippets is either imported or defined by the reader."""
    lines = re.findall(r"^from kit.* import .*$", "\n".join(snippets("CONTRIBUTING.md")), re.MULTILINE)
    names: dict[str, Any] = {}
    for line in lines:
        exec(line, names)
    assert {
        "LabConfig",
        "Option",
        "Step",
        "Rule",
        "Measured",
        "Charts",
        "Lines",
        "Limit",
        "Table",
        "Definition",
    } <= set(names)


def test_the_paths_of_contributing_lead_through_files_of_the_kit() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Three paths")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", section.partition("|---|")[2])
    assert len(files) > 25
    assert [file for file in files if not (ROOT / "kit" / file).exists()] == []
