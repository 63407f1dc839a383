"""A test lab, in a module in the working folder, where the ranks find it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.labs.definition import Definition
from kit.labs.lab import Lab

SOURCE = """
import os, signal, time
from dataclasses import dataclass
from typing import Annotated, Literal
import torch.distributed as dist
from kit.labs.definition import Definition, Fault, Role, Step
from kit.labs.definition import LabConfig, Option

@dataclass(frozen=True, kw_only=True, slots=True)
class Config(LabConfig):
    low: Annotated[int, Option("an end")] = 1
    high: Annotated[int, Option("the other end", low=1)] = 2
    ratio: Annotated[float | None, Option("a part", low=0, high=1)] = None
    words: Annotated[tuple[str, ...], Option("some words")] = ()
    do: Annotated[Literal["nothing", "raise", "kill", "hang"], Option("what rank 1 does in the second phase")] = "nothing"
    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not be above high ({self.high})")

@dataclass(frozen=True, kw_only=True, slots=True)
class Typed(Config):
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Option("a type")] = "auto"

class Phases:
    def __init__(self, ctx):
        self.ctx = ctx
        self.seen = []
        self.me = self  # a job's hooks make such circles: only the garbage collector frees it
    def first(self, cycle):
        self.seen.append(cycle)
        self.ctx.record("words", len(self.ctx.config.words))
        self.ctx.record("world", self.ctx.world)
        self.ctx.record("world_size", self.ctx.world_size)
        self.ctx.record("worlds", len(self.ctx.world_sizes))
        self.ctx.record("role", None, text=self.ctx.role)
        if hasattr(self.ctx.config, "dtype"):
            self.ctx.record("dtype", None, text=self.ctx.config.dtype)
        self.ctx.record("own_size", dist.get_world_size())
        self.ctx.record("meeting", int(self.ctx.meeting.removeprefix("kit-")[:8], 16))
        assert self.ctx.config.words == tuple(self.ctx.config.words)
    def second(self, cycle):
        self.ctx.record("seen", len(self.seen), "1")
        if self.ctx.rank == 1:
            if self.ctx.config.do == "raise":
                raise RuntimeError("rank 1 is told to raise")
            if self.ctx.config.do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.ctx.config.do == "hang":
                time.sleep(60)
        if self.ctx.config.do in ("kill", "hang"):
            dist.barrier()

    def slow(self, cycle):
        # goes on only once what was recorded is on disk, where the notebook put it
        if self.ctx.rank == 1:
            self.ctx.record("early", 7, text="still under way", step=cycle)
            records = os.path.join(os.environ["OWN_LAB_RUN"], "records.jsonl")
            while '"early"' not in open(records).read():
                time.sleep(0.01)

    # calls of a driven step
    def add(self, a, b):
        self.ctx.record("sum", a + b, by=self.ctx.role)
        return a + b
    def nap(self, seconds):
        time.sleep(seconds)
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def explode(self):
        raise RuntimeError("a call is told to raise")

def driver(drive):
    # two calls in flight, one to each role, the next when the first of them is done
    began = time.time()
    flying = {name: drive.submit("add", args={"a": 1, "b": 1}, role=name) for name in drive.roles}
    sums = []
    for turn in range(2, 5):
        done = drive.wait(flying.values())[0]
        name = next(name for name, one in flying.items() if one is done)
        sums += done.result()
        flying[name] = drive.submit("add", args={"a": turn, "b": 1}, role=name)
    for one in flying.values():
        sums += one.result()
    drive.record("calls", len(sums), "1", start=began, text="all of them")

def careless(drive):
    drive.submit("nap", args={"seconds": 600}, role="worker")

def breaking(drive):
    drive.submit("nap", args={"seconds": 600}, role="boss")
    drive.submit("explode", role="worker").result()

def patient(drive):
    drive.submit("nap", args={"seconds": 600}, role="worker").result()

def survivor(drive):
    from kit.errors import RankDied
    try:
        drive.submit("die", role="worker").result()
    except RankDied as error:
        drive.record("died", error.rank, text=error.signal, rank_of="worker")
    drive.record("answer", drive.submit("add", args={"a": 2, "b": 3}, role="boss").result()[0])

def replacing(drive):
    before = drive.world.pids
    drive.submit("nap", args={"seconds": 600}, ranks=[1])
    drive.renew()
    assert not set(before) & set(drive.world.pids)
    drive.submit("add", args={"a": 2, "b": 3}, ranks=[0, 1]).result()

def roles(config):
    return (
        Role(name="boss", ranks=(0,), phases="own_lab:Phases"),
        Role(name="worker", ranks=tuple(range(1, config.ranks)), world=1, devices=tuple(range(4, config.ranks + 3))),
    )

class Choosy(Phases):
    def __init__(self, ctx):
        from kit.errors import BadInput
        if ctx.rank == ctx.config.low:
            raise BadInput(f"low={ctx.config.low} is nothing for the library that this rank has")

def seen(frame, config):
    from kit.results import Measured, select
    return Measured(float(select(frame, metric="seen")["value"].max()))

def checks():
    from kit.results import Rule
    return [Rule("seen_often", "?", seen, limit=5)]

def __getattr__(name):
    if name == "RULES":
        return checks()
    raise AttributeError(name)

LAB = Definition(
    name="own", summary="a lab of a test", config=Config,
    plan=lambda config: [Step(0, "first"), *(Step(c, "second") for c in range(1, 3))],
    phases="own_lab:Phases", rules="own_lab:RULES",
    faults=(
        Fault(name="breaks", breaks="rank 1 raises", caught_by="", exit=3, set={"do": "raise"}),
        Fault(name="cuda-only", breaks="nothing", caught_by="seen_often", devices=("cuda",)),
    ),
)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Definition]:
    """The test lab; its module lies in the working folder, where the ranks look for it."""
    (tmp_path / "own_lab.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_lab

    yield own_lab.LAB
    del sys.modules["own_lab"]


@pytest.fixture
def made(own: Definition, runs: Path, nothing_left: None) -> Iterator[Callable[..., Lab]]:
    """Return a function that makes test labs, which are closed at the end."""
    labs: list[Lab] = []

    def make(fault: str | None = None, **config: object) -> Lab:
        labs.append(Lab(own, config, fault=fault))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()
