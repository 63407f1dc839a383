"""Commands that read runs handle every folder that a kill, a full disk or a stranger can leave, without a traceback."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kit
from kit import cli
from kit.measure import provenance
from kit.results import Row, create_run

FOLDERS = 200
SEED = 17
LABS = ("smoke", "offload", "split", "sync", "own")
NAMES = ("seconds", "anon_rss", "rss", "peak_rss", "groups", "fds", "threads", "loss", "failed", "gpu", "driver_used")
PHASES = ("baseline", "create", "count", "$re{load$", "run")
VALUES = (0.5, 2e8, 0.0, -3.0, float("nan"), float("inf"), None)
TORN = (b"\xff\xfe\n", b'{"run": 1}\n', b"null\n", b"[]\n\n", b'{"run":"r","lab":', b"\x1b[31m\n", b"9" * 5000 + b"\n")


def whole_run(folder: Path, dice: random.Random) -> None:
    """Write a run of a random lab with everything that a run folder can hold."""
    writer = create_run(folder, dice.choice(LABS), {"ranks": 2, "cycles": 3}, {"host": "x"}, out=folder)
    for cycle in range(dice.randrange(4)):
        for phase in PHASES:
            writer.append(
                [
                    Row(
                        run=writer.id, lab=writer.lab, cycle=cycle, phase=phase, rank=rank, metric=name,
                        value=dice.choice(VALUES) if dice.random() < 0.2 else 1.5, unit="s", time=1.8e9 + cycle,
                    )
                    for rank in range(2)
                    for name in NAMES
                ]
            )  # fmt: skip
    (folder / "verdict.json").write_text(
        json.dumps([{"check": "x", "measured": "NaN", "limit": 0, "unit": "1", "passed": False, "why": "\x1b[31m$w"}])
    )
    (folder / "logs" / "rank0.log").write_text("\x1b[31mlast words\x1b[0m\n")
    (folder / "logs" / "error.txt").write_bytes(b"RankDied: \xff\n")
    dice.choice((writer.finish, lambda: writer.finish("RankDied: rank 1 \x1b[31m{$}"), lambda: None))()


def damage(folder: Path, dice: random.Random) -> None:
    """Cut, remove or overwrite something in the folder."""
    records, info, verdict = folder / "records.jsonl", folder / "run.json", folder / "verdict.json"
    data = records.read_bytes()
    match dice.randrange(12):
        case 0 | 1 | 2:  # killed at any byte
            records.write_bytes(data[: dice.randrange(len(data) + 1)])
            verdict.unlink()
        case 3:  # another rank wrote after a torn line
            at = dice.randrange(len(data) + 1)
            records.write_bytes(data[:at] + dice.choice(TORN) + data[at:])
        case 4:
            records.unlink()
        case 5:  # killed before the first rename
            info.rename(folder / ".run.json.1-ab.tmp")
        case 6:
            info.write_bytes(info.read_bytes()[: dice.randrange(200)])
        case 7:
            verdict.write_bytes(verdict.read_bytes()[: dice.randrange(60)])
        case 8:  # a value of the wrong kind
            reported: dict[str, Any] = json.loads(info.read_text())
            reported[dice.choice(list(reported))] = dice.choice((None, 3, "x", [], {"a": {"b": []}}, [1], True))
            info.write_text(json.dumps(reported))
        case 9:
            shutil.rmtree(folder / "logs")
        case 10:
            (folder / "records.node1.jsonl").write_bytes(data[: dice.randrange(len(data) + 1)])
        case 11:
            verdict.write_text(json.dumps(dice.choice((None, {}, [1], [{}], "x", [{"check": 1}]))))


def folders(to: Path) -> list[Path]:
    dice = random.Random(SEED)
    made = [to / f"r{number}" for number in range(FOLDERS)]
    for folder in made:
        whole_run(folder, dice)
        damage(folder, dice)
    return made


def asked(capfd: pytest.CaptureFixture[str], *words: Any) -> str:
    status = cli.main([str(word) for word in words])
    out, err = capfd.readouterr()
    assert "Traceback" not in err, f"{words}: {err}"
    assert status in {0, 1, 2} or (words[0] == "check" and status == 3), f"{words}: {status}, {err}"
    assert "\x1b" not in out + err, words
    return out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_200_folders_are_read_without_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = folders(tmp_path / "runs")
    for folder in made:
        asked(capfd, "show", folder)
        asked(capfd, "check", folder)
        asked(capfd, "compare", made[0], folder)
        asked(capfd, "export", folder, "--to", tmp_path / "t.csv")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_folders_make_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are made but not rendered, which would take most of the time; the test below renders some."""
    monkeypatch.setattr("kit.view.report.image_uri", lambda picture: "data:,")
    for folder in folders(tmp_path / "runs"):
        asked(capfd, "report", folder, "--to", tmp_path / "page.html")


@pytest.mark.slow
def test_some_folders_make_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in folders(tmp_path / "runs")[::40]:
        asked(capfd, "report", folder, "--to", tmp_path / "page.html")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with names made of math and template syntax."""
    folder = tmp_path / "run"
    writer = create_run(tmp_path, "own", {"{{x}}": "$\\frac{"}, {}, out=folder, fault="$\\sum{")
    writer.append(
        [
            Row(
                run=writer.id, lab="own", cycle=cycle, phase=phase, rank=0,
                metric=name, value=1.5, unit="s", time=1.8e9 + cycle,
            )
            for cycle in range(3)
            for phase in ("$\\frac{$", "{reload}")
            for name in NAMES
        ]
    )  # fmt: skip
    writer.finish()
    (folder / "verdict.json").write_text(
        json.dumps([{"check": "$a_{", "measured": 1, "limit": 0, "unit": "1", "passed": False, "why": "${{ x }}"}])
    )
    return folder


def test_dollars_and_braces_in_names_are_drawn_as_they_are(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert asked(capfd, "report", run, "--to", tmp_path / "page.html")
    assert "${{ x }}" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", ["logs/rank0.log", "verdict.json", "records.node9.jsonl", "memory/rank0.pickle"])
def test_a_report_shows_no_file_from_outside_its_run(
    run: Path, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("[]")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    assert cli.main(["report", str(run), "--to", str(tmp_path / "page.html")]) == 2
    assert f"{name} links to a file outside the run" in capfd.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_check_says_what_differs_from_the_stored_verdict(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "same as the stored verdict" in asked(capfd, "check", run)  # no lab checks here: uses the stored ones
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(
        json.dumps({**info, "lab": "smoke", "config": {"ranks": 1, "cycles": 3, "groups": 1}})
    )
    message = asked(capfd, "check", run)
    assert "differs from the stored verdict:" in message
    assert "memory_drift: FAIL, limit 50.0 MiB; the stored verdict does not have this check" in message
    assert "$a_{: not asked now; stored: FAIL at 1.0, limit 0.0" in message.splitlines()
    kit.load(run).verdict().write(run / "verdict.json")
    assert "same as the stored verdict" in asked(capfd, "check", run)
    rows = json.loads((run / "verdict.json").read_text())
    rows[0] |= {"passed": True, "measured": 0.0}
    (run / "verdict.json").write_text(json.dumps(rows))
    lines = asked(capfd, "check", run).splitlines()
    assert f"{rows[0]['check']}: FAIL, limit 0.0; stored: pass at 0.0, limit 0.0" in lines


def test_the_status_says_failed_also_where_no_new_file_can_be_written(tmp_path: Path) -> None:
    writer = create_run(tmp_path, "smoke", {}, provenance())
    code = f"""
from pathlib import Path
from kit.results.records import read_json, rewrite_json
info = read_json(Path({str(writer.dir / "run.json")!r}))
Path.replace = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
rewrite_json(Path({str(writer.dir / "run.json")!r}), {{**info, "status": "failed", "error": 300 * "x"}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (kit.load(writer.dir).status, kit.load(writer.dir).error) == ("failed", 300 * "x")
    assert sorted(path.name for path in writer.dir.iterdir()) == ["logs", "records.jsonl", "run.json"]
