"""How fast the kit and other tools that keep ranks alive start, step and report a death, in one run: `make peers BOX=mybox`.

Two ranks on the CPU over gloo, even if there is a GPU. Every tool is measured in the same way, the kit too, each trial in a fresh process.
A sample counts only if the all-reduce was correct. Every process that a trial starts inherits a mark, by which it is found and ended after
the trial. A tool that is not installed has a row with the reason: `pip install -c constraints.txt -e .[peers]` installs all of them.

It writes `bench-peers.json` and `bench-peers.txt`, which `kit.results.comparison.recorded("bench-peers")` shows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kit import machine
from kit.errors import KitError
from kit.results.comparison import Recorded
from kit.results.comparison import machine as machine_line
from kit.results.records import make_folder, write_json, write_text
from kit.results.units import columns
from kit.world import World, leftovers
from tests.peers.tools import PREFIX, TOOLS

STARTED = "two ranks to the first all-reduce done, cold"
STEPPED = "one empty step on both ranks"
TOLD = "SIGKILL of a rank to the exception"
VANISHED = "SIGKILL of the notebook's process to nothing left"
TRIAL_S = 120.0
GONE_S = 5.0
ROOT = Path(__file__).resolve().parents[2]
NAME = "bench-peers"
Row = dict[str, Any]  # with the keys of a bench's rows in data/reference
Seconds = dict[str, list[float]]  # by row


def measure(tools: Mapping[str, Any], *, trials: int, steps: int) -> Iterator[Row]:
    """Rows of every tool; a row with the reason if one is not installed or a trial broke."""
    for name, tool in tools.items():
        try:
            version = importlib.metadata.version(tool.needs)
        except importlib.metadata.PackageNotFoundError:
            yield row(STARTED, name, [], note=f"not measured: {tool.needs} is not installed")
            continue
        seconds: Seconds = {what: [] for what in (STARTED, STEPPED, TOLD, VANISHED)}
        notes: dict[str, str] = {}
        try:
            for number in range(trials):
                # A trial to the exception, with steps in the first one; then a trial that is killed.
                with trial(name, seconds, steps=0 if number else steps, hold=False) as (process, _):
                    answer = hear(process)
                    seconds[TOLD].append(answer["death"])
                    notes[TOLD] = answer["words"]
                kill_trial(name, seconds, notes)
        except KitError as error:
            notes[STARTED] = str(error)
        if seconds[STEPPED]:
            notes[STEPPED] = tool.is_a_step
        for what, taken in seconds.items():
            if taken or notes.get(what):
                yield row(what, f"{name} {version}", taken, note=notes.get(what, ""))


def row(what: str, who: str, seconds: Sequence[float], note: str = "") -> Row:
    scale, unit = (1e3, "ms") if what == STEPPED else (1.0, "s")
    values = [scale * value for value in seconds]
    spread = [statistics.median(values), min(values), max(values)] if values else [None] * 3
    return {
        "what": what,
        "who": who,
        "unit": unit,
        **dict(zip(("median", "low", "high"), spread, strict=True)),
        "n": len(values),
        "limit": None,
        "aim": None,
        "ceiling": None,
        "note": note,
        "ids": {},
        "met": None,
    }


def kill_trial(name: str, seconds: Seconds, notes: dict[str, str]) -> None:
    """SIGKILL a trial's process; seconds until every process that it started is gone."""
    with trial(name, seconds, steps=0, hold=True) as (process, started_by_trial):
        known = leftovers.carriers(started_by_trial)
        began = time.perf_counter()
        process.kill()
        took = seconds_until_gone(started_by_trial, known, began, GONE_S)
        if took is None:
            left = len(leftovers.carriers(started_by_trial))
            notes[VANISHED] = f"{left} of {len(known) - 1} processes are still alive after {GONE_S:.0f} s"
        else:
            seconds[VANISHED].append(took)


@contextlib.contextmanager
def trial(
    name: str, seconds: Seconds, *, steps: int, hold: bool
) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], bool]]]:
    """A process that runs one trial, after its start and steps, and the test that recognises its processes. All are ended afterwards."""
    mark = leftovers.mark(f"peer-{name}")
    with tempfile.TemporaryDirectory(prefix="kit-peers-") as scratch, (Path(scratch) / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.tools", name, json.dumps({"steps": steps, "hold": hold})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=scratch,
            env=of_trial(mark, scratch),
        )
        started_by_trial = marked_by(mark, process.pid)
        limit = threading.Timer(TRIAL_S, leftovers.end_carriers, [started_by_trial])
        limit.start()  # ends the trial, so the reader sees the end of its output
        try:
            started = hear(process)
            seconds[STARTED].append(started["start"])
            seconds[STEPPED] += started["steps"]
            yield process, started_by_trial
        except EOFError:
            raise KitError(f"a trial broke: {last_line(errors)}") from None
        finally:
            limit.cancel()
            leftovers.end_carriers(started_by_trial)
            process.communicate()


def marked_by(mark: str, pid: int) -> Callable[[str], bool]:
    """Whether a process belongs to a trial: it inherited the trial's mark, or a World of the trial's process gave it another one."""
    return lambda value: value == mark or value.split(":")[1:2] == [str(pid)]


def hear(process: subprocess.Popen[str]) -> Any:
    """The next report of the trial; output of its library is skipped."""
    for line in process.stdout:
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    raise EOFError


def last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    return lines[-1][:200] if lines else f"it printed nothing within {TRIAL_S:.0f} s"


def of_trial(mark: str, scratch: str) -> dict[str, str]:
    """The environment of a trial: CPU only; this checkout and this Python are found first; temporary files are removed with the trial."""
    return {
        **os.environ,
        machine.MARK: mark,
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(Path(scratch) / "ipython"),
        "TMPDIR": scratch,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
    }


def seconds_until_gone(fits: Callable[[str], bool], known: list[int], since: float, at_most: float) -> float | None:
    """Seconds from `since` until no process has the mark; None if that took longer than `at_most`. /proc is searched only when none of
    the `known` processes is left."""
    while (now := time.perf_counter()) - since < at_most:
        if all(machine.marked(pid) is None for pid in known) and not leftovers.carriers(fits):
            return now - since
        time.sleep(0.001)
    return None


def write_tables(folder: Path, command: str, rows: list[Row]) -> str:
    """Write the rows and their provenance as a bench's files in data/reference; returns the text."""
    with World(1, device="cpu") as world:
        provenance = world.call("kit.measure:provenance")[0]
    head, cells = Recorded(folder.name, provenance, rows).table
    notes = [f"{one['who']}, {one['what']}: {one['note']}" for one in rows if one["note"]]
    text = "\n".join([columns([head, *cells]), "", *notes, "", machine_line(provenance)])
    make_folder(folder)
    write_json(folder / f"{NAME}.json", {"bench": "peers", "command": command, "rows": rows, "provenance": provenance})
    write_text(folder / f"{NAME}.txt", text + "\n")
    return text


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of this machine under data/reference")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    rows = []
    for measured in measure(TOOLS, trials=options.trials, steps=options.steps):
        rows.append(measured)
        print(f"{measured['who']}: {measured['what']}", file=sys.stderr)
    print(write_tables(options.out, f"make peers BOX={options.out.name}", rows))


if __name__ == "__main__":
    main(sys.argv[1:])
