"""What benches share on the notebook side: parts that start Worlds, and what they measured, recorded sample by sample.

A bench is a lab without ranks; each part is a driven step. What is compared is measured in one part, in turns, and the rules
are about ratios to a control of the same run where there is one. If a part breaks, a record has the reason and the next part runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kit.errors import KitError
from kit.labs.discover import find
from kit.labs.lab import Drive, Lab
from kit.machine import busy_seconds, has_gpu_driver
from kit.nccl import SHARED_GPU
from kit.results import Run
from kit.results.samples import CEILING, OTHERS, SEAT, seat_of
from kit.world import World
from kit.world.world import Printer, Worlds

KIT = "kit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Measurements of one thing: `metric` is the rule that judges them, or the kind of number. `ceiling` is the best that the machine
    allows. Without values `note` gives the reason. `ids` describe them for programs (way, groups, ranks, ...)."""

    what: str
    values: Sequence[float] = ()
    metric: str = "time"
    who: str = KIT
    unit: str = "s"
    ceiling: float | None = None
    note: str = ""
    ids: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def ratios(metric: str, title: str, above: Sequence[float], below: Sequence[float], **about: Any) -> Samples:
    """Ratios turn by turn, so that a disturbance of the machine affects both sides."""
    values = [upper / lower for upper, lower in zip(above, below, strict=True)]
    return Samples(**{"what": title, "values": values, "metric": metric, "unit": "x", **about})


def unmeasured(title: str, why: KitError | str, **about: Any) -> Samples:
    return Samples(what=title, note=f"not measured: {without_details(why)}", **about)


def without_details(text: object) -> str:
    return str(text).partition("\n")[0]


class Silent(Printer):
    """An observer of a lab that a part runs: the ranks' output is in that run's logs only."""

    def output(self, rank: int, text: str) -> None: ...


class Bench:
    """What a part works with: the config, the device, a folder, Worlds, and runs of labs."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.config = drive.config
        asked = drive.config.device
        # `auto` is the GPU if there is a driver, even if torch cannot use it; the error then names the reason.
        self.device: str = asked if asked != "auto" else "cuda" if has_gpu_driver() else "cpu"
        self.folder = drive.folder / "parts" / drive.phase
        self.logs = drive.folder / "logs" / drive.phase
        self.logs.mkdir(parents=True, exist_ok=True)
        self.seats: list[dict[str, Any]] = []

    def world(self, ranks: int, *, device: str = "", **options: Any) -> World:
        """A World on the bench's device. Ranks that cannot use the GPU raise instead of using the CPU."""
        options.setdefault("logs", self.logs)
        options.setdefault("observer", self.drive.quiet)
        made = World(ranks, device=device or self.device, **options)
        try:
            status = made.status()
            self.sit({"ranks": ranks, "devices": [row["device"] for row in status], "why": status[0]["why"]})
            self.drive.tell({"rank0": made.call("kit.measure:provenance", ranks=[0])[0]})
        except BaseException:
            made.close()
            raise
        return made

    def worlds(self, sizes: Sequence[int]) -> Worlds:
        """Worlds for several runs of a lab with separate replicas. `with` ends them."""
        return Worlds(sizes, isolate=True, device=self.device, preload=("megatron.core",), logs=self.logs)

    def lab(self, name: str, out: str, *, world: World | Worlds | None = None, **config: Any) -> Run:
        """A run of a lab on the bench's device, or on the ranks of a World; its folder is kept in that of the bench's run."""
        config.setdefault("device", self.device if world is None else world.device)
        with Lab(find(name), config, out=self.folder / out, world=world, observe=lambda _: Silent()) as made:
            run = made.run()
        self.sit(seat_of(run.provenance))
        self.drive.tell({"rank0": run.provenance["rank0"]})
        return run

    def sit(self, seat: dict[str, Any]) -> None:
        """Keep which devices the ranks had."""
        if seat not in self.seats:
            self.seats.append(seat)
            self.drive.record(SEAT, seat["ranks"], text=seat["why"], devices=",".join(seat["devices"]))

    @property
    def sharing(self) -> bool:
        """Whether ranks of this part shared a GPU, which slows their collectives."""
        gpus = [[device for device in seat["devices"] if device.startswith("cuda")] for seat in self.seats]
        return any(len(set(devices)) < len(devices) for devices in gpus)

    def keep(self, samples: Samples) -> None:
        if self.sharing:
            samples = replace(samples, note="; ".join(filter(None, [samples.note, SHARED_GPU])))
        about: dict[str, Any] = {"what": samples.what, "who": samples.who, **samples.ids}
        # numpy's numbers are not JSON's
        for value in map(float, samples.values):
            self.drive.record(samples.metric, value, samples.unit, text=samples.note, **about)
        if not samples.values:
            self.drive.record(samples.metric, None, samples.unit, text=samples.note, **about)
        if samples.ceiling is not None:
            self.drive.record(f"{samples.metric}{CEILING}", samples.ceiling, samples.unit, **about)


Part = Callable[[Bench], Iterable[Samples]]


def run_part(drive: Drive, part: Part) -> None:
    """Run one part: what it measured is recorded as it comes; if it breaks, the reason."""
    bench = Bench(drive)
    show_progress(drive.phase)
    began, (all_before, own_before) = time.monotonic(), busy_seconds()
    try:
        for samples in part(bench):
            bench.keep(samples)
    except KitError as error:
        bench.keep(unmeasured(drive.phase, error))
    all_after, own_after = busy_seconds()
    used = (all_after - all_before) - (own_after - own_before)
    drive.record(OTHERS, max(0.0, used / (time.monotonic() - began)), "cores", of=os.cpu_count() or 1)


def show_progress(text: str) -> None:
    """Print the current measurement, on a terminal only."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr)
