"""Small runs for the tests in this folder."""

from __future__ import annotations

import json
from typing import NamedTuple

import pandas as pd
import pyarrow.parquet as pq
import pytest

from kit.results import Row, create_run
from kit.results.frames import METADATA
from kit.results.records import COLUMNS, PATTERN, parse_lines, unreadable_note
from kit.results.run import File


class Loaded(NamedTuple):
    """A run folder's records, the number of dropped lines, and a sentence for each loss."""

    records: list[Row]
    torn: int
    notes: list[str]


def read_records(folder):
    records, torn, notes = [], 0, []
    for path in sorted(folder.glob(PATTERN)):
        columns, dropped = parse_lines(path.read_bytes())
        records += [Row(**dict(zip(COLUMNS, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        torn += len(dropped)
        file = File(path)
        file.read()
        notes += [unreadable_note(path.name, file.dropped)] if file.dropped else []
    return Loaded(records, torn, notes)


def beside(path):
    return json.loads(path.with_name(f"{path.name}.provenance.json").read_text())


def read_back(path, like):
    """Read a table and its provenance back with only pandas and the columns' types."""
    if path.suffix == ".csv":
        table = pd.read_csv(path, dtype="str", keep_default_na=False, lineterminator="\n")
        table = table.replace(r"^'(?=[=+\-@\t\r])", "", regex=True)  # undo the guard against formulas
        table["unit"] = table["unit"].replace("none", "")
        provenance = beside(path)
    elif path.suffix == ".parquet":
        table = pd.read_parquet(path)
        provenance = json.loads(pq.read_schema(path).metadata[METADATA])
    else:
        data = json.loads(path.read_text(), parse_constant=pytest.fail)
        table, provenance = pd.DataFrame(data, columns=like.columns), beside(path)
    for name in like.columns[[kind.kind == "f" for kind in like.dtypes]]:
        table[name] = [float("nan") if item in ("", None) else float(item) for item in table[name]]
    return table.astype(like.dtypes), provenance


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
    return Row(**{**base, **changes})


@pytest.fixture
def record():
    return make_record


@pytest.fixture
def make_run(tmp_path):
    """Make a finished run of the given records; return its folder."""

    def make(records, name="run", **fields):
        writer = create_run(tmp_path, "smoke", {"cycles": 2}, {"torch": "2.13"}, out=tmp_path / name, **fields)
        writer.append(records)
        writer.finish()
        return writer.dir

    return make
