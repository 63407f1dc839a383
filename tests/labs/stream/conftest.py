"""Runs of the lab `stream`: simulated ones without any rank, and those on ranks, which stay alive for all tests of a module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kit
from kit.errors import KitError
from kit.labs.stream import LAB, broken
from kit.labs.stream.config import StreamConfig, plan
from kit.results import Record, Verdict
from kit.results.records import NOTEBOOK
from kit.results.run import to_frame
from kit.results.verdict import judge
from kit.target import load_callable
from kit.world.world import Worlds
from tests.holdings import holdings, wait_for

SMALL = {"ranks": 2, "replicas": 1, "steps": 3, "groups": 2, "group": 2}


class Notebook:
    """What a simulated run takes of a Drive: its config, the fault, and where rows go."""

    def __init__(self, config: StreamConfig, fault: str | None) -> None:
        self.config = config
        self.fault = fault
        self.phase = ""
        self.rows: list[dict[str, Any]] = []

    def append(self, rows: list[dict[str, Any]]) -> None:
        self.rows += [{"phase": self.phase, **row} for row in rows]


def simulated(fault: str | None = None, **config: Any) -> tuple[Verdict, str]:
    """The verdict of a simulated run, and the error that ended it."""
    drive = Notebook(StreamConfig(**{"simulated": True, "ranks": 1, **config}), fault)
    error = ""
    try:
        for step in plan(drive.config):
            drive.phase = step.phase
            load_callable(step.driver)(drive)
    except KitError as raised:
        error = str(raised)
    head = {"run": "test", "lab": "stream", "cycle": 1, "rank": NOTEBOOK}
    frame = to_frame(Record(**head, **row) for row in drive.rows)
    wrong = fault in broken.SWAPS and not error  # a run that breaks is judged as far as its records go
    suspect = f"fault {fault!r}" if wrong else ""
    return judge(frame, dataclasses.asdict(drive.config), LAB.load_checks(), suspect=suspect), error


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs go to a folder of the module, and nothing is left."""
    folder = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        before = holdings(os.getpid())
        yield
        wait_for(lambda: holdings(os.getpid()) == before, 5.0)
        assert holdings(os.getpid()) == before


@pytest.fixture(scope="module")
def on_ranks(places: None) -> Iterator[Callable[..., kit.Run]]:
    """on_ranks(**config) -> the finished run, a small one of two ranks; asked for again, the same one. Runs share their Worlds."""
    made: dict[str, kit.Run] = {}
    worlds: list[Worlds] = []

    def run(fault: str | None = None, **config: object) -> kit.Run:
        given = {**SMALL, **config}
        key = repr((fault, sorted(given.items())))
        if key not in made:
            try:
                made[key] = kit.run("stream", fault=fault, world=shared(), **given)
            except KitError:
                shared().restart()  # what a broken run left must not be the next one's
                raise
        return made[key]

    def shared() -> Worlds:
        if not worlds:
            env = {"OMP_NUM_THREADS": "1"}
            worlds.append(Worlds((1, 1), isolate=True, env=env, preload=("megatron.core",)))
        return worlds[0]

    yield run
    for world in worlds:
        world.close()


def failed(verdict: Verdict) -> set[str]:
    return {row.check for row in verdict if row.passed is False}


def passed(verdict: Verdict, check: str) -> bool | None:
    return next(row.passed for row in verdict if row.check == check)


def why(verdict: Verdict, check: str) -> str:
    return next(row.why for row in verdict if row.check == check)
