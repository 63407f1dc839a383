"""How the picture splits a GPU's memory by use, on made-up records like those of a real GPU."""

from __future__ import annotations

import pytest

from kit.draw.data import read
from kit.labs.offload.charts import GPU, gpu_memory
from kit.results import Row, Run, create_run

MIB = 2**20
CONTEXT, WORLD, COMMUNICATORS = 500, 30, 300  # WORLD's memory is part of CONTEXT
JOB, SCRATCH, SLACK, STRANGERS = (10, 20, 40), 5, 7, 60
PHASES = ((0, "start"), (0, "baseline"), (0, "build"), *((1, p) for p in ("train", "fingerprint", "release", "idle")))


@pytest.fixture
def seen(tmp_path):
    """An offload run on CUDA up to its first idle, in MiB; `reported` selects what the driver and NCCL report in addition."""

    def make(*, ranks=1, shared=False, reported=()):
        writer = create_run(tmp_path, "offload", {}, {})

        def write(rank, cycle, phase, rows):
            about = {"run": writer.id, "lab": "offload", "cycle": cycle, "phase": phase, "rank": rank, "unit": "B"}
            clock = 1.8e9 + PHASES.index((cycle, phase)) if phase != "run" else 0
            writer.append([Row(**about, metric=name, value=value, time=clock) for name, value in rows.items()])

        for rank in range(ranks):
            write(rank, 0, "run", {"gpu": 0 if shared else rank})
            for cycle, phase in PHASES:
                busy = phase in {"train", "fingerprint"}
                allocated = (sum(JOB) if busy else 0) + SCRATCH
                own = CONTEXT + (COMMUNICATORS if busy else 0) + allocated + SLACK
                rows = {"driver_used": own * (ranks if shared else 1) + STRANGERS, "peak_allocated": allocated + 1}
                rows |= {"allocated": allocated, "reserved": allocated + SLACK}
                hidden = "sometimes" in reported and phase == "idle"
                rows |= {"process_used": own} if "process" in reported and not hidden else {}
                if "nccl" in reported and phase in {"baseline", "fingerprint", "idle"}:
                    rows["communicators_total"] = WORLD + (290 if busy else 0)
                    rows["communicators_total"] += 2000 if "suspended" in reported and phase == "idle" else 0
                if phase == "release":
                    rows |= dict(zip(("weights_bytes", "grads_bytes", "optimizer_bytes"), JOB, strict=True))
                rows |= {"left_bytes": 2} if phase == "idle" else {}
                write(rank, cycle, phase, {"seconds": 1, **{name: value * MIB for name, value in rows.items()}})
        writer.finish()
        return read(Run(writer.dir))

    return make


def at(seen, phase):
    """Return the parts of a phase's bar from the bottom up: sizes in MiB by name and source."""
    rows = gpu_memory(seen)
    row = rows[rows["place"] == phase].iloc[0]
    sizes = {look.word.format(**rows.attrs): row.get(part, 0.0) / MIB for part, look in GPU.looks.items()}
    return {name: size for name, size in sizes.items() if size > 0}


def test_every_part_of_a_gpu_is_named_with_who_reported_it(seen):
    run = seen()
    assert at(run, "train") == {
        "CUDA context, WORLD, others (driver, baseline)": CONTEXT + STRANGERS,
        "communicators (driver's residual)": COMMUNICATORS,
        "weights (the job)": 10,
        "gradients (the job)": 20,
        "optimizer (the job)": 40,
        "other tensors (allocator)": SCRATCH,
        "slack (allocator)": SLACK,
    }
    assert at(run, "release") == {
        "CUDA context, WORLD, others (driver, baseline)": CONTEXT + STRANGERS,
        "not released (the job)": 2,
        "other tensors (allocator)": SCRATCH - 2,
        "slack (allocator)": SLACK,
    }


def test_the_parts_add_up_to_what_the_driver_says(seen):
    for reported in ((), ("process",), ("nccl",), ("process", "nccl")):
        run = seen(ranks=2, reported=reported)
        for phase, whole in (("train", CONTEXT + COMMUNICATORS + sum(JOB) + SCRATCH + SLACK + STRANGERS),):
            assert sum(at(run, phase).values()) == pytest.approx(whole), reported


def test_the_library_and_the_driver_s_list_of_processes_speak_for_themselves(seen):
    parts = at(seen(reported=("process", "nccl")), "train")
    assert parts["communicators (NCCL's statistics)"] == WORLD + 290
    assert parts["not counted by NCCL (driver's residual)"] == COMMUNICATORS - 290
    assert parts["other processes (driver)"] == STRANGERS
    assert parts["CUDA context (driver, baseline)"] == CONTEXT - WORLD
    assert at(seen(reported=("process",)), "train")["CUDA context, WORLD (driver, baseline)"] == CONTEXT


def test_what_nccl_counts_and_is_not_on_the_gpu_takes_nothing(seen):
    assert at(seen(reported=("nccl", "suspended")), "idle")["communicators (NCCL's statistics)"] == WORLD


def test_a_gpu_that_ranks_share_is_one_bar_of_all_of_them(seen):
    parts = at(seen(ranks=2, shared=True), "train")
    assert parts["CUDA context, WORLD, others (driver, baseline)"] == 2 * CONTEXT + STRANGERS
    assert parts["communicators (driver's residual)"] == 2 * COMMUNICATORS
    assert parts["weights (the job)"] == 20


def test_or_a_bar_of_one_of_them_where_the_driver_tells_of_each(seen):
    parts = at(seen(ranks=2, shared=True, reported=("process",)), "train")
    assert parts["weights (the job)"] == 10
    own = CONTEXT + COMMUNICATORS + sum(JOB) + SCRATCH + SLACK
    assert parts["other processes and ranks (driver)"] == own + STRANGERS


def test_a_driver_that_tells_of_processes_only_sometimes_is_not_asked(seen):
    assert at(seen(reported=("process", "sometimes")), "train") == at(seen(), "train")
