"""Probes 1 to 5 and 10: seats, collectives, groups, exact destroy and reload, an absent peer; tiny training jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kit import gpu
from kit.errors import KitError, RankTimeout
from kit.preflight.probes import MIB, Line, Seen, Settings, mib, on_ranks, started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.preflight.report import Report
    from kit.world import World


DEADLINE_S = 3.0
NVIDIA_SMI_S = 3.0
DRIVER_SLACK = 16 * MIB  # of two ranks on one GPU: the driver hands out memory in 2 MiB pages


def seats(report: Report, device: str, settings: Settings) -> None:
    """1: two ranks with Megatron loaded before the fork find a working device."""
    with started(report, device, settings, megatron=settings["megatron"]) as world:
        report.at("a kernel on every rank")
        places = on_ranks(world, ":place")
        status = world.status()
        first = places[0]
        names = ", ".join(f"rank {number}: {one['device']}" for number, one in enumerate(places))
        wrong = [one for one in places if not one["device"].startswith(device)]
        report.row("seats", passed=not wrong, why=f"{names} ({status[0]['why']})")
        report.row("kernel", passed=all(one["sum"] == 999_000.0 for one in places), why="a sum on the device, by value")
        if device == "cpu":
            report.needs_gpu("context after the fork", "compute mode", "architecture", "NCCL settings")
            return
        poisoned = any(one["poisoned"] for one in places)
        report.row("context after the fork", not poisoned, "CUDA was not started before it")
        report.row(*architecture(first))
        report.row(*watchdog(places))
        report.at("nvidia-smi")
        report.row(*compute_mode(len({one["device"] for one in places}) < len(places)))


def architecture(place: Seen) -> Line:
    major, minor = place["capability"]
    fits, built = gpu.runs(place["built_for"], (major, minor)), " ".join(place["built_for"])
    return "architecture", fits, f"{place['name']} is sm_{major}{minor}; torch is built for {built}"


def watchdog(places: Sequence[Seen]) -> Line:
    """With torch's own settings a collective that failed ends its rank a minute later."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    values = sorted({one["env"].get(name, "not set") for one in places})
    settings = " ".join(f"{key}={value}" for key, value in sorted(places[0]["env"].items()))
    return "NCCL settings", values == ["0"], f"{name} is {', '.join(values)}; rank 0 has {settings or 'none'}"


def compute_mode(shared: bool) -> Line:
    """More than one process may use the GPU, where ranks share it."""
    rows, why = gpu.query("compute_mode", timeout_s=NVIDIA_SMI_S)
    modes = sorted({mode for (mode,) in rows})
    if not modes:
        return "compute mode", None, why or "nvidia-smi lists no GPU"
    return "compute mode", modes == ["Default"] or not shared, ", ".join(modes)


def all_reduces(report: Report, device: str, settings: Settings) -> None:
    """2: WORLD has its communicator at once, and sums are right and how fast."""
    with started(report, device, settings) as world:
        report.at("WORLD's communicator")
        eager = on_ranks(world, ":ready_at_once")
        unknown = "only NCCL tells, and only where torch shows it" if None in eager else ""
        report.row("WORLD ready before its first collective", None if unknown else all(eager), unknown)
        report.at("100 small all-reduces on the device and on the host")
        measured = on_ranks(world, ":all_reduces", n=100)
        where = {"device": f"all-reduce on {device}", "host": "all-reduce on the host"}
        for name, what in where.items():
            worst = max(one[name]["seconds"] for one in measured)
            right = all(one[name]["right"] for one in measured)
            report.row(what, passed=right, value=1e3 * worst, unit="ms", why="" if right else "a sum is wrong")
            report.time(**{"all_reduce" if name == "device" else "all_reduce_host": worst})
        seat = world.status()
        shared = seat[0]["device"] == seat[1]["device"] and device == "cuda"
        right = all(one["device"]["right"] for one in measured)
        why = f"{seat[0]['why']}; its times are those of a shared GPU" if shared else "no GPU is shared here"
        report.row("two ranks on one GPU", right if shared else None, why)


def groups(report: Report, device: str, settings: Settings) -> None:
    """3: ten groups of each backend under WORLD, used once each."""
    with started(report, device, settings) as world:
        for backend in ("nccl", "gloo"):
            if backend == "nccl" and device == "cpu":
                report.needs_gpu("NCCL groups")
                continue
            report.at(f"ten {backend} groups: made, used once, destroyed")
            measured = on_ranks(world, ":make_groups", backend=backend, n=10)
            worst = {part: max(one[part] for one in measured) for part in ("make", "use", "destroy")}
            right = all(one["right"] for one in measured)
            whole = worst["make"] + worst["use"]
            parts = ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in worst.items())
            report.row(f"{backend} group", right, parts if right else f"a sum is wrong; {parts}", whole, "s")
            if backend == "gloo":
                report.time(group_host=whole)
            if backend == "nccl" or device == "cpu":
                report.time(group=whole)


def rebuild(report: Report, device: str, settings: Settings) -> None:
    """4: ten groups destroyed exactly and made anew, twice; everything that they held is given back, and they are as before."""
    if not settings["megatron"]:
        report.row("exact destroy and reload", None, why="the ranks' Python has no megatron.core")
        return
    with started(report, device, settings, megatron=True) as world:
        report.at("ten groups made and used")
        first = on_ranks(world, ".rebuilding:begin", n=10)
        for number in (1, 2):
            report.at(f"ten groups destroyed and made anew, cycle {number}")
            seen = on_ranks(world, ".rebuilding:cycle")
            for row in rebuilt(first, seen):
                report.row(f"{row[0]}, cycle {number}", *row[1:])
            seconds = {part: max(one["seconds"][part] for one in seen) for part in ("destroy", "reload", "use")}
            back = seconds["reload"] + seconds["use"]
            report.row(f"destroy, cycle {number}", passed=True, value=seconds["destroy"], unit="s a group")
            report.row(f"reload, cycle {number}", passed=True, value=back, unit="s a group", why="and used once")
            report.time(group_reload=back, group_destroy=seconds["destroy"])
        if device == "cpu":
            report.needs_gpu("driver memory")


def rebuilt(first: Sequence[Seen], seen: Sequence[Seen]) -> list[Line]:
    """Every rank after a cycle against itself before it; what differs is named."""
    alive = sum(one["alive"] for one in seen)
    changed = sorted({f"rank {rank}, {what}" for rank, one in enumerate(seen) for what in one["changed_options"]})
    names = ["groups", "fds", "sockets", "threads", *(["driver"] if "driver" in first[0]["with"] else [])]
    return [
        *(off_baseline(name, first, seen) for name in names),
        ("group objects alive after a destroy", not alive, "allowed: 0", alive, ""),
        ("options", not changed, "; ".join(changed) or f"as before; group 1 has {first[0]['options']}"),
        ("bits", all(one["same_bits"] for one in seen), "an all-reduce over every group, before and after"),
    ]


def off_baseline(name: str, first: Sequence[Seen], seen: Sequence[Seen]) -> Line:
    """Without groups as before there were any, and with them as with the first ones: the rank that is furthest off."""
    off = {
        (rank, state): one[state][name] - before[state][name]
        for rank, (before, one) in enumerate(zip(first, seen, strict=True))
        for state in ("without", "with")
    }
    rank, state = max(off, key=lambda key: abs(off[key]))
    worst, one, before = off[rank, state], seen[rank], first[rank]
    if name == "driver":
        why = f"rank {rank}, {state} groups: {mib(one[state][name]):g} MiB, before {mib(before[state][name]):g}"
        why = f"{why}; allowed: {mib(DRIVER_SLACK):g}"
        return "driver memory off the baseline", worst <= DRIVER_SLACK, why, mib(worst), "MiB"
    why = f"rank {rank}, {state} groups: {one[state][name]}, before {before[state][name]}"
    return f"{name} off the baseline", not worst, why, worst, ""


def absent_peer(report: Report, device: str, settings: Settings) -> None:
    """5: who waits for a peer that does not come gets an error in time, lives on, and the peer is named."""
    with started(report, device, settings) as world:
        before = world.pids
        report.at("rank 1 comes late to an all-reduce")
        try:
            late: dict[str, Any] = {"rank": 1, "seconds": 1.5}
            world.call("kit.preflight.onranks.rebuilding:come_late", args=late, timeout_s=0.5)
            report.row("the late rank is named", passed=False, why="the call returned before its late rank came")
        except RankTimeout as error:
            named = ", ".join(map(str, error.culprits)) or "none"
            report.row("the late rank is named", passed=error.culprits == (1,), why=f"named: {named}; late: 1")
        idle_again(world, 6.0)
        report.at("a group of both ranks")
        ready = on_ranks(world, ".rebuilding:prepare", deadline_s=DEADLINE_S)
        report.row("a group with a deadline", passed=all(ready))
        report.at(f"both ranks wait {DEADLINE_S:g} s for a peer that does not come")
        ended = on_ranks(world, ".rebuilding:wait_in_vain", deadline_s=DEADLINE_S)
        for one in ended:
            in_time = bool(one["error"]) and DEADLINE_S / 2 <= one["seconds"] <= DEADLINE_S + 2
            why = f"deadline {DEADLINE_S:g} s; {one['error'] or 'no error was raised'}"
            report.row(f"{one['way']} without its peer", passed=in_time, value=one["seconds"], unit="s", why=why)
        report.at("WORLD after the failure")
        after = on_ranks(world, ".rebuilding:survive")
        alive = world.pids == before and all(one["host"] and one["device"] for one in after)
        report.row("survivors use WORLD again", passed=alive, why=f"on the host and on {device}, by value")
        report.row("the failed group is given up", passed=True, value=max(one["give_up"] for one in after), unit="s")


def idle_again(world: World, seconds: float) -> None:
    """Until the ranks have answered the call that was given up."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            world.run("pass")
        except RankTimeout:
            raise
        except KitError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


# -- probe 10: tiny training jobs, and a communicator that is suspended and resumed -------------------------------------


def jobs(report: Report, device: str, settings: Settings) -> None:
    """10: tiny jobs give the same bits twice; experts; suspend and resume."""
    if not settings["megatron"]:
        report.row("tiny jobs", None, why="the ranks' Python has no megatron.core")
        return
    with started(report, device, settings, megatron=True) as world:
        for layout in ({"tp": 2}, {"pp": 2}):
            name = "".join(f"{key}{value}" for key, value in layout.items())
            report.at(f"tiny jobs with {name}: two steps, twice, in float32 and bfloat16")
            measured = on_ranks(world, ".jobs:twice", layout=layout, dtypes=["float32", "bfloat16"])
            for dtype in ("float32", "bfloat16"):
                report.row(*bitwise(f"{name} {dtype}", [one[dtype] for one in measured]))
            if "tp" in layout:
                plain = [one["float32"] for one in measured]
                report.time(step=max(one["step"] for one in plain), job=max(one["job"] for one in plain))
                report.time(layout=max(one["layout"] for one in measured))
        report.at("one step with four experts")
        seen = on_ranks(world, ".jobs:experts")
        report.row("experts, one step", passed=all(one["finite"] for one in seen), why=f"loss {seen[0]['loss']:.4f}")
        report.at("a communicator suspended and resumed")
        for row in suspend_rows(on_ranks(world, ".jobs:suspended")):
            report.row(*row)


def bitwise(name: str, ranks: Sequence[Seen]) -> Line:
    """Losses, gradient norms and every tensor after two steps, of two jobs."""
    apart = {number: one["apart"] for number, one in enumerate(ranks) if one["apart"]}
    fine = not apart and all(one["finite"] for one in ranks)
    why = f"{ranks[0]['tensors']} values compared a rank, loss {ranks[0]['loss']:.4f}"
    if apart:
        why = "; ".join(f"rank {number} differs in {', '.join(names)}" for number, names in apart.items())
    elif not fine:
        why = "a loss or a gradient norm is not finite"
    return f"{name}, step", fine, why, 1e3 * max(one["step"] for one in ranks), "ms"


def suspend_rows(ranks: Sequence[Seen]) -> list[Line]:
    first = ranks[0]
    if "refused" in first:
        return [("suspend", None, first["refused"])]
    if errors := [one["error"] for one in ranks if "error" in one]:
        return [("suspend", False, errors[0])]
    stats = f"NCCL's statistics of rank 0: {first['stats'][0]} before, {first['stats'][1]} while suspended"
    freed = mib(max(one["freed"] for one in ranks))
    right = all(one["right"] for one in ranks)
    return [
        ("suspend frees", freed > 0, stats, freed, "MiB"),
        ("suspend", True, "", max(one["suspend"] for one in ranks), "s"),
        (
            "resume",
            right,
            f"the sum is {'right again' if right else 'wrong'}",
            max(one["resume"] for one in ranks),
            "s",
        ),
    ]
