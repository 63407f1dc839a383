"""Run the tests in two processes at once, and report the time of each file.

    python -m tests.lanes -m "not slow and not browser"

The first process runs most tests that start ranks; the second runs all others, the browser, and some labs. Each counts only the processes,
files and shared memory that it made itself. `pytest` alone runs everything in one process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Fixtures that start ranks, and those that check what ranks leave behind.
FIXTURES = {"nothing_left", "world", "worlds", "launch", "offload", "split", "sync", "client", "finished"}
FILES = (
    "tests/bench/",
    "tests/browser/",
    "tests/docs/test_gallery.py",
    "tests/docs/test_pages.py",
    "tests/examples/",
    "tests/faults/",
    "tests/labs/box/test_run.py",
    "tests/labs/offload/test_faults.py",
    "tests/labs/offload/test_run.py",
    "tests/labs/share/test_gates.py",
    "tests/labs/share/test_own.py",
    "tests/labs/share/test_rank_faults.py",
    "tests/labs/share/test_run.py",
    "tests/labs/split/test_faults.py",
    "tests/labs/stream/test_engines.py",
    "tests/labs/stream/test_faults.py",
    "tests/labs/stream/test_given_up.py",
    "tests/labs/stream/test_own.py",
    "tests/labs/stream/test_run.py",
    "tests/labs/sync/test_faults.py",
    "tests/labs/sync/test_own.py",
    "tests/labs/sync/test_own_sync.py",
    "tests/labs/sync/test_watch.py",
    "tests/labs/test_bystander.py",
    "tests/labs/test_lab.py",
    "tests/labs/test_routing.py",
    "tests/labs/test_smoke.py",
    "tests/measure/test_recorder.py",
    "tests/peers/",
    "tests/sync/test_transports_on_ranks.py",
    "tests/test_cli.py",
    "tests/test_notebooks.py",
    "tests/test_on_gpu.py",
    "tests/test_public.py",
    "tests/test_routing.py",
    "tests/test_starters.py",
    "tests/test_ways.py",
    "tests/test_wheel.py",
    "tests/view/panel/",
    "tests/view/test_worlds.py",
    "tests/world/",
)
# Tests with ranks in these run in the second process, which would otherwise finish long before the first. So do those that make network
# interfaces (second hosts), one after the other with the browser: it gives up requests when a machine's interfaces change.
BESIDE = (
    "tests/bench/test_runs.py",
    "tests/browser/",
    "tests/docs/",
    "tests/examples/",
    "tests/faults/test_nodes.py",
    "tests/faults/test_ray.py",
    "tests/labs/offload/test_own_code.py",
    "tests/labs/share/",
    "tests/labs/stream/",
    "tests/labs/sync/test_own.py",
    "tests/test_notebooks.py",
    "tests/test_ways.py",
    "tests/view/panel/",
)
# Of the slow tests of a file in these, which are many variants of one thing, a run takes one in SPARSE (see `draw` in conftest.py).
SPARSE = 10
SAMPLED = (
    "tests/bench/",
    "tests/examples/",
    "tests/faults/test_nodes.py",
    "tests/labs/",
    "tests/megatron/",
    "tests/share/",
    "tests/stream/",
    "tests/test_cli.py",
    "tests/test_exploration.py",
    "tests/test_folders.py",
    "tests/view/panel/",
)


def day_of_commit() -> str:
    """What samples are drawn by: the mend of a failure is tested with the sample that found it."""
    command = ["git", "log", "-1", "--format=%cs"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() or "no commit"


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def mark(items: Sequence[pytest.Item]) -> None:
    for item in items:
        file = file_of(item)
        if file.startswith(FILES) or not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)
            if file.startswith(BESIDE):
                item.add_marker(pytest.mark.beside)


def main(arguments: Sequence[str]) -> int:
    """Return the worse exit status of the two processes; the second one's output is shown when both have ended."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-m", dest="marks", required=True)
    asked, others = parser.parse_known_args(arguments)
    made = tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True)
    with made as folder, (Path(folder) / "log").open("w+", errors="replace") as log:
        # The second process has its own folder for temporary files, since tests count its content.
        command = [sys.executable, "-m", "pytest", *others, "-m"]
        ranks = subprocess.Popen([*command, f"({asked.marks}) and ranks and not beside"])
        beside = subprocess.Popen(
            [*command, f"({asked.marks}) and (beside or not ranks)"],
            env={**os.environ, "TMPDIR": folder},
            stdout=log,
            stderr=log,
        )
        try:
            codes = {ranks.wait(), beside.wait()}
        except KeyboardInterrupt:  # both processes received it too
            codes = {ranks.wait(), beside.wait()}
        log.seek(0)
        sys.stdout.write(f"\nBeside the tests above:\n{log.read()}")
    return max(codes - {int(pytest.ExitCode.NO_TESTS_COLLECTED)} or codes, key=abs)


def starts_ranks(command: Any) -> bool:
    """Whether a command line starts a World's agent or torchrun."""
    words = [str(word) for word in command] if isinstance(command, (list, tuple)) else [str(command)]
    if words[1:3] == ["-m", "torch.distributed.run"]:
        return True
    return words[2:3] != ["--wait"] and any(one.endswith("kit/world/agent.py") for one in words[1:2])


def write_times(reporter: pytest.TerminalReporter) -> None:
    """Write the time of all tests, and of each file that took a second or more."""
    took: Counter[str] = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.location[0]] += round(report.duration, 3)
    reporter.section(f"{sum(took.values()) / 60:.1f} minutes of tests")
    for file, seconds in took.most_common():
        if seconds >= 1:
            reporter.write_line(f"{seconds:7.1f} s  {file}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
