"""`kit reference`: real parts in real processes, few and small; it goes on where it was."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from kit.bench import reference
from kit.bench.reference import ON_CARDS, ON_CPU, bench, lab, make, short_of, sizes_here, summarise, through
from kit.cli import benches
from kit.errors import BadInput
from kit.labs.configure import validate
from kit.labs.discover import discover, find
from kit.results.files import read_json

SMALL = (
    lab("smoke", cycles=2),
    lab("smoke", "refused", cycles=0),
    lab("smoke", "late", cycles=500, most_s=0.5),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], int]:
    out = tmp_path_factory.mktemp("reference") / "box"
    said: list[str] = []
    return out, said, make(out, parts=SMALL, say=said.append)


@pytest.mark.slow
def test_a_labs_files_have_verdict_numbers_picture_and_origin(made) -> None:
    out, _, _ = made
    told = read_json(out / "lab-smoke.json")
    assert (told["exit"], told["state"], told["command"]) == (0, "no check failed", "kit run smoke --set cycles=2")
    assert {row["check"] for row in told["verdict"]} >= {"groups_return_to_baseline"}
    assert told["provenance"]["versions"]["torch"]
    seconds = [row for row in told["medians"] if row["metric"] == "seconds"]
    assert all(row["min"] <= row["median"] <= row["max"] and row["count"] >= 2 for row in seconds)
    for name in ("lab-smoke.png", "lab-smoke-dark.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert (out / "runs" / "lab-smoke" / "records.jsonl").exists()


@pytest.mark.slow
def test_what_is_refused_is_told_and_is_no_failure(made) -> None:
    told = read_json(made[0] / "lab-refused.json")
    assert (told["exit"], told["state"]) == (2, "refused")
    assert "cycles must be a whole number from 1 to 1000, not 0" in told["complaint"]


@pytest.mark.slow
def test_a_part_past_its_time_is_ended_and_the_whole_is_not_well(made) -> None:
    out, said, status = made
    told = read_json(out / "lab-late.json")
    assert told["exit"] == 3
    assert told["complaint"] == "it took more than 0.5 s and was ended"
    assert status == 3
    assert said[0] == "1 of 3, lab-smoke ..."


@pytest.mark.slow
def test_the_page_lists_every_part(made) -> None:
    page = (made[0] / "README.md").read_text()
    assert page.startswith("# Reference: box\n")
    assert "cores" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| lab-")]
    assert [row[0].removeprefix("| ") for row in rows] == ["lab-smoke", "lab-refused", "lab-late"]
    assert rows[0][2] == "no check failed"


@pytest.mark.slow
def test_it_goes_on_where_it_was(made) -> None:
    out, _, _ = made
    before = (out / "lab-smoke.json").stat().st_mtime_ns
    said: list[str] = []
    again = (SMALL[0], lab("smoke", "late", cycles=1))
    assert make(out, parts=again, say=said.append) == 0
    assert said[0] == "1 of 2, lab-smoke: there already"
    assert (out / "lab-smoke.json").stat().st_mtime_ns == before
    assert read_json(out / "lab-late.json")["state"] == "no check failed"


def test_a_folder_that_is_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadInput, match="is a file: name a folder for the reference"):
        make(tmp_path / "taken", parts=())
    with pytest.raises(BadInput, match=r"cannot make a folder at .*: Not a directory"):
        make(tmp_path / "taken" / "below", parts=())


@pytest.mark.parametrize("parts", [ON_CPU, ON_CARDS], ids=["host", "cards"])
def test_every_lab_and_bench_has_its_part_with_settings_that_are_there(parts) -> None:
    assert {part.lab for part in parts if part.lab} == set(discover().labs)
    without_notebook = set(benches()) - {"view"}  # that one measures what people look at, and needs their environment
    assert {part.command[1] for part in parts if not part.lab} == without_notebook
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if part.lab:
            validate(find(part.lab), part.settings)


@pytest.mark.parametrize(("device", "parts"), [("cpu", ON_CPU), ("cuda", ON_CARDS)])
def test_sizes_are_those_of_the_box(tmp_path, monkeypatch, device, parts) -> None:
    """Doctor's answer is made up: there need be no card here."""
    found = json.dumps({"problems": [], "ranks": {"device": device}})
    monkeypatch.setattr(reference.subprocess, "run", answering(found))
    assert sizes_here(tmp_path) is parts
    assert read_json(tmp_path / "doctor.json")["ranks"]["device"] == device


def test_a_box_where_labs_cannot_run_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reference.subprocess, "run", answering(json.dumps({"problems": ["no torch"], "ranks": None})))
    with pytest.raises(BadInput, match="labs cannot run here: no torch"):
        sizes_here(tmp_path)


def answering(text: str):
    class Done:
        stdout, stderr, returncode = text, "", 0

    return lambda *_, **__: Done


def test_what_fell_short_is_named() -> None:
    told = {
        "verdict": [{"check": "a", "passed": False}, {"check": "b", "passed": None}],
        "rows": [{"what": "slow", "met": False}, {"what": "quick", "met": True}, {"what": "free", "met": None}],
    }
    assert short_of(told) == ["a", "slow"]


def test_what_a_bench_measured_before_its_time_was_over_is_kept(tmp_path, monkeypatch) -> None:
    """How it ends is made up: a bench that is interrupted tells what it has, and ends well or not."""
    rows = [{"what": "slow", "met": False}]
    told = "what  who\nslow  kit\n" + json.dumps({"bench": "sync", "rows": rows}) + "\n"
    monkeypatch.setattr(reference, "finish", lambda *_: (3, told, "it took more than 1 s and was ended"))
    reference.perform(tmp_path, bench("sync"))
    kept = read_json(tmp_path / "bench-sync.json")
    assert (kept["rows"], kept["exit"], kept["state"]) == (rows, 3, "broke")
    assert (tmp_path / "bench-sync.txt").read_text() == "what  who\nslow  kit\n"


def test_a_bench_that_ends_in_the_middle_has_no_rows(tmp_path, monkeypatch) -> None:
    """How it ends is made up."""
    monkeypatch.setattr(reference, "finish", lambda *_: (3, "what\n{oh}", "died"))
    reference.perform(tmp_path, bench("sync"))
    kept = read_json(tmp_path / "bench-sync.json")
    assert (kept["exit"], kept["complaint"]) == (3, "died")
    assert "rows" not in kept


def test_what_was_recorded_by_hand_is_recorded_anew(tmp_path) -> None:
    (tmp_path / "bench-sync.json").write_text(json.dumps({"bench": "sync", "rows": []}))
    assert not through(tmp_path, bench("sync"))
    summarise(tmp_path, [bench("sync")])
    assert "Not there yet" not in (tmp_path / "README.md").read_text()


def test_names_are_those_of_files() -> None:
    assert (lab("offload", "offload-exact").name, bench("sync").name) == ("lab-offload-exact", "bench-sync")


@pytest.mark.parametrize("name", benches())
def test_every_bench_can_be_quick(name: str) -> None:
    module = import_module(f"kit.bench.{name}")
    assert isinstance(module.QUICK, module.Sizes)
    assert module.Sizes() != module.QUICK
