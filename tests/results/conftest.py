"""Small runs that the tests of this room share."""

from __future__ import annotations

import pytest

from kit.results import Record, create_run


def make_record(**changes):
    base = {
        "run": "r1",
        "lab": "smoke",
        "cycle": 0,
        "phase": "reload",
        "rank": 0,
        "metric": "seconds",
        "value": 0.5,
        "unit": "s",
        "time": 1_760_000_000.25,
    }
    return Record(**{**base, **changes})


@pytest.fixture
def record():
    return make_record


@pytest.fixture
def make_run(tmp_path):
    """Make a finished run of these records; gives its folder."""

    def make(records, name="run", **fields):
        writer = create_run(tmp_path, "smoke", {"cycles": 2}, {"torch": "2.13"}, out=tmp_path / name, **fields)
        writer.append(records)
        writer.finish()
        return writer.dir

    return make
