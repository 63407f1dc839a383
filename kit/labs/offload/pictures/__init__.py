"""The pictures of an offload run: memory through the phases, times, drift over cycles, counts, verdict.

Controls and checks of content are most of such a run's steps and not what it is about: they are summed up in one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.draw.general import COUNT_CHECKS, counts_of, drift
from kit.draw.plots import Pictures, Plot
from kit.labs.offload.pictures import cycles
from kit.labs.offload.pictures.gpu import gpu_bands
from kit.labs.offload.pictures.host import waterfall
from kit.results.units import counted

if TYPE_CHECKING:
    from kit.draw.plots import RunData, Scene

OURS = "kit.labs."


def ready(data: RunData) -> bool:
    """Whether something was released and observed."""
    return {"release", "idle"} <= set(data.phases)


def words(data: RunData) -> list[str]:
    """The job, how it was released, and how often."""
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config.get(name, 1) > 1]
    own = str(config.get("implementation", OURS))
    how = f"mode {config.get('mode')}" if own.startswith(OURS) else own
    number = sum(phase == "release" for _, phase in data.order)
    return [", ".join([str(config.get("size", "")), *sizes]), how, counted(number, "cycle")]


def sources(data: RunData) -> list[str]:
    return [name for name in ("anon_rss", "driver_used") if name in data.metrics()]


def memory(scene: Scene) -> None:
    """The host's memory above the GPU's."""
    found = sources(scene.data)
    for ax, source in zip(scene.figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        (waterfall if source == "anon_rss" else gpu_bands)(ax, scene.data, scene.theme)


PICTURES = Pictures(
    plots={
        "memory": Plot(
            "Memory by source", lambda data: bool(sources(data)), lambda data, _: 3.3 * len(sources(data)), memory
        ),
        "drift": drift("idle", "while released"),
        "times": Plot("Time per phase and rank", lambda _: True, lambda *_: 3.4, cycles.times),
        "census": Plot(
            "Groups, files, threads",
            lambda data: bool(counts_of(data)),
            lambda *_: 2.4,
            cycles.census,
            COUNT_CHECKS,
        ),
    },
    overview=(("memory",), ("times", "drift"), ("census",), ("verdict",)),
    ready=ready,
    words=words,
)
