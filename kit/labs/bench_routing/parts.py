"""The part of the bench of routing: runs of a lab in turns, on and off."""

from __future__ import annotations

from collections.abc import Iterator

from kit.labs.bench import Bench, Samples, ratios, run_part, show_progress, unmeasured
from kit.labs.lab import Drive
from kit.results import Run, outcomes
from kit.routing import FLAGS, TORCHCOMMS

PHASES = ("build", "train", "release", "reload", "talk")
NUMBERS = "losses, gradient norms and digests that differ, on against off"


def offload(bench: Bench) -> Iterator[Samples]:
    with bench.world(1, env={FLAGS[TORCHCOMMS]: "1"}) as world:
        routing = world.call("kit.routing:routing_status", name=TORCHCOMMS)[0]
    yield from compare_routed(bench) if routing["effective"] else not_measured(str(routing["why"]))


def not_measured(why: str) -> Iterator[Samples]:
    yield unmeasured(NUMBERS, why, metric="numbers_differ", unit="1")
    for phase in PHASES:
        yield unmeasured(f"{phase}, time on over off", why, metric="on_over_off", unit="ratio")


def compare_routed(bench: Bench) -> Iterator[Samples]:
    turns = bench.config.turns
    for turn in range(turns):
        show_progress(f"offload through torch and through torchcomms, turn {turn + 1} of {turns}")
        order = ("torch", "torchcomms")[:: -1 if turn % 2 else 1]  # so neither profits from its position
        runs = {way: routed_run(bench, f"{turn}-{way}", way) for way in order}
        off, on = runs["torch"], runs["torchcomms"]
        if missed := [row.why for row in on.verdict() if row.check == "routing_effective" and not row.passed]:
            yield from not_measured(missed[0])
            return
        compared, differing, _, single = outcomes(off, on)
        if not compared:
            yield from not_measured("the runs have no comparable number")
            return
        note = f"{compared} numbers in each turn"
        yield Samples(what=NUMBERS, values=[float(differing + single)], metric="numbers_differ", unit="1", note=note)
        for phase in PHASES:
            above, below = phase_seconds(on, phase), phase_seconds(off, phase)
            yield ratios("on_over_off", f"{phase}, time on over off", [above], [below], unit="ratio")


def routed_run(bench: Bench, out: str, way: str) -> Run:
    return bench.lab("offload", out, routing=way, cycles=bench.config.cycles, steps=1)


def phase_seconds(run: Run, phase: str) -> float:
    """All cycles of a phase, by the slowest rank of each."""
    frame = run.frame()
    seconds = frame[(frame["phase"] == phase) & (frame["metric"] == "seconds")]
    return float(seconds.groupby("cycle")["value"].max().sum())


def measure_routing(drive: Drive) -> None:
    run_part(drive, offload)
