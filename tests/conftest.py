"""Rules for every test: nothing may be left behind; a summary shows how long each part of the tests took."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.world.crew import Crew
from tests import lanes
from tests.holdings import nothing_added


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="run every variant, not only those drawn by the commit's day")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lanes.mark(items)
    if not config.getoption("--every"):
        draw(config, items)


def draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep n of the quick and n of the slow tests marked `drawn(n)` for each file and group, and one in lanes.SPARSE of the other slow
    tests in lanes.SAMPLED, chosen by the day of the commit: what mends a failure is tested with the sample that found it."""
    day = lanes.day_of_commit()
    groups: dict[tuple[str, str, bool], list[pytest.Item]] = {}
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        if (mark := item.get_closest_marker("drawn")) is not None:
            groups.setdefault((str(item.path), mark.kwargs.get("of", ""), slow), []).append(item)
        elif slow and lanes.file_of(item).startswith(lanes.SAMPLED):
            groups.setdefault((str(item.path), "slow tests", slow), []).append(item)
    left_out: set[pytest.Item] = set()
    for group in groups.values():
        mark = group[0].get_closest_marker("drawn")
        kept = mark.args[0] if mark else math.ceil(len(group) / lanes.SPARSE)
        order = sorted(group, key=lambda item: hashlib.sha256(f"{day} {item.nodeid}".encode()).digest())
        left_out |= set(order[kept:])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_configure() -> None:
    """Restore SIGINT: a job started in a shell's background ignores it, and so would every process that a test starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


STARTED: list[str] = []  # commands that started ranks since the last test


def note_ranks(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and lanes.starts_ranks(arguments[1]):
        STARTED.append(str(arguments[1]))


sys.addaudithook(note_ranks)
start_of_crew = Crew.start


def start_noted(crew: Crew, *, launch: bool = True) -> None:
    """The ranks of a World may come from an agent that waits, so no process of theirs is started here."""
    STARTED.append(f"a World of {crew.plan.ranks} ranks")
    start_of_crew(crew, launch=launch)


Crew.start = start_noted  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if a test without the mark `ranks` started ranks: tests with ranks run one after another, all others beside them."""
    yield
    started = STARTED.copy()
    STARTED.clear()
    assert not started or request.node.get_closest_marker("ranks"), (
        f"name the file or fixture in tests/lanes.py: {started}"
    )


def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection; otherwise each `gc.collect()` in a test scans all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def strict() -> Iterator[None]:
    """Turn warnings into errors: a drawing whose layout does not fit only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's runs."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread, as on ranks: on a busy machine the threads of small models wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail if the test left a process, folder, file descriptor or shared-memory segment of a World behind."""
    with nothing_added():
        yield


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Fail if the test left an environment variable changed: every World started later would inherit it."""
    before = dict(os.environ)
    yield
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert changed - {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"} == set()  # set by pytest and by torch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lanes.write_times(terminalreporter)
