"""Recorded results: found by their part, shown with their machine, and a clear error where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.errors import BadInput
from kit.labs.bench import Samples
from kit.measure import provenance
from kit.results.comparison import FOLDER, recorded
from kit.results.rules import Rule
from kit.results.samples import median_rule, sample_rows
from tests.bench.recorded import frame_of


def keep(folder: Path, part: str, **reported: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{part}.json").write_text(json.dumps({**reported, "provenance": provenance()}))


def of(*samples: Samples, rules: tuple[Rule, ...] = ()) -> list[dict[str, Any]]:
    return sample_rows(frame_of(samples), rules, {})


@pytest.fixture
def references(tmp_path: Path) -> Path:
    rows = of(
        Samples(what="a copy", values=[2.0, 1.0, 9.0], metric="copied", unit="ms"),
        Samples(what="a far copy", note="not measured: there is one GPU"),
        rules=(median_rule("copied", "Is it fast?", 1.5, "ms"),),
    )
    keep(tmp_path / "one", "bench-sync", rows=rows)
    keep(tmp_path / "two", "bench-sync", rows=rows[:1])
    keep(tmp_path / "two", "bench-view", rows=of(Samples(what="<b>", values=[1.0])))
    return tmp_path


def test_each_machine_is_found_and_named(references: Path) -> None:
    one, two = recorded("bench-sync", folder=references)
    assert [one.folder, two.folder] == ["one", "two"]
    assert one.head.startswith("recorded on one, not here: ")
    assert f"Python {one.provenance['python']}" in one.head
    assert [len(one.rows), len(two.rows)] == [2, 1]


def test_files_of_parts_come_together(references: Path) -> None:
    for part, what in (("bench-sync.gpus-shm", "by GPU"), ("bench-sync.model", "by model"), ("bench-synch", "another")):
        keep(references / "one", part, rows=of(Samples(what=what, values=[1.0])))
    one, two = recorded("bench-sync", folder=references)
    assert [each["what"] for each in one.rows] == ["a copy", "a far copy", "by GPU", "by model"]
    assert len(two.rows) == 1


def test_rows_are_chosen_by_a_text(references: Path) -> None:
    (one,) = recorded("bench-sync", "far", folder=references)
    assert [one.folder, one.rows[0]["what"]] == ["one", "a far copy"]


@pytest.mark.parametrize(("part", "text"), [("bench-nothing", ""), ("bench-sync", "no such row")])
def test_what_is_not_there_is_refused_with_what_is(references: Path, part: str, text: str) -> None:
    with pytest.raises(BadInput, match="it has bench-sync, bench-view"):
        recorded(part, text, folder=references)


def test_a_bench_is_shown_with_its_spread_and_its_notes(references: Path) -> None:
    lines = repr(recorded("bench-sync", folder=references)).splitlines()
    assert " ".join(lines[2].split()) == "a copy kit 2 ms 1 ms to 9 ms 3 1.5 ms not met"
    assert " ".join(lines[3].split()) == "a far copy kit - not measured: there is one GPU"
    assert [line[:16] for line in lines if line.startswith("recorded")] == ["recorded on one,", "recorded on two,"]


def test_ways_that_did_the_same_are_columns(tmp_path: Path) -> None:
    rows = of(
        Samples(what="release", values=[12.345], unit="ms", who="exact"),
        Samples(what="release", values=[30.0], unit="ms", who="abort", metric="released"),
        Samples(what="back", values=[2.0], unit="ms", who="exact"),
        Samples(what="back", who="abort", note="not measured"),
        rules=(median_rule("released", "Is it fast?", 10.0, "ms"),),
    )
    keep(tmp_path / "one", "bench-release", rows=rows)
    head, cells = recorded("bench-release", folder=tmp_path)[0].table
    assert head == ("what, median", "exact", "abort")
    assert cells == [["release", "12.3 ms", "30 ms (not met)"], ["back", "2 ms", "-"]]


def test_a_page_names_the_machine_and_is_escaped(references: Path) -> None:
    page = recorded("bench-view", folder=references)._repr_html_()
    assert "recorded on two, not here" in page
    assert "&lt;b&gt;" in page


def test_all_that_comes_with_the_kit_can_be_recorded() -> None:
    parts = sorted({path.stem for path in FOLDER.glob("*/bench-*.json")})
    assert parts
    for part in parts:
        assert repr(recorded(part)).startswith("recorded on ")
