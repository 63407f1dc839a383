"""`kit bench routing`: the offload lab with collectives through torch's own backends and through torchcomms, turn by turn.

What the job comes to (losses, gradient norms, a digest of all tensors) must be the same to the last bit; times are told as a ratio, on
over off. Fresh ranks for each run. Where routing would not be in effect here, nothing is measured and the rows say why.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.bench.report import progress, tell
from kit.bench.rows import Row, row
from kit.routing import FLAG
from kit.world import World

if TYPE_CHECKING:
    from kit.results import Run

WAYS = ("torch", "torchcomms")
PHASES = ("build", "train", "release", "reload", "talk")
NUMBERS = "losses, gradient norms and digests that differ, on against off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    turns: int = 5
    cycles: int = 3


QUICK = Sizes(turns=1, cycles=1)


def main(as_json: bool, sizes: Sizes = Sizes()) -> int:
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch:
        logs = Path(scratch)
        with World(1, env={FLAG: "1"}, logs=logs / "asked") as world:
            said = world.call("kit.routing:describe")[0]
            provenance = world.call("kit.measure:provenance")[0]
        rows = side_by_side(logs, sizes) if said["effective"] else not_measured(str(said["why"]))
    tell("routing", rows, provenance, as_json=as_json)
    return 0


def not_measured(why: str) -> list[Row]:
    note = f"not measured: {why}"
    return [
        Row(what=NUMBERS, unit="1", limit=0.0, note=note),
        *(Row(what=f"{phase}, time on over off", unit="ratio", note=note) for phase in PHASES),
    ]


def side_by_side(logs: Path, sizes: Sizes) -> list[Row]:
    from kit.results import outcomes  # here, since the ranks' interpreter need not have what tables are made of

    differ = compared = 0
    ratios: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(sizes.turns):
        progress(f"offload through torch and through torchcomms, turn {turn + 1} of {sizes.turns}")
        order = WAYS if turn % 2 == 0 else WAYS[::-1]  # whatever gets slower with time is not one way's fault
        runs = {way: once(logs / f"{turn}-{way}", way, sizes) for way in order}
        off, on = (runs[way] for way in WAYS)
        if missed := [row.why for row in on.verdict() if row.check == "routing_effective" and not row.passed]:
            return not_measured(missed[0])
        compared, found = outcomes(off, on)
        differ += found  # over all turns: one is enough
        for phase, some in ratios.items():
            some.append(seconds(on, phase) / seconds(off, phase))
    if not compared:
        return not_measured("the runs came to no number that could be compared")
    note = f"{compared} numbers in each turn; turns: {sizes.turns}"
    return [
        row(NUMBERS, [float(differ)], unit="1", limit=0.0, note=note),
        *(row(f"{phase}, time on over off", some, unit="ratio") for phase, some in ratios.items()),
    ]


def once(out: Path, way: str, sizes: Sizes) -> Run:
    from kit.public import run

    config: dict[str, Any] = {"routing": way, "cycles": sizes.cycles, "steps": 1}
    with contextlib.redirect_stdout(io.StringIO()):  # what ranks print stands in the run's logs
        made: Run = run("offload", out=out, **config)
    return made


def seconds(run: Run, phase: str) -> float:
    """All cycles of a phase, by the slowest rank of each."""
    frame = run.frame()
    taken = frame[(frame["phase"] == phase) & (frame["metric"] == "seconds")]
    return float(taken.groupby("cycle")["value"].max().sum())
