"""The picture of release modes, from made-up rows in the bench's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.pictures.release import measured, plot_release
from kit.errors import BadInput
from kit.labs.bench import Samples
from kit.labs.bench_release.parts import of_trial
from kit.results.samples import sample_rows
from tests.bench.recorded import frame_of
from tests.seen import bars, words

MIB = 2**20
COST = {"exact": 0.02, "manual": 0.2}


def bench(*sources: str) -> dict[str, Any]:
    """Rows for two modes and three numbers of groups; official and suspend are not measured."""
    rows: list[Samples] = []
    for number in (20, 40, 80):
        for way, cost in COST.items():
            seconds = {"release": cost * number / 20, "back": 0.01, "first collective": 0.002}
            freed = dict.fromkeys(("groups", "rss_anon", *sources), number * MIB)
            reported = {"cycles": [{"seconds": seconds, "freed": freed}] * 3, "left": dict.fromkeys(freed, 0)}
            reported |= {"groups": number, "mechanism": "gloo over the store"}
            for ranks in (2, 4) if number == 20 else (2,):
                rows += of_trial(ranks, way, [reported, reported])
    why = "not measured: it needs a GPU (NCCL)"
    rows.append(Samples(what="own groups, 2 ranks", who="suspend", note=why, ids={"ranks": 2, "way": "suspend"}))
    return {"bench": "release", "rows": sample_rows(frame_of(rows), [], {}), "provenance": {"gpu": {"gpus": []}}}


def test_rows_become_a_table() -> None:
    found = measured(bench()).set_index(["ranks", "groups", "what", "way"])["median"]
    assert found[2, 80, "release", "manual"] == pytest.approx(800)
    assert found[4, 20, "release", "exact"] == pytest.approx(20)


@pytest.mark.parametrize("theme_name", ["light", "dark"])
def test_it_is_drawn(theme_name: str, tmp_path: Path) -> None:
    picture = plot_release(bench("sockets"), theme_name=theme_name)
    titles = [ax.get_title(loc="left") for ax in picture.axes][:-1]  # the last has sentences
    assert titles[0] == "Time to release"
    assert titles[3:] == ["Groups", "Sockets", "Host memory [MiB]"]
    lines = {tuple(line.get_ydata().round(6)) for line in picture.axes[0].lines if len(line.get_ydata()) == 3}
    assert {(20, 40, 80), (200, 400, 800)} <= lines
    assert sorted(bar.get_height() for bar in bars(picture.axes[3])) == [80 * MIB] * 2  # nothing was left
    assert "2 ranks · no GPU" in picture.get_suptitle()
    assert picture.save(tmp_path / "ways.png").stat().st_size > 10_000


def test_a_gpus_own_numbers_come_before_the_hosts() -> None:
    picture = plot_release(bench("sockets", "threads", "driver", "comm_total"))
    titles = [ax.get_title(loc="left") for ax in picture.axes][3:-1]
    assert titles == ["Groups", "Driver [MiB]", "Communicators [MiB]", "Sockets"]


def test_what_was_not_measured_is_reported() -> None:
    assert "suspend not measured: it needs a GPU (NCCL)" in words(plot_release(bench()))


def test_other_benches_are_refused() -> None:
    with pytest.raises(BadInput, match="no rows of `kit bench release --json`"):
        measured(bench() | {"bench": "sync"})
    with pytest.raises(BadInput, match="no rows of `kit bench release --json`"):
        measured({"bench": "release", "rows": []})
