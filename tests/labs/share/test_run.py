"""One whole run on ranks: both pipelines compute what each computes alone, and no device has two owners."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

import kit
from kit.labs.share.drive import clusters, controller, scheduler
from kit.results import Row
from kit.results.frames import events_of
from kit.results.rules import settle
from kit.share.judge.pipelines import pipeline_rows
from kit.share.member import Member
from kit.stream.judge.history import LoopLedger
from kit.stream.judge.publication import publish_before_use
from kit.train.draws import answer_length, tool_stalls
from tests.holdings import holdings, wait_for
from tests.labs.share.conftest import share
from tests.loop.replaying import replay_rows
from tests.share.chaos import violations

PIPELINES = ("a", "b")
CONFIG: dict[str, Any] = {
    "a.steps": 2,
    "b.steps": 3,
    "groups": 2,
    "group": 2,
    "layers": 1,
    "warm": 3,
    "lr": 3e-3,
    "a.answer": (3, 8),
    "b.answer": (3, 10),
    "b.tail": True,
    "b.tools": 1,
    "b.tool_ms": (1, 50),
    "b.reward_ms": (1, 50),
    "decode": 2,
}
NUMBERS = ("digest", "tokens_digest", "global_loss", "grad_norm")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put runs in a folder of the module; nothing may be left behind."""
    folder = tmp_path_factory.mktemp("share")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        before = holdings(os.getpid())
        yield
        wait_for(lambda: holdings(os.getpid()) == before, 5.0)
        assert holdings(os.getpid()) == before


@pytest.fixture(scope="module")
def run(places: None) -> kit.Run:
    return on_ranks()


def on_ranks(**changed: Any) -> kit.Run:
    config = {**CONFIG, **changed}
    if config.get("scenario") in ("A", "C"):  # the scenarios here with a single pipeline
        config = {name: value for name, value in config.items() if not name.startswith("b.")}
    return kit.run("share", **{name: [*value] if isinstance(value, tuple) else value for name, value in config.items()})


def of(run: kit.Run, phase: str, metric: str) -> pd.DataFrame:
    frame = run.frame()
    rows = frame[(frame["phase"] == phase) & (frame["metric"] == metric)]
    return rows.assign(ids=[json.loads(ids or "{}") for ids in rows["ids"]])


def computed(run: kit.Run, phase: str, pipeline: str) -> dict[tuple[str, str], Any]:
    """What a pipeline computed in a phase, by metric and ids."""
    found = {}
    for metric in NUMBERS:
        for row in of(run, phase, metric).itertuples():
            ids = dict(row.ids)
            if ids.pop("pipeline") == pipeline:
                found[metric, repr(sorted(ids.items()))] = row.text or row.value
    return found


def ledger(run: kit.Run, phase: str) -> list[Row]:
    """Return the rows that went through the runner."""
    rows = events_of(run.frame(), phase)
    start = next(number for number, row in enumerate(rows) if row.event == "begins")
    return [row for row in rows[start:] if not row.event.startswith("seen_") and row.event not in ("lease", "killed")]


def test_each_computes_what_it_computes_alone(run: kit.Run) -> None:
    for name in PIPELINES:
        steps = CONFIG[f"{name}.steps"]
        alone = computed(run, f"alone_{name}", name)
        assert len(alone) == (steps + 1) + steps * 4 + 2 * steps
        assert computed(run, "shared", name) == alone
    assert computed(run, "shared", "a") != computed(run, "shared", "b")


def test_answers_have_their_drawn_lengths_and_wait_for_their_tools(run: kit.Run) -> None:
    loop = share(**CONFIG).loops["b"]
    rows = [row for row in ledger(run, "shared") if row.ids.get("pipeline") == "b"]
    samples = {(row.number("group"), row.number("sample")) for row in rows if row.event == "completed"}
    assert len(samples) == 3 * 2 * 2
    for sample in samples:
        own = [row for row in rows if (row.ids.get("group"), row.ids.get("sample")) == sample]
        assert {row.number("length") for row in own if row.event == "completed"} == {answer_length(loop, *sample)}
        stalls = [round(1000 * seconds) for seconds in tool_stalls(loop, *sample).values()]
        called = [row for row in own if row.event == "tool_called"]
        assert {row.number("ms") for row in called} == {*stalls}
        after = [row.time for row in own if row.event == "completed"][-1]
        assert all(after - row.time >= row.number("ms") / 1000 - 0.001 for row in called)


def test_no_device_had_two_owners(run: kit.Run) -> None:
    (seen,) = of(run, "shared", "seen_samples").itertuples()
    if seen.ids["blind"]:
        pytest.skip("this kernel does not show file locks of other processes")
    assert seen.value > 0
    assert seen.ids["two_owners"] == 0
    assert {*of(run, "shared", "seen_owner")["text"]} >= {"a.trainer", "b.trainer"}
    (alone,) = of(run, "alone_a", "seen_samples").itertuples()
    assert (
        alone.ids["two_owners"] > 0
    )  # alone, a pipeline's trainer and replica share a device, so the observer must see two owners


def test_memory_is_read_between_a_start_and_an_end(run: kit.Run) -> None:
    """All ranks are read in one look: a check compares the readings of a look with each other."""
    rows = of(run, "shared", "seen_resident")
    assert (rows["start"] <= rows["time"]).all()
    looks = sorted({*zip(rows["start"], rows["time"], strict=True)})
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(looks))


def test_leases_of_a_device_follow_one_another(run: kit.Run) -> None:
    rows = of(run, "shared", "lease").sort_values("time", kind="stable")
    for device in (0, 1):
        holder = ""
        for row in rows[[ids["device"] == device for ids in rows["ids"]]].itertuples():
            assert row.text == holder or (row.ids["event"] == "taken" and not holder)
            holder = row.text if row.ids["event"] == "taken" else ""
        assert not holder


def test_every_replica_serves_the_weights_of_its_trainer(run: kit.Run) -> None:
    for phase in ("alone_a", "alone_b", "shared"):
        weights = {(row.ids["pipeline"], row.ids["version"]): row.text for row in of(run, phase, "digest").itertuples()}
        served = [*of(run, phase, "served").itertuples()]
        assert len(served) > len(weights) / 2
        assert all(row.text == weights[row.ids["pipeline"], row.ids["version"]] for row in served)
        assert len({*weights.values()}) == len(weights)


@pytest.mark.parametrize("phase", ["shared", "rehearse"])
def test_the_ledger_has_no_violation(run: kit.Run, phase: str) -> None:
    rows = [{"event": row.event, "time": row.time, **row.ids} for row in ledger(run, phase)]
    assert violations(rows) == {}


def test_a_replay_of_the_ledger_gives_the_same_commands(run: kit.Run) -> None:
    config = share(**CONFIG)
    cores: dict[str, Any] = {
        name: Member(controller(config, name), name, clusters(config, name)) for name in config.names
    }
    assert replay_rows({**cores, "desk": scheduler(config)}, ledger(run, "shared")) is None


def test_weights_are_used_where_they_are_published(run: kit.Run) -> None:
    rows = ledger(run, "shared")
    for name in PIPELINES:
        found = settle(publish_before_use(LoopLedger(pipeline_rows(rows, name))))
        assert not found.value, found.why


def test_the_dead_change_nothing_for_the_other(run: kit.Run) -> None:
    assert {*of(run, "rehearse", "killed")["text"]} == {"a replica 0", "b trainer"}
    assert computed(run, "rehearse", "a") == computed(run, "alone_a", "a")
    ends = {
        row.ids["core"]: row.event for row in ledger(run, "rehearse") if "core" in row.ids and row.event != "begins"
    }
    assert ends["desk"]
    gone = [row.ids for row in ledger(run, "rehearse") if row.event == "gone"]
    assert {ids["pipeline"]: ids["how"] for ids in gone} == {"a": "unregistered", "b": "died"}


def test_memory_comes_down(run: kit.Run) -> None:
    """The ranks report that a trainer off its device has its job on the host, and that a sleeping replica has dropped its weights."""
    rows = of(run, "shared", "resident")
    states = {(row.ids["who"], row.ids["state"]) for row in rows.itertuples()}
    assert states == {(f"{name}.trainer", state) for name in PIPELINES for state in ("held", "asleep")} | {
        (f"{name}.replica {number}", state) for name in PIPELINES for number in (0, 1) for state in ("awake", "asleep")
    }


@pytest.mark.slow
@pytest.mark.timeout(600)  # up to 12 ranks on two cores
@pytest.mark.parametrize(
    "more",
    [{"scenario": "F", "b.tools": 0}, {"scenario": "A", "sleep_level": 1}, {"controls": "all"}],
    ids=lambda more: "-".join(f"{name}={value}" for name, value in more.items()),
)
def test_other_sizes_levels_and_controls_compute_the_same(places: None, more: dict[str, Any]) -> None:
    found = on_ranks(**more)
    names = PIPELINES[:1] if more.get("scenario") == "A" else PIPELINES
    phases = ("shared", "static") if more.get("controls") == "all" else ("shared",)
    for name in names:
        alone = computed(found, f"alone_{name}", name)
        assert alone
        assert all(computed(found, phase, name) == alone for phase in phases)


@pytest.mark.slow
@pytest.mark.timeout(600)  # 11 ranks on two cores
def test_three_pipelines_with_different_tp_compute_what_they_compute_alone(places: None) -> None:
    more = {"pipelines": 3, "steps": 2, "b.steps": 2, "b.tp": 2, "b.train": (0, 1), "b.infer_tp": 2, "b.tools": 0}
    more["rehearse"] = False
    found = on_ranks(**more)
    assert {row.check: row.why for row in found.verdict() if row.passed is False} == {}
    for name in "abc":
        alone = computed(found, f"alone_{name}", name)
        assert alone
        assert computed(found, "shared", name) == alone


@pytest.mark.slow
@pytest.mark.timeout(600)  # 6 ranks on two cores
@pytest.mark.parametrize(
    "more",
    [
        {"scenario": "C", "adapters": 2, "tp": 2, "train": (0, 1), "infer_tp": 2},
        # Many short answers would leave no sample that distinguishes the adapters.
        {"scenario": "D", "b.adapters": 2, "b.tail": False, "b.tools": 0, "b.reward_ms": (0, 0)},
        {"scenario": "C", "adapters": 1, "lora_merged": True},
    ],
    ids=["C with tp=2", "D", "merged"],
)
def test_adapters_pass_every_check(places: None, more: dict[str, Any]) -> None:
    steps = {"a.steps" if more["scenario"] == "C" else "b.steps": 4}
    verdict = {row.check: row for row in on_ranks(**{**more, **steps}).verdict()}
    assert {check: row.why for check, row in verdict.items() if row.passed is False} == {}
    apart = (
        "adapters_apart",
        "base_unchanged",
        "adapter_numbers",
        "trained_changed",
        "adapters_unloaded",
        "turns_fair",
    )
    assert all(verdict[check].passed for check in (*apart, "same_numbers"))
