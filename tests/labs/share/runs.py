"""Runs of the lab `share` as the lab writes them, with simulated or given ledgers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
from kit.labs.definition import as_settings
from kit.labs.share import ledgers as recorded
from kit.labs.share.lab import ShareConfig
from kit.results import Row, create_run
from kit.results.records import NOTEBOOK
from kit.share.judge.books import DeskLedger
from kit.share.state import Cluster
from kit.stream.simulated import Durations
from tests.labs.share.conftest import share
from tests.share.pair import STRICT, shared

BEGAN = 1.8e9
MIB = 2**20
LOW, HIGH = 30 * MIB, 100 * MIB  # resident bytes of a sleeping rank, and of one with a device


def by(core: str, name: str, when: float, **ids: Any) -> tuple[str, float, dict[str, Any]]:
    """The row of an event that a core received."""
    return name, when, {**ids, "core": core}


def to(where: str, name: str, when: float, **ids: Any) -> tuple[str, float, dict[str, Any]]:
    """The row of a command."""
    return name, when, {**ids, "to": where}


# Two devices. Pipeline a generates on device 0 until b trains there; no pipeline leases device 1.
BY_HAND = [
    ("limits", 0.0, {"devices": 2, "pipelines": "a,b", "planner": "gap-ratio", "request_ms": 60000, "pipeline": "desk"}),
    by("desk", "register", 0.0, pipeline="a", trainer="1", generation="0", tp=1),
    ("clusters", 0.0, {"pipeline": "a", "trainer": "1", "generation": "0", "tp": 1}),
    by("desk", "admit", 0.0, pipeline="a"),
    to("a", "admitted", 0.0, pipeline="a"),
    by("desk", "progress", 0.0, pipeline="a", completed=0, target=4),
    by("desk", "acquire", 0.0, pipeline="a", kind="generation"),
    ("queued", 0.0, {"pipeline": "a", "kind": "generation", "cluster": "generation", "number": 1, "target": 4}),
    by("desk", "register", 0.5, pipeline="b", trainer="0", generation="1", tp=1),
    ("clusters", 0.5, {"pipeline": "b", "trainer": "0", "generation": "1", "tp": 1}),
    by("desk", "admit", 0.5, pipeline="b"),
    ("plan", 1.0, {"pipeline": "desk", "number": 1, "shrinks": "", "grants": "", "expands": "a.generation:0", "idle": "0,1"}),
    to("devices", "expand", 1.0, pipeline="a", replica=0, devices="0"),
    to("b", "admitted", 1.0, pipeline="b"),
    by("desk", "expanded", 2.0, pipeline="desk", who="a", replica=0),
    to("a", "granted", 2.0, pipeline="a", kind="generation", cluster="generation", devices="0"),
    ("commit", 2.0, {"pipeline": "desk", "number": 1, "idle": "1"}),
    ("sync_begin", 2.0, {"pipeline": "a", "version": 0}),
    by("a", "published", 3.0, pipeline="a", version=0, replica=0),
    ("sent", 4.0, {"pipeline": "a", "group": 0, "sample": 0, "replica": 0, "attempt": 0}),
    ("sent", 4.5, {"pipeline": "a", "group": 0, "sample": 1, "replica": 0, "attempt": 0}),
    by("a", "completed", 5.0, pipeline="a", group=0, sample=0, version=0, newest=0, length=4),
    by("desk", "acquire", 5.5, pipeline="b", kind="training"),
    ("queued", 5.5, {"pipeline": "b", "kind": "training", "cluster": "trainer", "number": 2, "target": 0}),
    ("plan", 6.0, {"pipeline": "desk", "number": 2, "shrinks": "a.generation:0", "grants": "b.trainer:0", "expands": "", "idle": "1"}),
    to("a", "left", 6.0, pipeline="a", replica=0, devices="0"),
    by("desk", "shrunk", 7.0, pipeline="desk", who="a", replica=0),
    to("b", "granted", 7.0, pipeline="b", kind="training", cluster="trainer", devices="0"),
    ("commit", 7.0, {"pipeline": "desk", "number": 2, "idle": "1"}),
    to("trainer", "begin", 8.0, pipeline="b", step=0, update=0),
    by("b", "done", 8.5, pipeline="b", of="begin", step=0, update=0),
    to("trainer", "finish", 8.5, pipeline="b", step=0, update=0),
    by("b", "done", 11.0, pipeline="b", of="finish", step=0, update=0),
    ("bumped", 11.0, {"pipeline": "b", "version": 1, "updates": 1, "step": 0}),
    by("desk", "release", 12.0, pipeline="b", kind="training"),
    by("desk", "progress_end", 12.0, pipeline="a"),
    by("desk", "unregister", 13.0, pipeline="a"),
    ("gone", 13.0, {"pipeline": "a", "how": "unregistered", "idle": "0,1"}),
    ("ended", 14.0, {"pipeline": "desk", "why": "done", "to": "runner"}),
]  # fmt: skip

Given = Mapping[str, Iterable[tuple[str, float, Mapping[str, Any]]]]


def event(name: str, when: float, ids: Mapping[str, Any]) -> Row:
    return Row(metric=name, time=when, ids=ids)


def clusters(config: ShareConfig) -> dict[str, dict[str, Cluster]]:
    return {
        name: {
            "trainer": Cluster(loop.on_devices("trainer")),
            "generation": Cluster(loop.infer, loop.infer_tp),
        }
        for name, loop in config.loops.items()
    }


def simulated(config: ShareConfig, names: Iterable[str], durations: Durations | None, **more: Any) -> list[Row]:
    """Return the simulated ledger of these pipelines under a desk."""
    mine = {name: some for name, some in clusters(config).items() if name in names}
    loop = config.loops["a"]
    stream = replace(
        STRICT, steps=loop.steps, groups=loop.groups, min_groups=loop.groups, group=loop.group,
        train_global_batch_size=loop.groups * loop.group, places=loop.groups, slots=loop.groups,
    )  # fmt: skip
    return shared(mine, stream, durations, devices=config.devices, **more).rows


def make(
    folder: Path,
    *,
    until: str = "",
    ledgers: Given | None = None,
    durations: Durations | None = None,
    phases: Iterable[str] = ("alone_a", "alone_b", "shared"),
    memory: bool = True,
    prepare: Callable[..., None] = lambda _: None,
    **changed: Any,
) -> kit.Run:
    """Write a run; `until` is its last phase."""
    config = share(**changed)
    writer = create_run(folder, "share", as_settings(config), {})
    clock = BEGAN
    for cycle, phase in enumerate(["prepare", *phases]):
        about = {"run": writer.id, "lab": "share", "cycle": cycle, "phase": phase}
        began = clock
        if phase != "prepare":
            names = config.names if phase == "shared" else (phase.removeprefix("alone_"),)
            rows = (ledgers or {}).get(phase)
            if rows is None:
                rows = simulated(config, names, durations, prepare=prepare)
            rows = [one if isinstance(one, Row) else event(*one) for one in rows]
            writer.append([dataclasses.replace(row, **about, time=began + row.time) for row in rows])
            if memory and phase == "shared":
                writer.append([Row(**about, **one) for one in resident(config, rows, began)])
            clock = began + rows[-1].time
        clock += 0.5
        writer.append(
            [
                Row(**about, rank=rank, metric="seconds", value=clock - began, unit="s", time=clock)
                for rank in range(config.ranks)
            ]
        )
        if phase == until:
            break
    writer.finish()
    return kit.load(writer.dir)


def resident(config: ShareConfig, rows: Iterable[Row], began: float) -> list[dict[str, Any]]:
    """Return what the observer would see: a role holds little while it is off its devices."""
    book = DeskLedger([dataclasses.replace(row, time=began + row.time) for row in rows])
    found = [(began, who, LOW) for who in recorded.seats(book) if "#" not in who]
    for span in recorded.spans(book):
        if span.state in ("waking", "held"):
            found.append((span.left, f"{span.pipeline}.{span.role}", HIGH))
        if span.state in ("sleeping", "held"):
            found.append((span.right, f"{span.pipeline}.{span.role}", LOW))
    return [
        {"rank": NOTEBOOK, "metric": "seen_resident", "value": size, "unit": "B", "time": when, "ids": {"who": who}}
        for when, who, size in sorted(found, key=lambda one: (one[0], one[2]))  # at equal times, releases come first
    ]
