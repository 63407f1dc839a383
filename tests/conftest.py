"""What every test may lean on: that nothing is left behind, and what each file took at the end."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.holdings import holdings, wait_for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", action="store_true", help="run every variant, not only those drawn by the commit's hash"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `drawn(n)`, keep n for each file and group, drawn by the commit's hash; all with --every."""
    if config.getoption("--every"):
        return
    commit = head()
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("drawn")) is not None:
            groups.setdefault((str(item.path), mark.kwargs.get("of", "")), []).append(item)
    left_out: set[pytest.Item] = set()
    for some in groups.values():
        mark = some[0].get_closest_marker("drawn")
        assert mark is not None
        order = sorted(some, key=lambda item: hashlib.sha256(f"{commit} {item.nodeid}".encode()).digest())
        left_out |= set(order[mark.args[0] :])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def head() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "no commit"


def pytest_configure() -> None:
    """A shell that starts a job in the background has it ignore SIGINT, and so would every process that a test starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails when the test left a process, folder, file descriptor or shared-memory segment of a World behind."""
    before = holdings(os.getpid())
    yield
    wait_for(lambda: holdings(os.getpid()) == before, 5.0)
    assert holdings(os.getpid()) == before


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Fails when the test left a variable of the environment changed: every World that is started later inherits it."""
    before = dict(os.environ)
    yield
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert (
        changed - {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"} == set()
    )  # pytest's own, and one that torch sets


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each file took, the longest first."""
    took: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.location[0]] += round(report.duration, 3)
    terminalreporter.section(f"{sum(took.values()) / 60:.1f} minutes in {len(took)} files")
    for file, seconds in took.most_common():
        if seconds >= 1:
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
