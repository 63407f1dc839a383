"""Probe 10: tiny training jobs, and a communicator that is suspended and resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.preflight.probes.common import Line, Seen, Settings, mib, on_ranks, started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.preflight.report import Report


def jobs(report: Report, device: str, settings: Settings) -> None:
    """10: tiny jobs give the same bits twice; experts; suspend and resume."""
    if not settings["megatron"]:
        report.row("tiny jobs", None, why="the ranks' Python has no megatron.core")
        return
    with started(report, device, settings, megatron=True) as world:
        for layout in ({"tp": 2}, {"pp": 2}):
            name = "".join(f"{key}{value}" for key, value in layout.items())
            report.at(f"tiny jobs with {name}: two steps, twice, in float32 and bfloat16")
            measured = on_ranks(world, "jobs:twice", layout=layout, dtypes=["float32", "bfloat16"])
            for dtype in ("float32", "bfloat16"):
                report.row(*bitwise(f"{name} {dtype}", [one[dtype] for one in measured]))
            if "tp" in layout:
                plain = [one["float32"] for one in measured]
                report.time(step=max(one["step"] for one in plain), job=max(one["job"] for one in plain))
                report.time(layout=max(one["layout"] for one in measured))
        report.at("one step with four experts")
        seen = on_ranks(world, "jobs:experts")
        report.row("experts, one step", passed=all(one["finite"] for one in seen), why=f"loss {seen[0]['loss']:.4f}")
        report.at("a communicator suspended and resumed")
        for row in suspend_rows(on_ranks(world, "jobs:suspended")):
            report.row(*row)


def bitwise(name: str, ranks: Sequence[Seen]) -> tuple[str, bool, float, str, str]:
    """Losses, gradient norms and every tensor after two steps, of two jobs."""
    apart = {number: one["apart"] for number, one in enumerate(ranks) if one["apart"]}
    fine = not apart and all(one["finite"] for one in ranks)
    why = f"{ranks[0]['tensors']} values compared a rank, loss {ranks[0]['loss']:.4f}"
    if apart:
        why = "; ".join(f"rank {number} differs in {', '.join(names)}" for number, names in apart.items())
    elif not fine:
        why = "a loss or a gradient norm is not finite"
    return f"{name}, step", fine, 1e3 * max(one["step"] for one in ranks), "ms", why


def suspend_rows(ranks: Sequence[Seen]) -> list[Line]:
    first = ranks[0]
    if "refused" in first:
        return [("suspend", None, None, "", first["refused"])]
    if errors := [one["error"] for one in ranks if "error" in one]:
        return [("suspend", False, None, "", errors[0])]
    stats = f"NCCL's statistics of rank 0: {first['stats'][0]} before, {first['stats'][1]} while suspended"
    freed = mib(max(one["freed"] for one in ranks))
    right = all(one["right"] for one in ranks)
    return [
        ("suspend frees", freed > 0, freed, "MiB", stats),
        ("suspend", True, max(one["suspend"] for one in ranks), "s", ""),
        (
            "resume",
            right,
            max(one["resume"] for one in ranks),
            "s",
            "the sum is right again" if right else "the sum is wrong",
        ),
    ]
