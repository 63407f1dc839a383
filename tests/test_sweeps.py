"""Several runs of a lab in one folder, and settings read from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.errors import BadInput
from kit.labs.discover import find
from kit.public import SweepPoint, check_points, runs_of, settings_from_file, sweep, sweep_points
from kit.results import Row, Verdict, VerdictRow, create_run


def test_every_combination_and_the_repeats_after_each_other() -> None:
    swept = {"chunks": "1,[2,5]", "level": "tokens,both"}
    lists = [SweepPoint({"chunks": [1], "level": "tokens"}, 1), SweepPoint({"chunks": [1], "level": "both"}, 1)]
    found = sweep_points(find("split"), swept, 2)
    assert found[:2] == lists
    assert found[2].swept == {"chunks": [2, 5], "level": "tokens"}
    assert [one.repeat for one in found] == [1] * 4 + [2] * 4
    assert sweep_points(find("smoke"), {}, 2) == [SweepPoint({}, 1), SweepPoint({}, 2)]


def test_a_run_that_could_not_start_is_refused_before_the_first_does() -> None:
    lab = find("smoke")
    check_points(lab, {"ranks": 1}, sweep_points(lab, {"cycles": "1,2"}, 1), None)
    with pytest.raises(BadInput, match="cycles=0 #1: cycles must be a whole number from 1 to 1000, not 0"):
        check_points(lab, {"ranks": 1}, sweep_points(lab, {"cycles": "1,0"}, 1), None)


def test_the_index_has_every_run_and_the_spread(tmp_path: Path) -> None:
    seconds = iter([1.0, 4.0, 3.0])

    def run(config: dict[str, object], out: Path) -> tuple[int, dict[str, object]]:
        writer = create_run(tmp_path, "smoke", config, {}, out=out)
        took = next(seconds)
        where = {"run": writer.id, "lab": "smoke", "cycle": 1, "phase": "make", "rank": 0, "time": 1.0}
        writer.append([Row(**where, metric="seconds", value=took, unit="s")])
        writer.write_verdict(Verdict([VerdictRow("leak", took, 2.0, "MiB", took < 2, "")]))
        writer.finish()
        status = 130 if took == 3 else int(took > 2)
        return status, {"status": "finished", "error": None, "exit": status}

    out = tmp_path / "sweep"
    status, folder = sweep("smoke", sweep_points(find("smoke"), {}, 5), out, run)
    assert (status, folder) == (130, out)  # interrupted in the third run; the other two do not start
    index = json.loads((out / "index.json").read_text())
    assert [(row["dir"], row["repeat"], row["exit"]) for row in index["runs"]] == [
        ("01", 1, 0),
        ("02", 2, 1),
        ("03", 3, 130),
    ]
    assert index["planned"] == 5
    time, leak = index["spread"]
    assert time == {"set": {}, "what": "make: time", "unit": "s", "median": 3.0, "min": 1.0, "max": 4.0, "count": 3}
    assert (leak["what"], leak["max"], leak["unit"]) == ("check leak", 4.0, "MiB")
    assert runs_of(out) == [out / name for name in ("01", "02", "03")]
    assert runs_of(out / "01") == [out / "01"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(BadInput, match="mine is not empty; choose a new folder or an empty one"):
        sweep("smoke", sweep_points(find("smoke"), {}, 1), tmp_path / "mine", run)
    with pytest.raises(BadInput, match="already holds a sweep"):
        sweep("smoke", sweep_points(find("smoke"), {}, 1), out, run)


def test_settings_from_a_file(tmp_path: Path) -> None:
    def read(name: str, text: str) -> dict[str, object]:
        (tmp_path / name).write_text(text)
        return settings_from_file(tmp_path / name)

    assert read("run.yaml", "cycles: 5\nchunks: [1, 2]\n") == {"cycles": 5, "chunks": [1, 2]}
    assert read("run.json", '{"timeout_s": 1e-1}') == {"timeout_s": 0.1}
    for name, text, sentence in (
        ("run.toml", "", "settings are read from .json, .yaml or .yml"),
        ("run.yml", "- 1", "has no settings; it must be one object"),
        ("torn.yml", "a: [", "torn.yml is damaged: while parsing"),
        ("torn.json", "{", "torn.json is damaged"),
        ("bytes.yml", "\x00", "bytes.yml is damaged"),
    ):
        with pytest.raises(BadInput, match=sentence):
            read(name, text)
    with pytest.raises(BadInput, match=r"cannot read .*gone.yaml: No such file"):
        settings_from_file(tmp_path / "gone.yaml")
