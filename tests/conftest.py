"""What every test may lean on: that nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.holdings import holdings, wait_for


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
