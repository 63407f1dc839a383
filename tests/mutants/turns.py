"""A pytest plugin that gives each test a turn of its own, and what the fixtures of a file set up another one, for all tests of the file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.mutants.reached import FOLDER, TURN

TESTS = "tests.json"
_setups: dict[str, int] = {}  # by file
_tests: dict[str, tuple[int, int, float]] = {}  # the turns of the file's fixtures and of the test, and its seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    file = item.nodeid.partition("::")[0]
    if file not in _setups:
        _setups[file] = TURN.begin()
    TURN.now = _setups[file]
    started = time.monotonic()
    result = yield
    if item.nodeid in _tests:
        _tests[item.nodeid] = (*_tests[item.nodeid][:2], time.monotonic() - started)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    setup = TURN.now
    _tests[item.nodeid] = (setup, TURN.begin(), 0.0)
    try:
        return (yield)
    finally:
        TURN.now = setup


def pytest_sessionfinish() -> None:
    (FOLDER / TESTS).write_text(json.dumps(_tests))
