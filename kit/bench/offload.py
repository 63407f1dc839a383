"""`kit bench offload`: how fast a job's tensors leave the device and come back.

Plain copies of the same bytes take turns with each move in the same processes. A ratio is of times: 1.43 times memcpy's time is 0.7 of its
speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kit.bench.session import Part, Row, Session, over, progress, row, unmeasured
from kit.errors import BadInput, KitError

OUT, BACK, ON_CUDA = 1 / 0.7, 1 / 0.8, 1 / 0.8
GIB = 2**30
SAVER = "torch_memory_saver"
NEW = "into new memory; frees nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    models: tuple[str, ...] = ("125m", "qwen2.5-0.5b")
    trials: int = 2  # fresh processes for each model: as many first cycles
    cycles: int = 5  # steady ones in each trial


QUICK = Sizes(models=("125m",), trials=1, cycles=3)


def parts(sizes: Sizes, _: str) -> dict[str, Part]:
    few: dict[str, Any] = {"trials": sizes.trials, "cycles": sizes.cycles}
    return {
        **{f"tensors.{model}": partial(tensors, model=model, **few) for model in sizes.models},
        **{f"saver.{model}": partial(saved, model=model, **few) for model in sizes.models},
    }


# -- tensors out and back beside plain copies of the same bytes ------------------------------------------------------------


def tensors(session: Session, model: str, *, trials: int, cycles: int) -> Iterator[Row]:
    """One rank, no other at work: the copies of several ranks share the memory's bandwidth, and so do memcpy's."""
    from kit.labs.offload import LAB

    assert LAB.fits is not None
    try:
        LAB.fits(LAB.config(size=model, ranks=1, tp=1))  # type: ignore[call-arg]  # fields of this lab's own config
    except BadInput as error:
        yield unmeasured(f"{model}: tensors", error)
        return
    seen: list[dict[str, Any]] = []
    with session.world(1, preload=("megatron.core",), timeout_s=600) as world:
        made = _cuda_rows if world.device.startswith("cuda") else _cpu_rows
        for trial in range(trials):
            progress(f"tensors of {model}, {trial + 1} of {trials}")
            if trial:
                world.restart()
            seen += world.call("kit.bench.onranks.release:tensors", size=model, cycles=cycles)
            yield from made(model, seen)


def saved(session: Session, model: str, *, trials: int, cycles: int) -> Iterator[Row]:
    """torch_memory_saver, in ranks of its own: it must have made the memory that it gives back."""
    what = f"{model}: out and back"
    if session.device == "cpu":
        yield unmeasured(what, "it pauses CUDA memory, which needs a GPU", who=SAVER)
        return
    seen: list[dict[str, Any]] = []
    with session.world(1, preload=("megatron.core",), timeout_s=600) as world:
        if refused := world.call("kit.bench.onranks.release:saver_refused")[0]:
            yield Row(what=what, who=SAVER, note=refused)
            return
        for trial in range(trials):
            progress(f"torch_memory_saver with {model}, {trial + 1} of {trials}")
            if trial:
                world.restart()
            try:
                seen += world.call("kit.bench.onranks.release:saved", size=model, cycles=cycles)
            except KitError as error:
                yield unmeasured(what, error, who=SAVER)
                return
            note = f"{min(one['left'] for one in seen) / GIB:.2f} GiB left the GPU, with what training leaves cached"
            for way in ("out", "back"):
                taken = [value for one in seen for value in one["times"][way]]
                yield row(f"{model}: {way}", taken, who=SAVER, note=note)


class Samples:
    """What the trials say of one model."""

    def __init__(self, model: str, seen: list[dict[str, Any]]) -> None:
        self.seen = seen
        self.what = f"{model}, {seen[0]['tensors']} tensors, {seen[0]['bytes'] / GIB:.2f} GiB"

    def of(self, name: str) -> list[float]:
        return [value for one in self.seen for value in one["times"].get(name, [])]

    def row(self, what: str, name: str, who: str = "kit", **about: Any) -> Row:
        return row(f"{self.what}: {what}", self.of(name), who=who, **about)

    def ratio(self, what: str, name: str, other: str, limit: float) -> Row:
        return over(f"{self.what}: {what}", self.of(name), self.of(other), limit=limit)

    def common(self, one_by_one: str) -> list[Row]:
        refused = self.seen[0]["refused"]
        left = [100 * (1 - (full - empty) / one["bytes"]) for one in self.seen for full, empty in one["resident"]]
        return [
            self.row("out", "clone_out", one_by_one, note=NEW),
            self.row("back", "clone_back", one_by_one),
            *([] if refused else [self.row("back", "native_back", "Megatron's own")]),
            self.row("out and back" if refused else "out", "native_out", "Megatron's own", note=refused),
            row(f"{self.what}: of it still in anonymous memory when out", left, unit="%", limit=10.0),
        ]


def _cpu_rows(model: str, seen: list[dict[str, Any]]) -> list[Row]:
    s, threads = Samples(model, seen), f"{seen[0]['threads']} thread(s)"
    rows_ = [
        s.row("out, first cycle", "first_out", note="the host memory it goes to must be supplied first"),
        s.row("back, first cycle", "first_back"),
        s.row("out", "steady_out", note=threads),
        s.row("out", "copy_out", "memcpy", note="one thread, blocks of at most 1 GiB, both places warm"),
        s.ratio("out, time over memcpy's", "steady_out", "copy_out", OUT),
        s.row("back", "steady_back", note=threads),
        s.row("back", "populate", "populate, then copy", note="one thread, new memory, large pages asked for"),
        s.row("back", "pieces", "populate and copy by pieces", note=f"the same, but {threads} and 8 MiB at a time"),
        s.row("back", "copy_back", "memcpy", note="warm: no page has to be supplied"),
        s.ratio("back, time over populate-then-copy's", "steady_back", "populate", BACK),
    ]
    return rows_ + s.common("a copy of every tensor")


def _cuda_rows(model: str, seen: list[dict[str, Any]]) -> list[Row]:
    s = Samples(model, seen)
    rows_ = [
        s.row("out, first cycle", "first_out", note="the host memory it goes to must be pinned first"),
        s.row("back, first cycle", "first_back"),
        s.row("out", "steady_out"),
        s.row("out", "copy_out", "pinned copy"),
        s.ratio("out, time over a pinned copy's", "steady_out", "copy_out", ON_CUDA),
        s.row("back", "steady_back"),
        s.row("back", "copy_back", "pinned copy"),
        s.ratio("back, time over a pinned copy's", "steady_back", "copy_back", ON_CUDA),
        s.row("out", "pageable_out", "pageable copy", note="host memory that is there, and not pinned"),
        s.row("back", "pageable_back", "pageable copy"),
    ]
    return rows_ + [one for one in s.common(".cpu() of every tensor") if one.unit != "%"]
