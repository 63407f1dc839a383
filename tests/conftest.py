"""What every test may lean on: that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.holdings import holdings, wait_for


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails when the test left a process, folder, file descriptor or shared-memory segment of a World behind."""
    before = holdings(os.getpid())
    yield
    wait_for(lambda: holdings(os.getpid()) == before, 5.0)
    assert holdings(os.getpid()) == before
