"""The offload lab itself: what it leaves behind, what its measuring costs, and whether training goes on bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.bench.cost import Cost, crowd
from kit.bench.report import progress
from kit.bench.rows import Row, row
from kit.errors import KitError

if TYPE_CHECKING:
    from kit.bench.session import Session
    from kit.results import Run

GRID: dict[str, dict[str, Any]] = {
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "tp": 1, "pp": 2},
    "dp2": {"ranks": 2, "tp": 1},
    "dp2 with the distributed optimizer": {"ranks": 2, "tp": 1, "distributed_optimizer": True},
    "tp2 pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "ep2, 4 experts": {"ranks": 2, "tp": 1, "ep": 2, "experts": 4},
    "pp4": {"ranks": 4, "tp": 1, "pp": 4},
}
LEAKS = {"groups_return_to_baseline": "groups", "fds_return": "fds", "threads_return": "threads"}


def leaks(session: Session, *, cycles: int) -> list[Row]:
    """Many cycles at four ranks, tensor parallel 2."""
    progress(f"the lab, {cycles} cycles on 4 ranks")
    run = session.lab("offload", session.logs / "leaks", ranks=4, tp=2, steps=1, cycles=cycles)
    verdict = {one.check: one for one in run.verdict()}
    rows = [
        row(f"{what} leaked, 4 ranks, tp2, {cycles} cycles", _one(verdict[check].measured), unit="1", limit=0.0)
        for check, what in LEAKS.items()
    ]
    return [*rows, _overhead(run)]


def _one(measured: float | None) -> list[float]:
    return [] if measured is None else [measured]


def _overhead(run: Run) -> Row:
    """What the meters took, as a share of the phases that they measured; a sample is a rank."""
    frame = run.frame()
    sums = frame[frame["metric"].isin(["seconds", "overhead_seconds"])].groupby(["rank", "metric"])["value"].sum()
    table = sums.unstack("metric")
    shares = (100 * table["overhead_seconds"] / table["seconds"]).tolist()
    return row("the lab's own measuring, of the time it measures", shares, unit="%", limit=1.0)


def bitwise(session: Session, name: str) -> list[Row]:
    """One kind of parallelism: the steps and tensors that differ from a run without any release."""
    what = f"trained on bit for bit: {name}"
    settings = GRID[name]
    command = "kit run offload " + " ".join(f"--set {key}={str(value).lower()}" for key, value in settings.items())
    progress(what)
    try:
        run = session.lab("offload", session.logs / name.replace(" ", "-"), steps=1, cycles=2, **settings)
    except KitError as error:
        return [Row(what=what, unit="differ", limit=0.0, note=f"{command}: {str(error).partition(chr(10))[0]}")]
    verdict = run.verdict()
    failed = [one.check for one in verdict.failed]
    passed = sum(one.passed is True for one in verdict)
    said = f"{command}: {passed} checks passed, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}"
    (judged,) = [one for one in verdict if one.check == "training_continues_bitwise"]
    return [row(what, _one(judged.measured), unit="differ", limit=0.0, note=said)]


def cost(*, ranks: int, cycles: int) -> Cost:
    """A run of the lab with the tiny job: three builds, three times the steps of a job, and groups that go and come."""
    return Cost(megatron=1, job=4, step=3 * (cycles + 1), group=60 * cycles) * crowd(ranks)
