"""A made-up run in the shape of the offload lab's, as large as asked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit.labs.definition import Step
from kit.labs.discover import find, validate
from kit.machine import MIB
from kit.measure import provenance
from kit.public import load
from kit.results import Row, create_run
from kit.results.records import SEALED, read_json, write_json

RANKS = 4
# Phases after which the job has released its memory.
HELD = {"release", "idle", "talk", "start", "baseline", "end", "ownership"}


def made_up(folder: Path, records: int) -> Path:
    """A run with at least this number of records: a job on four ranks, released and reloaded as often as needed."""
    lab = find("offload")
    cycles = 1
    while (
        sum(len(facts_of(step, 0)) for step in lab.plan(validate(lab, {"ranks": RANKS, "cycles": cycles}))) * RANKS
        < records
    ):
        cycles += 1
    config = validate(lab, {"ranks": RANKS, "cycles": cycles})
    writer = create_run(folder, lab.name, asdict(config), provenance())
    clock = 1.8e9
    for step in lab.plan(config):
        clock += 0.2
        for rank in range(RANKS):
            about: dict[str, Any] = {"run": writer.id, "lab": lab.name, "cycle": step.cycle, "phase": step.phase}
            about |= {"rank": rank, "time": clock}
            writer.append(
                [Row(**about, metric=metric, value=value, unit=unit) for metric, value, unit in facts_of(step, rank)]
            )
    writer.finish()
    return writer.dir


def made_up_runs(folder: Path, count: int) -> None:
    """This many runs, each with its verdict, as small as a run can be: copies of one with other names."""
    first = made_up(folder, 1000)
    load(first).verdict().write(first / "verdict.json")
    info, verdict = read_json(first / "run.json"), (first / "verdict.json").read_bytes()
    info[SEALED] = None  # these have no rows and another config, which a seal would call edited
    for number in range(count - 1):
        name = f"offload-20260101-120000-{number:04x}"
        (copy := folder / name).mkdir()
        write_json(copy / "run.json", {**info, "run": name, "config": {**info["config"], "seed": number}})
        (copy / "verdict.json").write_bytes(verdict)


def facts_of(step: Step, rank: int) -> list[tuple[str, float, str]]:
    """A rank's answer after a phase."""
    held = 0 if step.phase in HELD else 348
    sizes = {"rss": 320 + held, "anon_rss": 280 + held + 0.01 * step.cycle + rank, "shared_rss": 40, "pss": 300 + held}
    counts = dict.fromkeys(("groups", "fds", "sockets", "threads"), 20 if held else 1)
    rows = [("seconds", 0.15 / (1 + step.cycle % 7), "s"), ("overhead_seconds", 1e-3, "s")]
    rows += [(name + when, size * MIB, "B") for name, size in sizes.items() for when in ("", "_before")]
    rows += [(name + when, count, "1") for name, count in counts.items() for when in ("", "_before")]
    rows.append(("peak_rss", (330 + held) * MIB, "B"))
    if step.phase in {"release", "reload"}:
        rows += [("groups_seconds", 0.02, "s"), ("tensors_seconds", 0.1, "s")]
        rows += [(f"{kind}_bytes", 87.0 * MIB, "B") for kind in ("weights", "grads", "optimizer", "total")]
    if step.phase == "idle":
        rows += [(name, 0, "1") for name in ("left_bytes", "initialised", "old_groups_alive", "stale_usable")]
    if step.phase == "verify":
        zeros = ("membership_changed", "options_changed", "stale_holders", "unchecked", "tensors_changed", "broken")
        rows += [*((name, 0, "1") for name in zeros), ("tensors_hashed", 300, "1")]
    return rows
