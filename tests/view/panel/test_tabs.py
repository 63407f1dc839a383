"""The tabs for plots, tables with their export, and comparison without a browser, on real and made-up runs."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import shutil
from typing import Any

import pandas as pd
import pytest

import kit
from kit.draw.album import WhatIf
from kit.draw.chart import Plot
from kit.errors import BadInput
from kit.labs.bench_view.made_up import made_up
from kit.labs.discover import find
from kit.results import NotMeasured, Run
from kit.view import tabs
from kit.view.model import PanelModel
from kit.view.panel import make_panel
from kit.view.runs import RunsTab
from kit.view.tabs import (
    KINDS,
    Grid,
    PlotsTab,
    TablesTab,
    WhatIfTab,
    in_larger_units,
    matching_rows,
)
from tests.results.conftest import read_back


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a made-up run in the offload lab's format."""
    folder = tmp_path_factory.mktemp("runs")
    made_up(folder, 3000)
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    """Two real runs of the smoke lab, the second with a fault."""
    with kit.World(2) as world:
        kit.run("smoke", world=world, cycles=2, out=folder / "plain")
        kit.run("smoke", world=world, cycles=2, fault="leaked-group", out=folder / "leaking")


@pytest.fixture(autouse=True)
def runs(folder, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(folder))


@pytest.fixture
def offload():
    model = PanelModel(find("offload"))
    assert model.run is not None
    return model


@pytest.fixture
def smoke(finished, folder):
    model = PanelModel(find("smoke"))
    model.show(kit.load(folder / "leaking"))
    return model


def message(tab):
    return re.sub("<.*?>", "", tab.notice.value)


# -- plots -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """Record the labels of pictures sent to the page; the drawing itself is real."""
    calls = []
    real = tabs.inline

    def inline(picture, label):
        calls.append(label.rpartition(" of ")[0])
        return real(picture, label)

    monkeypatch.setattr(tabs, "inline", inline)
    return calls


@pytest.mark.slow
def test_plots_are_offered_as_the_run_tells_the_quick_ones_first(offload):
    tab = PlotsTab(offload)
    tab.visible = True
    assert [name for _, name in tab.choice.options] == [
        "memory", "drift", "times", "census", "timeline", "verdict", "overview",
    ]  # fmt: skip
    assert "Memory by source of offload-" in page(tab)
    assert "<svg" in page(tab)


@pytest.mark.slow
def test_nothing_is_drawn_while_nobody_looks(offload, drawn):
    tab = PlotsTab(offload)
    offload.grown()
    assert drawn == []
    tab.visible = True
    assert drawn == ["Memory by source"]
    tab.visible = False
    tab.choice.value = "drift"
    offload.move("memory_drift", 5)
    assert len(drawn) == 1
    tab.visible = True
    assert drawn[1:] == ["Drift over cycles"]
    assert "limit 5 MiB" in words(tab)


def test_pictures_stay_on_the_page_while_there_is_nothing_to_draw(offload, drawn):
    """Those that are taken out are kept by the page: it grew with every run."""
    tab = PlotsTab(offload)
    tab.visible = True
    shown = tab.pictures.children
    run = offload.run
    offload.run = None
    assert (tab.pictures.layout.display, tab.pictures.children) == ("none", shown)
    assert "There is no run yet" in tab.absent.value
    offload.state = "starting"
    assert "There are no measurements yet" in tab.absent.value
    offload.run = run
    assert (tab.pictures.layout.display, tab.absent.layout.display) == (None, "none")
    assert tab.pictures.children == shown


def page(tab):
    return "".join(part.value for part in tab.pictures.children)


def words(tab):
    """All texts in the current picture, which the page shows as shapes."""
    picture = tab._parts[tab.choice.value].picture
    return {text.get_text() for axes in picture.axes for text in axes.texts}


def test_a_limit_is_drawn_anew_where_it_is_in_the_drawing_alone(offload, drawn):
    tab = PlotsTab(offload)
    tab.visible = True
    offload.move("memory_drift", 5)
    assert len(drawn) == 1
    tab.choice.value = "drift"
    before = page(tab)
    offload.move("memory_drift", 6)
    assert "limit 6 MiB" in words(tab)
    assert page(tab) != before
    offload.move("fds_return", 3)
    assert drawn[1:] == ["Drift over cycles"] * 2
    offload.grown()
    assert len(drawn) == 4


@pytest.mark.slow
def test_the_overview_is_every_plot_and_draws_those_anew_that_must_be(offload, drawn):
    tab = PlotsTab(offload)
    tab.visible = True
    tab.choice.value = "overview"
    titles = ["Memory by source", "Drift over cycles", "Time per phase and rank", "Groups, files, threads"]
    titles += ["Timeline of ranks", "Verdict"]
    assert drawn == titles  # the first was drawn before
    assert len(tab.pictures.children) == len(titles)
    del drawn[:]
    offload.move("memory_drift", 5)
    assert drawn == ["Drift over cycles", "Verdict"]
    assert [
        child.value.partition('aria-label="')[2].partition(" of offload")[0] for child in tab.pictures.children
    ] == titles
    tab.png.click()
    assert (offload.run.dir / "overview.png").exists()


def test_a_run_that_has_begun_shows_its_first_picture_once_it_has_one(offload, tmp_path):
    """At first an empty verdict is the only picture; it is replaced by the first real one unless a person selected it."""
    whole, begun = offload.run, tmp_path / "begun"
    shutil.copytree(whole.dir, begun)
    (begun / "records.jsonl").write_text("")
    chosen = PlotsTab(offload)
    tab = PlotsTab(offload)
    for one in (tab, chosen):
        offload.show(kit.load(begun))
        one.visible = True
        assert [name for _, name in one.choice.options] == ["verdict", "overview"]
        if one is chosen:
            one.choice.value = "overview"
            one.choice.value = "verdict"
        offload.show(whole)
        one.visible = False
    assert (tab.choice.value, chosen.choice.value) == ("memory", "verdict")


@pytest.mark.slow
def test_while_ranks_work_drawing_is_held_back_and_caught_up(offload, drawn):
    tab = PlotsTab(offload)
    tab.visible = True
    tab._took = 1e6  # as if drawing took very long
    offload.state = "running"
    for _ in range(3):
        offload.grown()
    assert len(drawn) == 1
    offload.state = "ready"
    assert len(drawn) == 2


def test_a_drawing_that_stumbles_is_one_sentence_and_the_next_one_is_drawn(offload, monkeypatch):
    def stumble(data):
        raise KeyError("idle")

    tab = PlotsTab(offload)
    tab.visible = True
    # A fake plot that fails, since no run makes a real one fail.
    plots = tab._album.plots
    (chart,) = plots["drift"].charts
    monkeypatch.setitem(plots, "drift", Plot("drift", [dataclasses.replace(chart, rows=stumble)]))
    tab.choice.value = "drift"
    assert message(tab) == "drift cannot be drawn for this run: KeyError: &#x27;idle&#x27;"
    tab.choice.value = "times"
    assert "Time per phase and rank of" in page(tab)
    assert message(tab) == ""


def test_plots_are_saved_beside_the_run(offload):
    tab = PlotsTab(offload)
    tab.visible = True
    tab.choice.value = "drift"
    tab.png.click()
    path = offload.run.dir / "drift.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert message(tab) == f"written: {path}"
    tab.svg.click()
    assert "<svg" in (offload.run.dir / "drift.svg").read_text()


def test_without_a_run_a_person_is_reported_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    model = PanelModel(find("smoke"))
    tab = PlotsTab(model)
    tab.visible = True
    assert "press Start" in tab.absent.value
    assert tab.png.disabled
    tables = TablesTab(model)
    tables.visible = True
    assert tables.go.disabled
    assert "no run yet" in message(tables)


# -- records ---------------------------------------------------------------------------------------------------------------


FRAME = pd.DataFrame(
    {
        "phase": ["reload", "release", "idle", "reload", "Idle <b>"],
        "rank": [0, 1, 10, 1, 0],
        "value": [2.5, math.nan, 3e6, -1.0, 4.0],
        "unit": ["s", "s", "B", "s", "1|2"],
    }
)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("RELOAD", [0, 3]),
        ("idle", [2, 4]),
        ('phase == "reload" and rank == 1', [3]),
        ("rank >= 1", [1, 2, 3]),
        ("value > 2.5", [2, 4]),
        ("<b>", [4]),
    ],
)
def test_a_query_or_a_word_selects_rows(words, found):
    rows, why = matching_rows(FRAME, words)
    assert (rows.index.tolist(), why) == (found, "")


@pytest.mark.parametrize("words", ["rank >= ", "ramk == 1", "rank > 'x'", "value<2.5 and"])
def test_a_query_that_cannot_be_used_is_not_shown_as_one_that_finds_nothing(words):
    grid = Grid()
    grid.show(FRAME)
    grid.words.value = words
    assert "0 of 5 rows; this query cannot be used: " in grid.count.value


def test_a_table_is_escaped_sorted_and_copied_as_markdown():
    grid = Grid()
    assert grid.words.disabled
    grid.show(FRAME, worst="value")
    assert grid.found["value"].tolist()[:4] == [3e6, 4.0, 2.5, -1.0]
    assert "Idle &lt;b&gt;" in grid.rows.value
    assert not grid.copy.value  # folded, so not built yet
    grid.folded.selected_index = 0
    assert r"1\|2" in grid.copy.value
    grid.by.value, grid.descending.value = "phase", False
    grid.show(FRAME.tail(2), worst="value")  # more records arrive: the sort order is kept
    assert grid.by.value == "phase"
    assert grid.copy.value.count("\n") == 3  # two rows below the head
    grid.show(None)
    assert grid.words.disabled


def test_a_long_table_shows_its_first_rows_and_a_filter_finds_the_others():
    grid = Grid()
    grid.show(pd.DataFrame({"n": range(250), "word": ["even", "odd"] * 125}))
    assert grid.rows.value.count("<tr") == 1 + tabs.MOST
    assert "250 of 250 rows, 200 shown" in grid.count.value
    grid.words.value = "odd"
    assert grid.rows.value.count("<tr") == 1 + 125
    assert "125 of 250 rows" in grid.count.value


def test_bytes_and_seconds_are_shown_in_larger_units_or_as_recorded(smoke):
    tab = TablesTab(smoke)
    tab.visible = True
    frame = smoke.run.frame()
    seconds = frame[frame["unit"] == "s"]["value"].sum()
    shown = tab.grid.frame
    assert not {"s", "B"} & {*shown["unit"]}
    assert shown[shown["unit"] == "ms"]["value"].sum() == pytest.approx(seconds * 1e3)
    assert shown[shown["unit"] == "MiB"]["value"].sum() == pytest.approx(
        frame[frame["unit"] == "B"]["value"].sum() / 2**20
    )
    tab.units.value = False
    assert tab.grid.frame["value"].equals(frame["value"])
    table = pd.DataFrame({"ms": [1.0]})
    assert in_larger_units(table) is table


def test_records_are_a_table_and_follow_the_run(smoke, folder):
    tab = TablesTab(smoke)
    assert tab.grid.frame is None
    tab.visible = True
    frame = smoke.run.frame()
    assert len(tab.grid.frame) == len(frame)
    assert list(tab.grid.frame.columns) == ["cycle", "phase", "rank", "metric", "value", "unit", "at [s]", "text"]
    tab.grid.words.value = 'metric == "groups" and rank == 1'
    some = int(((frame["metric"] == "groups") & (frame["rank"] == 1)).sum())
    assert f"{some} of {len(frame)} rows" in tab.grid.count.value
    smoke.show(kit.load(folder / "plain"))
    assert len(tab.grid.frame) == len(smoke.run.frame())
    tab.choice.value = "times"
    assert tab.grid.by.value == "median"
    assert tab.grid.descending.value


def test_tables_of_a_lab_that_the_run_has_nothing_for_say_so(finished, folder, tmp_path):
    model = PanelModel(find("sync"))
    run = kit.load(folder / "plain")
    info = json.loads((run.dir / "run.json").read_text())
    copy = tmp_path / "as-sync"  # kept apart from the other tests' runs
    copy.mkdir()
    (copy / "run.json").write_text(json.dumps({**info, "lab": "sync"}))
    (copy / "records.jsonl").write_bytes((run.dir / "records.jsonl").read_bytes())
    model.show(kit.load(copy))
    tab = TablesTab(model)
    tab.visible = True
    assert set(tab.choice.options) == {"records", "times", "memory", "syncs", "stages", "transports", "digests"}
    tab.choice.value = "digests"
    assert message(tab) == "no tensor was hashed on a receiver"
    assert tab.grid.words.disabled
    tab.choice.value = "records"
    assert message(tab) == ""


# -- comparison ------------------------------------------------------------------------------------------------------------


def choose(tab, *names):
    places = {row["name"]: at for at, row in enumerate(tab._rows)}
    tab.grid.selected_rows = [places[name] for name in names]


def test_two_runs_are_compared_with_the_older_one(smoke, folder):
    tab = RunsTab(smoke)
    assert tab.grid is None  # nobody has looked
    tab.visible = True
    assert (tab.show.disabled, tab.go.disabled) == (True, True)
    choose(tab, "leaking", "plain")
    assert tab.chosen == [folder / "plain", folder / "leaking"]
    tab.go.click()
    assert "fault: null / leaked-group" in message(tab)
    assert f"Checks that changed in {smoke.run.id}: groups_return_to_baseline: pass → FAIL" in message(tab)
    assert "<svg" in tab.picture.value
    assert "Largest changes from" in tab.picture.value
    assert list(tab.changes.frame.columns) == ["phase", "metric", "rank", "base", "value", "ratio", "n", "unit"]
    (row,) = tab.changes.frame.query('metric == "groups" and phase == "count" and rank == 0').to_dict("records")
    assert (row["base"], row["value"], row["ratio"]) == (1, 2.5, 2.5)


def test_a_chosen_run_is_shown_and_stays_chosen_while_columns_change(smoke, folder):
    tab = RunsTab(smoke)
    tab.visible = True
    choose(tab, "plain")
    assert (tab.show.disabled, tab.go.disabled) == (False, True)
    tab.columns.value = ["cycles", "count/groups"]
    assert tab.chosen == [folder / "plain"]
    assert list(tab.frame.columns)[-2:] == ["cycles", "count/groups"]
    tab.show.click()
    assert smoke.run.dir == folder / "plain"
    assert tab.chosen == [folder / "plain"]


def test_a_number_is_plotted_over_a_setting_and_the_table_is_exported(smoke, folder, tmp_path):
    tab = RunsTab(smoke)
    tab.visible = True
    tab.columns.value = ["cycles", "count/groups"]
    assert (tab.y.value, tab.x.value) == ("took [s]", "differs")
    tab.y.value, tab.x.value = "count/groups", "fault"
    tab.draw.click()
    assert 'aria-label="count/groups over fault"' in tab.picture.value
    tab.path.value = str(tmp_path / "runs.csv")
    tab.write.click()
    assert "count/groups" in (tmp_path / "runs.csv").read_text()
    assert 'download="runs.csv"' in tab.link.value
    tab.path.value = str(tmp_path / "runs.doc")
    tab.write.click()
    assert "no known ending" in message(tab)


# -- export ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_kind_is_written_with_its_origin_and_can_be_taken_from_the_page(smoke, tmp_path, kind):
    tab = TablesTab(smoke)
    tab.kind.value = kind
    assert tab.path.value == str(smoke.run.dir / f"leaking{kind}")
    tab.path.value = str(tmp_path / f"leaking{kind}")
    tab.go.click()
    path = tmp_path / f"leaking{kind}"
    assert message(tab).startswith(f"written: {path}")
    assert f'download="leaking{kind}"' in tab.link.value
    assert base64.b64decode(tab.link.value.partition("base64,")[2].partition('"')[0]) == path.read_bytes()
    if kind in {".csv", ".parquet", ".json"}:
        back, provenance = read_back(path, smoke.run.frame())
        assert len(back) == len(smoke.run.frame())
        assert provenance["run"]["id"] == smoke.run.id
    elif kind == ".trace.json":
        assert json.loads(path.read_text())["traceEvents"]
    else:
        assert smoke.run.id in path.read_text()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", "'' is not a path"),
        ("a.doc", "'a.doc' has no known ending"),
        ("/dev/null/folder/a.csv", "cannot make the folder /dev/null/folder: Not a directory"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(smoke, tmp_path, path, sentence):
    tab = TablesTab(smoke)
    tab.path.value = str(tmp_path / path) if path else ""
    tab.go.click()
    assert sentence in message(tab).replace("&#x27;", "'")
    assert tab.link.value == ""
    assert not list(tmp_path.iterdir())


def test_another_run_is_exported_under_its_own_name(smoke, folder):
    tab = TablesTab(smoke)
    tab.kind.value = ".md"
    smoke.show(kit.load(folder / "plain"))
    assert tab.path.value == str(folder / "plain" / "plain.md")


def test_the_table_on_the_page_is_the_one_that_is_exported(smoke, tmp_path):
    tab = TablesTab(smoke)
    tab.visible = True
    tab.choice.value = "times"
    assert tab.path.value == str(smoke.run.dir / "leaking-times.csv")
    tab.grid.words.value = "nothing of it"  # a filter is for the page
    tab.path.value = str(tmp_path / "times.csv")
    tab.go.click()
    written = pd.read_csv(tmp_path / "times.csv")
    times = tab.grid.frame
    assert list(written.columns) == list(times.columns)
    assert len(written) == len(times) > 0
    tab.kind.value = ".trace.json"  # a trace is one of the run
    assert tab.path.value == str(smoke.run.dir / "leaking.trace.json")
    tab.choice.value = "records"
    tab.kind.value = ".md"
    assert tab.path.value == str(smoke.run.dir / "leaking.md")


# -- a lab's forecasts: controls, table, and runs that cannot be forecast ----------------------------------------------


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    made_up(tmp_path, 300)
    model = PanelModel(find("offload"))
    assert model.run is not None
    return model


class Forecasts:
    """A lab's forecasts; counts how often a run is read."""

    def __init__(self, first: str, cycles: int) -> None:
        self.reads = 0
        self.lacking = ""
        numbers = {"cycles": (0, max(9, cycles))}
        self.declared = WhatIf(title="What if", names={"mode": (first, "odd")}, numbers=numbers, prepare=self.prepare)

    def prepare(self, _: Run) -> Any:
        self.reads += 1
        if self.lacking:
            raise NotMeasured(self.lacking)
        return self.table

    def table(self, mode: str, cycles: int) -> pd.DataFrame:
        if mode == "odd" and not cycles % 2:
            raise BadInput(f"cycles={cycles} is even")
        return pd.DataFrame([{"loop": mode, "cycles": cycles}])


@pytest.fixture
def forecasts(model):
    return Forecasts(model.run.config["mode"], model.run.config["cycles"])


def shown(tab):
    return None if tab.grid.frame is None else tab.grid.frame.to_dict("records")


def test_controls_begin_with_the_runs_settings_and_the_table_follows_them(model, forecasts):
    tab = WhatIfTab(model, forecasts.declared)
    assert shown(tab) is None
    assert forecasts.reads == 0  # the tab is not visible
    tab.visible = True
    config = model.run.config
    assert shown(tab) == [{"loop": config["mode"], "cycles": config["cycles"]}]
    tab.controls["cycles"].value = 7
    assert shown(tab) == [{"loop": config["mode"], "cycles": 7}]
    assert forecasts.reads == 1
    model.revision += 1  # new records are read, and the controls stay
    assert shown(tab) == [{"loop": config["mode"], "cycles": 7}]
    assert forecasts.reads == 2


def test_what_cannot_be_forecast_is_reported(model, forecasts):
    tab = WhatIfTab(model, forecasts.declared)
    tab.visible = True
    tab.controls["cycles"].value = 4
    tab.controls["mode"].value = "odd"
    assert (shown(tab), message(tab)) == (None, "cycles=4 is even")
    tab.controls["cycles"].value = 5
    assert (shown(tab), message(tab)) == ([{"loop": "odd", "cycles": 5}], "")
    forecasts.lacking = "the run ended before"
    model.revision += 1
    assert (shown(tab), message(tab)) == (None, "the run ended before")


def test_only_a_lab_that_declares_it_has_the_tab(model):
    for lab, has in (("stream", True), ("smoke", False)):
        panel = make_panel(find(lab), {})
        assert ("What if" in panel.tab.titles) == has
        panel.close()
