"""`kit ...` as people and scripts call it: output and exit status."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kit
from kit import machine
from kit.cli import STILL_AT_WORK, main, parse_words, parser
from kit.labs.definition import as_settings
from kit.labs.discover import discover, find, tagged, validate
from kit.public import settings_from_file
from kit.results import Row, Verdict, VerdictRow, create_run
from kit.world import leftovers
from tests.labs.parts import on_an_engine

ROOT = Path(__file__).resolve().parents[1]
SLOW = '''
import os
import time
from kit.labs.smoke.ranks.phases import Plain

class Slow(Plain):
    """Makes the baseline's groups and then takes very long."""
    def __init__(self, ctx):
        self.left = 2
    def make(self, ranks):
        self.left -= 1
        if self.left < 0:
            print("asleep", flush=True)
            time.sleep(100)
        return super().make(ranks)

class Raises(Plain):
    def destroy(self, group):
        raise RuntimeError("my own destroy failed")

class Dies(Plain):
    def destroy(self, group):
        os.kill(os.getpid(), 9)

class Hangs(Plain):
    def destroy(self, group):
        time.sleep(100)
'''


class Cli:
    """The command line with its runs in this test's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.env = {**os.environ, "KIT_RUNS": str(self.runs), "PYTHONPATH": str(ROOT), "COLUMNS": ""}

    def popen(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kit", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def __call__(self, *words: object, status: int = 0) -> tuple[str, str]:
        process = self.popen(*map(str, words))
        out, err = process.communicate(timeout=100)
        assert process.returncode == status, out + err
        return out, err

    def sentence(self, *words: object) -> str:
        """Expect bad input: return its one line on stderr, with status 2 and empty stdout. In this process: nothing may start."""
        out, err, known = io.StringIO(), io.StringIO(), {*sys.modules}
        with (
            mock.patch.dict(os.environ, self.env, clear=True),
            mock.patch.object(sys, "argv", ["kit", *map(str, words)]),
            mock.patch.object(sys, "path", [*sys.path]),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            status = main()
        for name in {*sys.modules} - known:  # a person's modules are those of another folder in the next test
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(self.folder)):
                del sys.modules[name]
        assert (status, out.getvalue(), err.getvalue().count("\n")) == (2, "", 1), err.getvalue()
        return err.getvalue()

    def json(self, *words: object, status: int = 0) -> Any:
        """Expect exactly one JSON value on stdout; return it."""
        out, _ = self(*words, "--json", status=status)
        return json.loads(out)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_help(cli: Cli) -> None:
    out, _ = cli("--help")
    for command in COMMANDS:
        assert f"\n    {command} " in out
    assert "3 the run broke" in out
    cli(status=2)


def commands() -> dict[str, Any]:
    (found,) = [action for action in parser()._actions if isinstance(action.choices, dict)]
    return found.choices


COMMANDS = commands()


LONG = "x" * 5000
MANY = ",".join("1" * 101)
DEEP = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize(
    ("words", "sentence"),
    {
        "empty-out": (["run", "smoke", "--out", ""], "argument --out: '' is not a path"),
        "empty-like": (["run", "smoke", "--like", ""], "argument --like: '' is not a path"),
        "empty-junit": (["check", "--junit", ""], "argument --junit: '' is not a path"),
        "empty-run": (["show", ""], "argument DIR: '' is not a path"),
        "no-user": (["run", "smoke", "--out", "~nosuch/x"], "there is no user 'nosuch' for the path ~nosuch/x"),
        "junit-is-a-folder": (["run", "smoke", "--junit", "."], "cannot write .: it is a folder"),
        "long-run": (["show", LONG], "is too long; a name has at most 255 bytes"),
        "long-lab": (["run", LONG], "unknown lab"),
        "long-setting": (["run", "smoke", "--set", f"{LONG} {LONG}=3"], "has no setting"),
        "deep-setting": (["run", "smoke", "--set", f"cycles={DEEP}"], "are nested too deeply"),
        "deep-parameter": (["notebook", "01", "-p", "cycles", DEEP], "are nested too deeply"),
        "deep-yaml": (["run", "smoke", "--config", "deep.yaml"], "kit: deep.yaml is damaged: its brackets are"),
        "deep-json": (["run", "smoke", "--config", "deep.json"], "kit: deep.json is damaged: its brackets are"),
        "large-config": (["run", "smoke", "--config", "large.json"], "a file of settings has at most 1048576"),
        "pipe": (["run", "smoke", "--config", "pipe.json"], "cannot read pipe.json: it is not a file"),
        "repeats": (["run", "smoke", "--repeat", "99999999999"], "99999999999 runs; at most 10000"),
        "sweeps": (["run", "smoke", "--sweep", f"cycles={MANY}", "--sweep", f"ranks={MANY}"], "10201 runs"),
        "no-time": (["reference", "--plan", "--minutes", "nan"], "--minutes must be above 0"),
        "negative-time": (["reference", "--plan", "--minutes", "-5"], "--minutes must be above 0"),
    }.values(),
)  # fmt: skip
def test_odd_words_are_one_short_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    Path("deep.yaml").write_text(f"a: {DEEP}")
    Path("deep.json").write_text(f'{{"a": {DEEP}}}')
    with Path("large.json").open("w") as file:
        file.truncate(2**20 + 1)
    os.mkfifo("pipe.json")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert (out, err.count("\n")) == ("", 1)
    assert len(err) < 1000
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_examples_that_parse_and_help_for_all(name: str) -> None:
    made = COMMANDS[name]
    assert all(action.help for action in made._actions)
    assert "--json" in made.format_usage()
    examples = re.findall(r"^  kit (.*)$", made.epilog, re.MULTILINE)
    assert examples
    for example in examples:
        assert parse_words(shlex.split(example)).parser.prog == f"kit {name}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("zzz", "there is no command 'zzz'; allowed are: bench, check,"),
        ("rum smoke", "there is no command 'rum'; did you mean 'run'?"),
        ("run smoke --cycles 5", "`kit run` does not accept --cycles; did you mean --set cycles=5?"),
        ("run smoke --timeout-s=5", "`kit run` does not accept --timeout-s=5; did you mean --set timeout_s=5?"),
        ("run smoke --falt x", "did you mean '--fault'?"),
        ("show --jsn", "`kit show` does not accept --jsn; did you mean '--json'?"),
        ("show a b", "`kit show` does not accept b;"),
        ("export", "the following arguments are required: --to (see `kit export --help`)"),
        ("run smoke --repeat x", "argument --repeat: invalid int value: 'x' (see `kit run --help`)"),
        ("bench wordl", "there is no bench 'wordl'; did you mean 'world'?"),
        ("bench world --device gpu", "there is no --device 'gpu'; did you mean 'cpu'? allowed are: auto, cpu, cuda"),
    ],
)
def test_typos_get_a_hint(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err


def test_with_json_bad_input_is_json_too(cli: Cli) -> None:
    assert cli.json("show", "nowhere", status=2).keys() == {"error"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("kit comp", {"compare "}),
        ("kit run smoke --set cy", {"cycles="}),
        ("kit show mine", {"mine "}),
    ],
)
def test_a_shell_completes(cli: Cli, line: str, found: set[str]) -> None:
    (cli.runs / "mine").mkdir(parents=True)
    (cli.runs / "mine" / "run.json").touch()
    to = cli.folder / "completions"
    cli.env |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    cli.env |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(to)}
    subprocess.run([sys.executable, "-m", "kit"], cwd=cli.folder, env=cli.env, check=False, timeout=60)
    assert set(to.read_text().split("\n")) == found


def test_the_settings_of_a_lab(cli: Cli) -> None:
    reported = cli.json("labs", "split")
    rows = {row["name"]: row for row in reported["settings"]}
    assert rows["chunks"]["default"] == [1, 2, 5]
    assert (rows["ranks"]["low"], rows["ranks"]["high"]) == (1, 4096)
    assert rows["level"]["choices"] == ["tokens", "sequences", "both"]
    assert all(row["help"] for row in rows.values())
    lines = cli("labs", "split")[0].splitlines()
    assert re.match(r"timeout_s +120.0 +a number from 0.1 to 86400 s +time limit of a phase", lines[3])
    assert "did you mean 'split'" in cli.sentence("labs", "splt")
    assert [row["lab"] for row in cli.json("labs")] == list(tagged())


def test_labs_and_faults(cli: Cli) -> None:
    listed, _, others = cli("labs")[0].partition("\n\n")
    assert {"box", "bench-world"} <= {*others.partition(": ")[2].strip().split(", ")}
    assert dict(line.split(maxsplit=1) for line in listed.splitlines())["smoke"] == discover().labs["smoke"].summary
    out, _ = cli("faults", "--json")
    rows = json.loads(out)
    assert all(set(row) == {"lab", "name", "breaks", "check", "exit", "set", "devices", "bugs"} for row in rows)
    assert {row["name"] for row in rows} >= {"leaked-group", "wrong-sum"}
    assert "groups_return_to_baseline" in cli("faults")[0]
    of_one, _ = cli("faults", "smoke", "--json")
    assert [one["lab"] for one in json.loads(of_one)] == ["smoke"] * 2
    assert "unknown lab 'smok'" in cli.sentence("faults", "smok")


@pytest.mark.slow
def test_a_run_and_what_is_made_of_it(cli: Cli, tmp_path: Path) -> None:
    message = cli.json("run", "smoke", "--set", "cycles=2", "--out", tmp_path / "one")
    assert (message["run"], message["status"], message["exit"], message["error"]) == (
        str(tmp_path / "one"),
        "finished",
        0,
        None,
    )
    assert message["verdict"] == json.loads((tmp_path / "one" / "verdict.json").read_text())
    more = ("--set", "groups=1", "--set", "memory_snapshot=true")
    more = (*more, "--junit", tmp_path / "junit" / "two.xml")
    out, err = cli("run", "smoke", "--like", tmp_path / "one", *more, "--out", tmp_path / "two")
    assert "0 failed" in out
    assert "\nmemory snapshots: " in out  # or the reason why there are none
    assert err == f"JUnit: {tmp_path}/junit/two.xml\n"  # no terminal: no progress
    assert 'failures="0"' in (tmp_path / "junit" / "two.xml").read_text()
    assert json.loads((tmp_path / "two" / "run.json").read_text())["config"]["cycles"] == 2
    shown = cli.json("show", tmp_path / "two")
    assert (shown["id"], shown["config"]["groups"], shown["times"][0]["phase"]) == (shown["id"], 1, "baseline")
    out, _ = cli("show", tmp_path / "one")
    assert "cycles=2" in out
    assert "pass  groups_return_to_baseline" in out
    assert re.search(r"phase +n +median +min +max\nbaseline +\d+ +[\d.]+ (s|ms|µs) ", out)
    assert "pass  groups_return_to_baseline" in cli("check", tmp_path / "one")[0]
    assert "pass  groups_return_to_baseline" in cli("check", tmp_path / "one", "--lab", "smoke")[0]
    assert "nothing was measured, so nothing passed" in cli("check", tmp_path / "one", "--lab", "split", status=1)[0]
    out, _ = cli("compare", tmp_path / "one", tmp_path / "two")
    assert "warning: these runs differ in size (groups)" in out
    assert "_before" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert cli.json("compare", tmp_path / "one", tmp_path / "two")["runs"][0]["changed"][0]["found_in"] == "both"
    for table, name in (
        ("verdict", "v.tex"),
        ("times", "t.md"),
        ("memory", "m.csv"),
        ("compare", "c.json"),
        ("compare", "c.md"),
    ):
        cli("export", tmp_path / "one", tmp_path / "two", "--table", table, "--to", tmp_path / "tables" / name)
    ids = [json.loads((tmp_path / name / "run.json").read_text())["run"] for name in ("one", "two")]
    assert all(one in (tmp_path / "tables" / "v.tex").read_text() for one in ids)
    assert "| phase" in (tmp_path / "tables" / "c.md").read_text()
    assert {row["metric"] for row in json.loads((tmp_path / "tables" / "c.json").read_text())} >= {"seconds", "groups"}
    assert "did you mean 'verdict'" in cli.sentence("export", tmp_path / "one", "--table", "verdikt", "--to", "x.md")
    assert "two runs or more, not 1" in cli.sentence("export", tmp_path / "one", "--table", "compare", "--to", "x.md")
    out, _ = cli("export", tmp_path / "one", "--to", tmp_path / "table.csv")
    assert Path(out.strip()).read_text().startswith("run,lab,cycle,phase,rank,metric,value,unit,time,text,ids,start\n")
    refused = cli.sentence("export", tmp_path / "one", "--to", tmp_path / "table.xls")
    assert "no known ending; allowed are .csv, .parquet, .json, .md, .tex, .html, .yaml, .yml\n" in refused
    cli("trace", tmp_path / "one", "--to", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    out, _ = cli("report", tmp_path / "two", tmp_path / "one", "--to", tmp_path / "report.html")
    page = Path(out.strip()).read_text()
    assert all(json.loads((tmp_path / name / "run.json").read_text())["run"] in page for name in ("one", "two"))
    assert "must end in .html" in cli.sentence("report", tmp_path / "one", "--to", tmp_path / "report.pdf")
    assert "there is no run folder" in cli.sentence("report", tmp_path / "three", "--to", tmp_path / "report.html")


@pytest.mark.slow
def test_a_sweep_with_repeats_is_one_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    (tmp_path / "run.yaml").write_text("cycles: 9\nranks: 1\n")
    words = ("--config", "run.yaml", "--set", "cycles=1", "--sweep", "groups=1,2", "--repeat", 2, "--junit", "all.xml")
    message = cli.json("run", "smoke", *words)
    folder = Path(message["sweep"])
    assert folder.parent == cli.runs
    assert [(row["set"], row["repeat"]) for row in message["runs"]] == [
        ({"groups": 1}, 1), ({"groups": 2}, 1), ({"groups": 1}, 2), ({"groups": 2}, 2),
    ]  # fmt: skip
    assert {row["count"] for row in message["spread"]} == {2}
    assert (tmp_path / "all.xml").read_text().count("<testsuite ") == 4
    listed = cli.json("runs")
    assert [Path(row["run"]).name for row in listed] == ["04", "03", "02", "01"]  # newest first
    assert listed[1]["set"] == {"ranks": 1, "cycles": 1, "groups": 1}
    assert (
        "groups=1 " in cli("runs", folder)[0]
    )  # cut to the terminal's width, what differs among these runs comes first
    assert cli.json("show")["id"] == listed[0]["id"]
    assert cli.json("show", listed[2]["id"])["run"] == str(folder / "02")
    assert len(cli.json("compare", folder)["runs"]) == 3
    assert "holds the runs of a sweep" in cli.sentence("show", folder)


@pytest.mark.slow
def test_a_notebook_without_a_browser(cli: Cli, tmp_path: Path) -> None:
    reported = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    more = {"cell_type": "code", "execution_count": None, "outputs": []}
    cells = [
        {**more, "id": "given", "source": "n = 1", "metadata": {"tags": ["parameters"]}},
        {**more, "id": "work", "source": "print('n is', 10 // n)", "metadata": {}},
    ]
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({**reported, "cells": cells}))
    out, err = cli("notebook", path, "-p", "n", "5")
    made = Path(out.strip())
    assert made.parent == cli.runs / "notebooks"
    assert "n is 2" in made.read_text()
    assert err == ""  # no terminal: no progress
    assert "mine.ipynb has no parameter 'm'; allowed are: n" in cli.sentence("notebook", path, "-p", "m", "5")
    assert "'9' does not name one notebook" in cli.sentence("notebook", "9")
    _, err = cli("notebook", path, "-p", "n", "0", "--to", tmp_path / "broken.html", status=3)
    assert "failed in code cell 3 of 3 (print('n is', 10 // n)): ZeroDivisionError" in err
    assert "ZeroDivisionError" in (tmp_path / "broken.html").read_text()


# The labs' own tests run every fault that ends with 1; those of smoke show here how the command ends.
JUDGED_THERE = ("box", "offload", "share", "split", "stream", "sync")
DRAWN = [pytest.mark.slow, pytest.mark.drawn(1, of="faults")]
FAULTS = [
    pytest.param(
        lab.name,
        fault,
        id=f"{lab.name}-{fault.name}",
        marks=() if fault.name == "wrong-sum" else [*DRAWN, on_an_engine(fault.set)],
    )
    for lab in discover().labs.values()
    for fault in lab.faults
    if lab.name not in JUDGED_THERE or fault.exit != 1 or "cpu" not in fault.devices
]


@pytest.mark.parametrize(("lab", "fault"), FAULTS)
def test_every_fault_ends_as_its_entry_says(cli: Cli, lab: str, fault: Any) -> None:
    if "cpu" not in fault.devices:
        assert "needs" in cli.sentence("run", lab, "--fault", fault.name, "--set", "device=cpu")
        return
    message = cli.json("run", lab, "--fault", fault.name, status=fault.exit)
    assert json.loads((Path(message["run"]) / "run.json").read_text())["fault"] == fault.name
    if fault.exit == 1:
        assert {row["check"]: row["passed"] for row in message["verdict"]}[fault.caught_by] is False


@pytest.mark.slow
def test_tolerances_from_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "limits.json").write_text('{"groups_return_to_baseline": -1}')
    words = ("run", "smoke", "--set", "cycles=1", "--tolerances", tmp_path / "limits.json", "--out", tmp_path / "run")
    message = cli.json(*words, status=1)
    assert [row["check"] for row in message["verdict"] if row["passed"] is False] == ["groups_return_to_baseline"]
    assert "FAIL  groups_return_to_baseline" in cli("show", tmp_path / "run")[0]


def test_bad_input_is_one_sentence(cli: Cli, tmp_path: Path) -> None:
    assert "did you mean 'smoke'" in cli.sentence("run", "smok")
    assert "ranks must be a whole number" in cli.sentence("run", "smoke", "--set", "ranks=two")
    assert "no setting 'cycels'" in cli.sentence("run", "smoke", "--set", "cycels=1")
    assert "KEY=VALUE" in cli.sentence("run", "smoke", "--set", "cycles")
    assert "ranks is given twice, as '2' and '4'" in cli.sentence(
        "run", "smoke", "--set", "ranks=2", "--set", "ranks=4"
    )
    assert "one fault at a time, not leaked-group and wrong-sum" in cli.sentence(
        "run", "smoke", "--fault", "leaked-group", "--fault", "wrong-sum"
    )
    assert "--set and --sweep both give ranks" in cli.sentence(
        "run", "smoke", "--set", "ranks=2", "--sweep", "ranks=1,2"
    )
    assert "ranks=0 #1: ranks must be" in cli.sentence("run", "smoke", "--sweep", "ranks=1,0")
    assert "--sweep cycles= gives no value; separate" in cli.sentence("run", "smoke", "--sweep", "cycles=")
    assert "--repeat must be at least 1" in cli.sentence("run", "smoke", "--repeat", "0")
    assert "no fault 'x'" in cli.sentence("run", "smoke", "--fault", "x")
    assert "there is no run folder" in cli.sentence("show", tmp_path / "nowhere")
    assert "there is no run in" in cli.sentence("check")
    assert "there is no run folder" in cli.sentence("check", tmp_path / "nowhere")
    assert "there is no run in" in cli.sentence("show")
    assert cli("runs")[0] == f"there is no run in {cli.runs}\n"
    assert "there is no bench 'x'" in cli.sentence("bench", "x")
    assert "there is no file" in cli.sentence("run", "smoke", "--tolerances", tmp_path / "no.json")
    (tmp_path / "file").touch()
    assert "cannot make a run folder" in cli.sentence("run", "smoke", "--out", tmp_path / "file" / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for words in (["run", "smoke"], ["run", "smoke", "--sweep", "cycles=1,2"], ["bench", "view"]):
        assert "mine is not empty" in cli.sentence(*words, "--out", tmp_path / "mine")
    assert not cli.runs.exists()


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_bad_input(cli: Cli, tmp_path: Path) -> None:
    cli("run", "smoke", "--set", "cycles=1", "--out", tmp_path / "run")
    (tmp_path / "table.csv").mkdir()
    for word, file in (("export", "table.csv"), ("trace", "table.csv")):
        assert f"cannot write {tmp_path / file}" in cli.sentence(word, tmp_path / "run", "--to", tmp_path / file)
    cli("trace", tmp_path / "run", "--to", tmp_path / "made" / "here" / "trace.json")


def test_the_version_is_the_packages(cli: Cli) -> None:
    assert cli("--version")[0] == f"kit {kit.__version__}\n"


def test_a_fault_of_the_kit_itself_is_no_failed_check(cli: Cli, tmp_path: Path) -> None:
    """Python exits with 1 after an exception, but 1 means that a check failed."""
    (tmp_path / "kit_doctor_breaks.py").write_text("import kit.doctor\nkit.doctor.examine = lambda: {}['gone']\n")
    code = "import kit_doctor_breaks, kit.cli, sys; sys.exit(kit.cli.main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=cli.env, capture_output=True, text=True)
    assert done.returncode == 3
    assert "KeyError: 'gone'" in done.stderr


SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["kit"].split(":")
INTERRUPTED = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == "kit.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
"""


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "kit", "labs"],
        ["-c", f"import sys; from {SCRIPT[0]} import {SCRIPT[1]} as script; sys.exit(script())"],
    ],
    ids=["module", "console script"],
)
def test_a_ctrl_c_while_modules_load_ends_with_one_line(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT)]))
    done = subprocess.run(
        [sys.executable, *command], env={**cli.env, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kit: interrupted\n")


def test_a_comparison_leads_with_verdicts_and_reads_runs_without_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(name: str, passed: bool, seconds: float) -> Path:
        writer = create_run(tmp_path, "mine", {"ranks": 2}, {}, out=tmp_path / name)
        where = {"run": writer.id, "lab": "mine", "phase": "train", "rank": 0, "time": 1.0, "unit": "s"}
        ids = {"ids": {"tensor": "decoder.layers.0.self_attention.linear_qkv.weight" * 3}}
        names = ("seconds", "seconds_before", "overhead_seconds")
        rows = [Row(**where, cycle=cycle, metric=name, value=seconds) for name in names for cycle in (1, 2)]
        writer.append([*rows, *(Row(**where, cycle=cycle, metric="norm", value=seconds, **ids) for cycle in (1, 2))])
        writer.write_verdict(Verdict([VerdictRow("memory_comes_back", 1, 1, "B", passed, "because " * 30)]))
        writer.finish()
        return writer.dir

    one, two, bare = make("one", True, 1.0), make("two", False, 3.0), make("bare", True, 1.0)
    (bare / "records.jsonl").unlink()
    assert main(["compare", str(one), str(two), str(bare)]) == 0
    out, _ = capsys.readouterr()
    lines = out.splitlines()
    verdict = lines.index(next(line for line in lines if line.startswith("pass -> FAIL  memory_comes_back  because")))
    numbers = lines.index("2 numbers changed by more than the spread, largest against it first")
    assert verdict < numbers
    assert re.match(r"train +seconds +0 +1 s +3 s +3 +2$", lines[numbers + 3])
    assert not re.search("_before|overhead", out)
    assert max(map(len, lines)) <= 100
    assert "there are no records" in out
    assert "no check changed\n0 numbers changed by more than the spread" in out
    (worlds := tmp_path / "worlds").mkdir()  # a World's folder, beside the runs
    assert main(["compare", *map(str, (one, worlds, two))]) == 0
    said = capsys.readouterr()
    assert f"kit: {worlds} is left out: it is not a run" in said.err
    assert "1 check changed" in said.out
    assert main(["compare", str(worlds), str(worlds)]) == 2
    assert "is not a run" in capsys.readouterr().err


@pytest.mark.slow
def test_own_code_in_few_cycles_is_said_and_strict_fails_on_it(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW + "\n\nclass Right(Plain): ...\n")
    said = (
        "too few cycles to see leaks and drift of implementation=mine:Right: memory_slope (needs at least 4 cycles), "
    )
    run = ("run", "smoke", "--set", "implementation=mine:Right", "--set")
    out, _ = cli(*run, "cycles=2")
    assert out.splitlines()[-1].startswith(said)
    out, _ = cli("check")
    assert out.splitlines()[-1].startswith(said)
    counted = "not measured, which --strict counts as failed: memory_slope, nothing_piles_up"
    out, _ = cli("check", "--strict", status=1)
    assert out.splitlines()[-1] == counted
    out, _ = cli(*run, "cycles=2", "--strict", status=1)
    assert out.splitlines()[-1] == counted
    out, _ = cli(*run, "cycles=6", "--strict")
    assert out.splitlines()[-1].startswith("the run is in ")
    out, _ = cli("run", "smoke", "--set", "cycles=2")  # the kit's own code has its tests
    assert out.splitlines()[-1].startswith("the run is in ")


@pytest.mark.slow
def test_comparing_runs_of_different_labs_says_so(cli: Cli, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for number, folder in enumerate(folders, start=1):
        cli("run", "smoke", "--set", f"cycles={number}", "--out", folder)
    out, _ = cli("compare", *folders)
    assert out.splitlines()[1] == "cycles: 1 / 2"
    assert "warning:" not in out
    assert "0 of 2 digests differ; 2 more are in one run only" in out
    info = json.loads((folders[1] / "run.json").read_text())
    (folders[1] / "run.json").write_text(json.dumps({**info, "lab": "mine"}))
    out, _ = cli("compare", *folders)
    assert "warning: these are runs of different labs: smoke, mine" in out
    assert "digests" not in out


@pytest.mark.slow
@pytest.mark.parametrize("code", ["Dies", "Hangs"])
def test_a_run_that_breaks_gives_no_advice_about_its_world(cli: Cli, tmp_path: Path, code: str) -> None:
    """There is `restart()` for a World in Python only."""
    (tmp_path / "mine.py").write_text(SLOW)
    words = ("run", "smoke", "--set", f"implementation=mine:{code}", "--set", "timeout_s=3", "--out", tmp_path / "run")
    out, err = cli(*words, status=3)
    assert "phase 'baseline'" in err
    shown = out + err + cli("show", tmp_path / "run")[0] + (tmp_path / "run" / "logs" / "error.txt").read_text()
    assert "restart()" not in shown
    assert "keep running" not in shown


@pytest.mark.slow
def test_a_run_that_breaks(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    message = cli.json("run", "smoke", "--set", "implementation=mine:Raises", status=3)
    assert message["status"] == "failed"
    assert {row["check"]: row["passed"] for row in message["verdict"]}["groups_return_to_baseline"] is None
    assert message["verdict"] == json.loads((Path(message["run"]) / "verdict.json").read_text())
    assert "my own destroy failed" in message["error"]
    out, _ = cli("show", message["run"])
    assert "note: the run failed: RankError" in out
    assert "0 failed, " in out
    again, _ = cli("check", status=3)  # the newest run is the broken one
    assert "note: the run failed: RankError" in again
    # Alone, or among checks with the same reason.
    (line,) = [line for line in again.splitlines() if "groups_return_to_baseline" in line]
    assert line.startswith("- ")
    assert "not measured: nothing was recorded in phase 'count'" in line
    cli("export", message["run"], "--to", tmp_path / "partial.csv")


def test_the_script_finds_code_of_this_side_in_the_working_folder(cli: Cli) -> None:
    """`python -m kit` always did; the folder of the script `kit` is another one."""
    (cli.folder / "own_planner.py").write_text("")
    words = ["run", "share", "--set", "simulated=true", "--set", "planner=own_planner:nothing_of_this_name"]
    script = Path(sys.executable).with_name("kit")
    done = subprocess.run([script, *words], cwd=cli.folder, env=cli.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "has no attribute 'nothing_of_this_name'" in done.stderr


def start_slow(cli: Cli) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """Start a run whose ranks sleep in a phase; return it, its folder and its processes."""
    (cli.folder / "mine.py").write_text(SLOW)
    process = cli.popen("run", "smoke", "--set", "implementation=mine:Slow", "--out", str(cli.folder / "slow"))
    assert process.stdout is not None
    for line in process.stdout:
        if "asleep" in line:
            break
    ranks = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and of(process.pid, int(p.name))]
    assert len(ranks) >= 3
    return process, cli.folder / "slow", ranks


def of(owner: int, pid: int) -> bool:
    return f":{owner}:" in (machine.marked(pid) or "")


def test_ctrl_c_ends_the_ranks(cli: Cli) -> None:
    process, folder, started = start_slow(cli)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped" in err
    assert not [pid for pid in started if machine.stat_fields(pid) and of(process.pid, pid)]
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_a_killed_run_still_loads(cli: Cli, tmp_path: Path) -> None:
    process, folder, _ = start_slow(cli)
    process.kill()
    process.communicate(timeout=60)
    out, _ = cli("show", folder)
    assert "interrupted (partial)" in out
    assert "note: the run was interrupted: the process that wrote it is gone" in out
    cli("export", folder, "--to", tmp_path / "partial.parquet")


@pytest.mark.slow
def test_doctor(cli: Cli) -> None:
    out, _ = cli("doctor")
    assert "Labs can run here." in out
    found = json.loads(cli("doctor", "--json")[0])
    assert found["problems"] == []
    assert [one["path"] for one in found["interpreters"] if one["chosen"]] == [found["ranks"]["path"]]
    assert found["ranks"]["torch"]
    assert found["ranks"]["device_why"]
    assert found["runs"] == {**found["runs"], "path": str(cli.runs), "writable": True}
    assert found["shm"]["total"]
    assert isinstance(found["leftovers"], list)


def test_doctor_says_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cli.env |= {"KIT_PYTHON": "/nowhere/python", "KIT_RUNS": str(tmp_path / "file" / "runs")}
    out, _ = cli("doctor", status=1)
    assert "- KIT_PYTHON names /nowhere/python" in out
    assert "set KIT_RUNS to another folder" in out


@pytest.mark.slow
def test_clean_ends_what_a_dead_notebook_left(cli: Cli) -> None:
    """`kit clean` ends only processes with the mark of a dead notebook; unrelated processes stay."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    mark = f"abc123@{machine.namespace()}:{gone.pid}:1"
    left = subprocess.Popen(["sleep", "300"], env={**os.environ, machine.MARK: mark}, start_new_session=True)
    other = subprocess.Popen(["sleep", "300"])
    (leftovers.base() / mark).mkdir()
    (leftovers.base() / mark / leftovers.SESSION).write_text(str(left.pid))
    try:
        assert f"pid {left.pid}, started 20" in cli("doctor")[0]
        assert "use --yes" in cli("clean", status=2)[1]
        cleaned = cli("clean", "--yes")[0]
        assert f"pid {left.pid}, started 20" in cleaned
        assert "ended 1 processes, removed 1 folders" in cleaned
        assert left.wait(timeout=10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_a_reader_that_stops_reading(cli: Cli) -> None:
    process = cli.popen("faults", "--json")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_a_run_that_lost_rows_fails_its_check(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = create_run(tmp_path, "unknown", {}, {}, out=tmp_path / "run")
    place = {"run": writer.id, "lab": writer.lab, "phase": "p", "unit": "s", "time": 1.8e9}
    writer.append([Row(metric="seconds", value=1.0, cycle=cycle, **place) for cycle in range(3)])
    writer.write_verdict(Verdict([VerdictRow(check="x", measured=0, limit=1, unit="", passed=True, why="")]))
    writer.finish()
    assert main(["check", str(writer.dir)]) == 0
    assert "note:" not in capsys.readouterr().out
    lines = (writer.dir / "records.jsonl").read_text().splitlines(keepends=True)
    (writer.dir / "records.jsonl").write_text("".join(lines[1:]))
    for command, status in (("check", 1), ("show", 0)):
        assert main([command, str(writer.dir)]) == status
        assert "note: records.jsonl: 1 row of 3 is missing" in capsys.readouterr().out


def test_a_run_whose_verdict_is_damaged_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = create_run(tmp_path, "smoke", {}, {}, out=tmp_path / "run")
    writer.append([Row(metric="seconds", value=1.0, run=writer.id, lab=writer.lab, phase="p", unit="s", time=1.8e9)])
    writer.write_verdict(Verdict([VerdictRow(check="x", measured=0, limit=1, unit="", passed=True, why="")]))
    writer.finish()
    (writer.dir / "verdict.json").write_text("[{")
    assert main(["check", str(writer.dir)]) == 1
    assert "note: the stored verdict is damaged: `kit check` judges the records again" in capsys.readouterr().out


def test_a_command_that_takes_long_says_so(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.cli.FIRST_LINE_S", 0.01)
    monkeypatch.setattr("kit.cli.LINE_S", 0.01)
    printed = ""
    with STILL_AT_WORK.shown("report"):
        STILL_AT_WORK.note("1 of 2 runs are drawn")
        while "drawn" not in printed:
            printed += capfd.readouterr().err
    assert re.search(r"^kit: report has worked for \d+ s: 1 of 2 runs are drawn$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("lab", "given"), [("offload", {"cycles": 2, "size": "tiny"}), ("share", {"a.steps": 2, "devices": 4})]
)
def test_the_settings_of_a_run_are_a_file_for_another_run(lab: str, given: dict[str, Any], tmp_path: Path) -> None:
    config = validate(find(lab), given)
    writer = create_run(tmp_path, lab, as_settings(config), {}, out=tmp_path / "run")
    writer.finish()
    assert main(["export", str(writer.dir), "--to", str(tmp_path / "settings.yaml")]) == 0
    assert validate(find(lab), settings_from_file(tmp_path / "settings.yaml")) == config
    assert main(["export", str(writer.dir), str(writer.dir), "--to", str(tmp_path / "two.yaml")]) == 2


@pytest.mark.slow
def test_ctrl_c_during_an_exploration_is_one_line(cli: Cli) -> None:
    """Of a terminal: it is sent to the workers too."""
    command = [sys.executable, "-m", "kit", "explore", "share", "--seeds", "100000", "--jobs", "3"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=cli.folder, env=cli.env, text=True, stdout=pipe, stderr=pipe, start_new_session=True
    )
    time.sleep(4)
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "kit: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no worker is left


def test_a_fault_that_settings_leave_out_is_named(cli: Cli, tmp_path: Path) -> None:
    config = as_settings(find("smoke").config())
    ids = {}
    for name, fault in (("plain", None), ("broken", "leaked-group")):
        writer = create_run(tmp_path, "smoke", config, {}, out=tmp_path / name, fault=fault)
        writer.finish()
        ids[name] = writer.id
    _, err = cli("export", tmp_path / "broken", "--to", tmp_path / "broken.yaml")
    assert err == f"kit: broken.yaml has the settings only; {ids['broken']} ran with --fault leaked-group\n"
    head = (tmp_path / "broken.yaml").read_text().partition("\n")[0]
    assert head == f"# settings of {ids['broken']}, which ran with --fault leaked-group"
    _, err = cli("export", tmp_path / "plain", "--to", tmp_path / "plain.yaml")
    assert (err, "fault" in (tmp_path / "plain.yaml").read_text()) == ("", False)
    again = ("run", "smoke", "--set", "cycles=0", "--like")
    like = f"kit: --like takes no fault; {ids['broken']} ran with --fault leaked-group\n"
    assert cli(*again, tmp_path / "broken", status=2)[1].startswith(like)
    assert "--like" not in cli(*again, tmp_path / "plain", status=2)[1]
    assert "--like" not in cli(*again, tmp_path / "broken", "--fault", "leaked-group", status=2)[1]
