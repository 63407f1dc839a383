"""The picture of a sync's growing cost, from made-up rows in the bench's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.pictures.growth import growth, plot_growth, read, together
from kit.errors import BadInput
from kit.labs.bench import Samples
from kit.labs.bench_sync.parts import transfer_times
from kit.results.samples import sample_rows
from tests.bench.recorded import frame_of


def bench() -> dict[str, Any]:
    rows: list[Samples] = []
    for megabytes, receivers in ((10, 1), (100, 1), (100, 2), (1000, 1)):
        seconds = {way: [slow * megabytes / 1e4 * receivers] * 3 for way, slow in (("memcpy", 1.0), ("shm", 1.4))}
        what = f"growth: {megabytes} MB, {receivers} receiver{'s' * (receivers > 1)}"
        reported = {"seconds": seconds, "bytes": megabytes * 10**6}
        rows += transfer_times(what, reported, ["memcpy", "shm"], megabytes=megabytes, receivers=receivers)
    rows.append(Samples(what="something else", values=[1.0]))
    return {"bench": "sync", "rows": sample_rows(frame_of(rows), [], {})}


def test_rows_become_a_table() -> None:
    table = growth(bench())
    assert len(table) == 8
    assert set(table["way"]) == {"memcpy", "shm"}
    assert table.set_index(["megabytes", "receivers", "way"])["median"][100, 2, "shm"] == pytest.approx(0.028)


@pytest.mark.parametrize("theme_name", ["light", "dark"])
def test_it_is_drawn(theme_name: str, tmp_path: Path) -> None:
    picture = plot_growth(bench(), theme_name=theme_name)
    left, right = picture.axes
    assert [line.get_text() for line in left.get_legend().get_texts()] == ["memcpy", "shm"]
    assert [1, 2] in [list(line.get_xdata()) for line in right.lines]
    assert picture.save(tmp_path / "growth.png").stat().st_size > 10_000


def test_it_is_read_as_printed_and_as_references_keep_it(tmp_path: Path) -> None:
    printed, kept = tmp_path / "printed.txt", tmp_path / "kept.json"
    printed.write_text(f"a table\n\na machine\n{json.dumps(bench())}\n")
    kept.write_text(json.dumps(bench(), indent=4) + "\n")
    assert read(printed) == read(kept) == bench()


def test_files_of_parts_are_drawn_together(tmp_path: Path) -> None:
    whole = bench()
    for name, rows in (("a", whole["rows"][:4]), ("b", whole["rows"][4:])):
        (tmp_path / name).write_text(json.dumps(whole | {"rows": rows}))
    assert together([tmp_path / "a", tmp_path / "b"]) == whole


def test_other_benches_are_refused() -> None:
    with pytest.raises(BadInput, match="no rows of `kit bench sync --json`"):
        growth({"bench": "split", "rows": bench()["rows"]})
    with pytest.raises(BadInput, match="no rows of `kit bench sync --json`"):
        growth({"bench": "sync", "rows": []})
