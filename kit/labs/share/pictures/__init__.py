"""The pictures of a share run: devices and their owners with requests, utilisation, versions, memory, and whole loops.

Colour is the pipeline in all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.draw.plots import Pictures, Plot, Table
from kit.labs.share import tables
from kit.labs.share.pictures import devices, loops, memory, use, versions
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.draw.plots import RunData


def ready(data: RunData) -> bool:
    """Whether a replica woke in a loop with a ledger."""
    return bool(data.order) and tables.shown(data.records) is not None


def words(data: RunData) -> list[str]:
    """The pipelines and their devices, and the planner."""
    config = data.config
    if "devices" not in config:  # another system's ledger
        return []
    names = ["a"] if config["scenario"] in ("A", "E") else ["a", "b"]
    trains = ", ".join(f"{name} on {some(config[f'train_{name}'])}" for name in names)
    steps = " and ".join(str(config[f"steps_{name}"]) for name in names)
    return [
        config["size"], counted(config["devices"], "device"), f"training: {trains}",
        f"planner {config['planner']}", f"{steps} steps",
    ]  # fmt: skip


def some(devices: Sequence[int]) -> str:
    whole = list(devices) == list(range(devices[0], devices[-1] + 1)) and len(devices) > 2
    return f"{devices[0]}-{devices[-1]}" if whole else ",".join(map(str, devices))


SECONDS = dict.fromkeys(("seconds", *tables.USES[:-1], "unused"), "s")
PICTURES = Pictures(
    plots={
        "devices": Plot("Devices, owners and requests", ready, lambda data, _: devices.height(data), devices.devices),
        "utilisation": Plot("Utilisation of devices", ready, lambda data, _: use.height(data), use.utilisation),
        "versions": Plot(
            "Versions over time, by replica", ready, lambda data, _: versions.height(data), versions.versions
        ),
        "device-memory": Plot(
            "Memory of devices", memory.has, lambda data, _: memory.height(data), memory.memory, ("peak_fits",)
        ),
        "loops": Plot("Loops and waits", loops.has, lambda data, _: loops.height(data), loops.loops),
    },
    overview=(("devices",), ("utilisation",), ("versions",), ("device-memory",), ("loops",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "leases": Table("Devices and their owners", lambda run: tables.leases(run.frame()), "unused", SECONDS),
        "switches": Table(
            "Every switch",
            lambda run: tables.switches(run.frame()),
            "total",
            dict.fromkeys(("at", "shrink", "expand", "weights", "total"), "s"),
        ),
        "requests": Table(
            "Requests for devices",
            lambda run: tables.requests(run.frame()),
            "longest wait",
            dict.fromkeys(("mean wait", "longest wait", "waited"), "s"),
        ),
        "pipelines": Table(
            "Every pipeline",
            lambda run: tables.progress(run.frame()),
            "seconds",
            dict.fromkeys(("seconds", "alone", "device-seconds", "working", "switching", "waited"), "s"),
        ),
        "loops": Table("Loop by loop", lambda run: tables.loops(run.frame()), units={"seconds": "s"}),
    },
)
