"""The parts of the bench of offloading: each trial has fresh processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kit.errors import BadInput, KitError
from kit.labs.bench import KIT, Bench, Samples, ratios, run_part, show_progress, unmeasured
from kit.labs.discover import find
from kit.labs.lab import Drive
from kit.machine import GIB

MOVES = "kit.labs.bench_offload.ranks.moves"
SAVER = "torch_memory_saver"
NATIVE = "Megatron's own"
Trial = dict[str, Any]  # a rank's answer


def offload_tensors(bench: Bench, model: str) -> Iterator[Samples]:
    """One rank with no other at work, because copies of several ranks share the memory bandwidth, as do memcpy's."""
    lab = find("offload")
    assert lab.fits is not None
    try:
        lab.fits(lab.config(size=model, ranks=1, tp=1))  # type: ignore[call-arg]  # fields of this lab's own config
    except BadInput as error:
        yield unmeasured(f"{model}: tensors", error)
        return
    for trial in trials(bench, "out_and_back", model):
        yield from on_cuda(model, trial) if bench.device == "cuda" else on_host(model, trial)


def saver(bench: Bench, model: str) -> Iterator[Samples]:
    """torch_memory_saver in separate ranks, because it can only release memory that it allocated."""
    title = f"{model}: out and back"
    if bench.device == "cpu":
        yield unmeasured(title, "it pauses CUDA memory, which needs a GPU", who=SAVER)
        return
    try:
        for trial in trials(bench, "saved", model):
            if refused := trial.get("refused"):
                yield Samples(what=title, who=SAVER, note=refused)
                return
            note = f"{trial['left'] / GIB:.2f} GiB left the GPU, with what training leaves cached"
            for way in ("out", "back"):
                yield Samples(what=f"{model}: {way}", values=trial["times"][way], who=SAVER, note=note)
    except KitError as error:
        yield unmeasured(title, error, who=SAVER)


def trials(bench: Bench, function: str, model: str) -> Iterator[Trial]:
    with bench.world(1, preload=("megatron.core",), timeout_s=600) as world:
        for trial in range(bench.config.trials):
            show_progress(f"{function}, {model}, {trial + 1} of {bench.config.trials}")
            if trial:
                world.restart()
            yield from world.call(f"{MOVES}:{function}", size=model, cycles=bench.config.cycles)


def trial_title(model: str, trial: Trial) -> str:
    return f"{model}, {trial['tensors']} tensors, {trial['bytes'] / GIB:.2f} GiB"


def offload_times(model: str, trial: Trial, rows: list[tuple[str, str, str, str]]) -> Iterator[Samples]:
    """Seconds of each way: what, the name of its samples, who, and a note."""
    for title, name, who, note in rows:
        values = trial["times"].get(name, [])
        yield Samples(what=f"{trial_title(model, trial)}: {title}", values=values, who=who, note=note)


def over(model: str, trial: Trial, metric: str, title: str, *ways: str) -> Samples:
    return ratios(metric, f"{trial_title(model, trial)}: {title}", *(trial["times"][way] for way in ways))


def common(trial: Trial, one_by_one: str) -> list[tuple[str, str, str, str]]:
    refused = trial["refused"]
    return [
        ("out", "clone_out", one_by_one, "into new memory; frees nothing"),
        ("back", "clone_back", one_by_one, ""),
        *([] if refused else [("back", "native_back", NATIVE, "")]),
        ("out and back" if refused else "out", "native_out", NATIVE, refused),
    ]


def on_host(model: str, trial: Trial) -> Iterator[Samples]:
    threads = f"{trial['threads']} thread(s)"
    rows = [
        ("out, first cycle", "first_out", KIT, "includes populating the host memory"),
        ("back, first cycle", "first_back", KIT, ""),
        ("out", "steady_out", KIT, threads),
        ("out", "copy_out", "memcpy", "one thread, blocks of at most 1 GiB, both places warm"),
        ("back", "steady_back", KIT, threads),
        ("back", "populate", "populate, then copy", "one thread, new memory, large pages requested"),
        ("back", "pieces", "populate and copy by pieces", f"the same, but {threads} and 8 MiB at a time"),
        ("back", "copy_back", "memcpy", "warm: all pages are populated"),
        *common(trial, "a copy of every tensor"),
    ]
    yield from offload_times(model, trial, rows)
    yield over(model, trial, "out_over_memcpy", "out, time over memcpy's", "steady_out", "copy_out")
    title = "back, time over populate-then-copy's"
    yield over(model, trial, "back_over_populate", title, "steady_back", "populate")
    left = [100 * (1 - (full - empty) / trial["bytes"]) for full, empty in trial["resident"]]
    title = f"{trial_title(model, trial)}: of it still in anonymous memory when out"
    yield Samples(what=title, values=left, metric="left_resident", unit="%")


def on_cuda(model: str, trial: Trial) -> Iterator[Samples]:
    rows = [
        ("out, first cycle", "first_out", KIT, "includes pinning the host memory"),
        ("back, first cycle", "first_back", KIT, ""),
        ("out", "steady_out", KIT, ""),
        ("out", "copy_out", "pinned copy", ""),
        ("back", "steady_back", KIT, ""),
        ("back", "copy_back", "pinned copy", ""),
        ("out", "pageable_out", "pageable copy", "populated, unpinned host memory"),
        ("back", "pageable_back", "pageable copy", ""),
        *common(trial, ".cpu() of every tensor"),
    ]
    yield from offload_times(model, trial, rows)
    yield over(model, trial, "out_over_pinned", "out, time over a pinned copy's", "steady_out", "copy_out")
    yield over(model, trial, "back_over_pinned", "back, time over a pinned copy's", "steady_back", "copy_back")


def measure_offload(drive: Drive) -> None:
    way, _, model = drive.phase.partition(".")
    run_part(drive, lambda bench: (offload_tensors if way == "tensors" else saver)(bench, model))
