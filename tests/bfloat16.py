"""Runs every fault of `stream` and `split` in bfloat16, and the right code with the same settings: `python -m tests.bfloat16 [FAULT]...`.

Writes `data/reference/bfloat16.md`. With names of faults, only these run, and their rows are printed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import kit
from kit.labs.definition import Fault
from kit.labs.split.faults import FAULTS
from kit.labs.stream.faults import OF_RANKS
from kit.results import VerdictRow
from kit.world.world import Worlds

PAGE = Path(__file__).resolve().parents[1] / "data" / "reference" / "bfloat16.md"
# Faults that a CPU can show in a run that comes to its end, and smaller jobs for them.
LABS = {
    "split": (FAULTS, (2,), {"layers": 1, "microbatches": 5}),
    "stream": (OF_RANKS, (1, 1), {}),
}
HEAD = """# Faults in bfloat16

`python -m tests.bfloat16` runs every fault of the labs `split` and `stream` with `dtype=bfloat16`, and the right code with the same
settings, on the CPU. The number is that of the check that catches the fault.

| lab | fault | check | right code | with the fault | limit | caught |
|---|---|---|---|---|---|---|
"""


def shown(row: VerdictRow) -> str:
    return "-" if row.measured is None else f"{row.measured:.3g}"


def lines(lab: str, names: list[str]) -> Iterator[str]:
    faults, sizes, smaller = LABS[lab]
    right: dict[str, kit.results.Verdict] = {}
    with contextlib.closing(world_of(sizes)) as world:
        for fault in (fault for fault in filter(is_judged, faults) if not names or fault.name in names):
            if "dtype" in fault.needs:
                yield f"| {lab} | {fault.name} | `{fault.caught_by}` | - | - | - | refused: within the rounding of bfloat16 |"
                continue
            config = {**smaller, **fault.set, "dtype": "bfloat16"}
            key = repr(config)
            if key not in right:
                right[key] = kit.run(lab, world=world, **config).verdict()
            verdict = kit.run(lab, fault=fault.name, world=world, **config).verdict()
            sound, broken = (
                next(row for row in each if row.check == fault.caught_by) for each in (right[key], verdict)
            )
            wrong = sorted(row.check for row in right[key] if row.passed is False)
            caught = "yes" if broken.passed is False and sound.passed else "no"
            also = f"; the right code fails {', '.join(wrong)}" if wrong else ""
            numbers = " | ".join([shown(sound), shown(broken), f"{broken.limit:.3g}", caught + also])
            yield f"| {lab} | {fault.name} | `{fault.caught_by}` | {numbers} |"


def world_of(sizes: tuple[int, ...]) -> kit.World | Worlds:
    env, preload = {"OMP_NUM_THREADS": "1"}, ("megatron.core",)
    if len(sizes) == 1:
        return kit.World(*sizes, env=env, preload=preload)
    return Worlds(sizes, isolate=True, env=env, preload=preload)


def is_judged(fault: Fault) -> bool:
    return fault.exit == 1 and "cpu" in fault.devices


def main(names: list[str]) -> None:
    rows = []
    for lab in LABS:
        for line in lines(lab, names):
            print(line, file=sys.stderr, flush=True)
            rows.append(line)
    if not names:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
