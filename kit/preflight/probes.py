"""The probes: each starts its own World, lets its ranks measure, and judges their results.

Rows that need a GPU are not measurable without one; all others are the same on both. Each row states its limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kit import machine
from kit.errors import KitError, RankTimeout
from kit.preflight.run import Report, shm_names
from kit.world import World

MIB, GIB = 2**20, 2**30
START_S = 3600.0  # the probe's own limit ends a slow start
DEADLINE_S = 3.0
NVIDIA_SMI_S = 3.0
DRIVER_SLACK = 16 * MIB  # for two ranks on one GPU, since the driver allocates in 2 MiB pages
GIVES_BACK = 0.9  # least share of a buffer's bytes, as reported by the driver
REGISTERED_SHARE = 0.8  # least share of the rate of torch's pinned memory
Settings = dict[str, Any]
Seen = Mapping[str, Any]  # a rank's measurements
# What, passed, why; a number and its unit.
Line = tuple[str, bool | None, str] | tuple[str, bool | None, str, float, str]


@contextlib.contextmanager
def started(
    report: Report, device: str, settings: Settings, ranks: int = 2, *, megatron: bool = False
) -> Iterator[World]:
    """Start a World and report its start time as a row and a time."""
    preload = ("megatron.core",) if megatron else ()
    report.at(f"the start of {ranks} rank{'s' * (ranks > 1)}")
    began = time.monotonic()
    asked: Settings = {"env": settings["env"], "preload": preload, "start_timeout_s": START_S}
    with World(ranks, device=device, **asked) as world:
        seconds = time.monotonic() - began
        report.pids(world.pids)
        report.row("start", passed=True, value=seconds, unit="s")
        if ranks == 2:
            report.time(**{"world_megatron" if megatron else "world": seconds})
        yield world
        report.at("the end of the ranks")


def ask(report: Report, world: World, what: str, function: str, **arguments: Any) -> list[Any]:
    """Call a function of `onranks`; the report names `what` if it does not end."""
    report.at(what)
    return world.call(f"kit.preflight.onranks:{function}", args=arguments, timeout_s=60.0)


def mib(size: float) -> float:
    return round(size / MIB, 1)


# -- probes 1 to 5: seats, collectives, groups, exact destroy and reload, an absent peer ------------------------------


def seats(report: Report, device: str, settings: Settings) -> None:
    """1: two ranks with Megatron loaded before the fork find a working device."""
    with started(report, device, settings, megatron=settings["megatron"]) as world:
        places = ask(report, world, "a kernel on every rank", "place")
        names = ", ".join(f"rank {number}: {one['device']}" for number, one in enumerate(places))
        wrong = [one for one in places if not one["device"].startswith(device)]
        report.row("seats", passed=not wrong, why=f"{names} ({world.status()[0]['why']})")
        report.row("kernel", passed=all(one["sum"] == 999_000.0 for one in places), why="value of a sum on the device")
        if device == "cpu":
            report.needs_gpu("context after the fork", "compute mode", "architecture", "NCCL settings")
            return
        fresh = not any(one["poisoned"] for one in places)
        report.row("context after the fork", fresh, "CUDA was not started before it")
        report.row(*architecture(places[0]))
        report.row(*watchdog(places))
        report.at("nvidia-smi")
        report.row(*compute_mode(len({one["device"] for one in places}) < len(places)))


def architecture(place: Seen) -> Line:
    major, minor = place["capability"]
    fits, built = machine.runs_on_gpu(place["built_for"], (major, minor)), " ".join(place["built_for"])
    return "architecture", fits, f"{place['name']} is sm_{major}{minor}; torch is built for {built}"


def watchdog(places: Sequence[Seen]) -> Line:
    """With torch's default settings, a failed collective ends its rank a minute later."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    values = sorted({one["env"].get(name, "not set") for one in places})
    settings = " ".join(f"{key}={value}" for key, value in sorted(places[0]["env"].items()))
    return "NCCL settings", values == ["0"], f"{name} is {', '.join(values)}; rank 0 has {settings or 'none'}"


def compute_mode(shared: bool) -> Line:
    """Several processes must be allowed to use the GPU if ranks share it."""
    rows, why = machine.query_gpus("compute_mode", timeout_s=NVIDIA_SMI_S)
    modes = sorted({mode for (mode,) in rows})
    if not modes:
        return "compute mode", None, why or "nvidia-smi lists no GPU"
    return "compute mode", modes == ["Default"] or not shared, ", ".join(modes)


def all_reduces(report: Report, device: str, settings: Settings) -> None:
    """2: WORLD has its communicator at once; sums are correct; their speed."""
    with started(report, device, settings) as world:
        eager = ask(report, world, "WORLD's communicator", "ready_at_once")
        unknown = "only some versions of torch show NCCL's state" if None in eager else ""
        report.row("WORLD ready before its first collective", None if unknown else all(eager), unknown)
        measured = ask(report, world, "100 small all-reduces on the device and on the host", "all_reduces", n=100)
        right = {name: all(one[name]["right"] for one in measured) for name in ("device", "host")}
        for name, what, time_of in (("device", device, "all_reduce"), ("host", "the host", "all_reduce_host")):
            worst = max(one[name]["seconds"] for one in measured)
            why = "" if right[name] else "a sum is wrong"
            report.row(f"all-reduce on {what}", right[name], why, 1e3 * worst, "ms")
            report.time(**{time_of: worst})
        first, second = world.status()
        if device == "cuda" and first["device"] == second["device"]:
            why = f"{first['why']}; times are for a shared GPU"
            report.row("two ranks on one GPU", right["device"], why)
        else:
            report.row("two ranks on one GPU", None, "no GPU is shared here")


def groups(report: Report, device: str, settings: Settings) -> None:
    """3: ten groups of each backend under WORLD, each used once."""
    with started(report, device, settings) as world:
        for backend in ("nccl", "gloo"):
            if backend == "nccl" and device == "cpu":
                report.needs_gpu("NCCL groups")
                continue
            measured = ask(
                report, world, f"ten {backend} groups: made, used once, destroyed", "make_groups", backend=backend, n=10
            )
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
    """4: ten groups destroyed exactly and remade, twice; everything that they held is freed, and they are as before."""
    if not settings["megatron"]:
        report.row("exact destroy and reload", None, why="the ranks' Python has no megatron.core")
        return
    with started(report, device, settings, megatron=True) as world:
        first = ask(report, world, "ten groups made and used", "begin", n=10)
        for number in (1, 2):
            seen = ask(report, world, f"ten groups destroyed and remade, cycle {number}", "cycle")
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
    """Compare every rank after a cycle with its state before; differences are named."""
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
    """Levels without groups must equal those before the first group, and levels with groups those of the first groups; the worst rank."""
    off = {
        (rank, state): one[state][name] - before[state][name]
        for rank, (before, one) in enumerate(zip(first, seen, strict=True))
        for state in ("without", "with")
    }
    rank, state = max(off, key=lambda key: abs(off[key]))
    worst, now, before = off[rank, state], seen[rank][state][name], first[rank][state][name]
    where = f"rank {rank}, {state} groups:"
    if name == "driver":
        why = f"{where} {mib(now):g} MiB, before {mib(before):g}; allowed: {mib(DRIVER_SLACK):g}"
        return "driver memory off the baseline", worst <= DRIVER_SLACK, why, mib(worst), "MiB"
    return f"{name} off the baseline", not worst, f"{where} {now}, before {before}", worst, ""


def absent_peer(report: Report, device: str, settings: Settings) -> None:
    """5: a rank that waits for an absent peer gets an error in time and survives; the peer is named."""
    with started(report, device, settings) as world:
        before = world.pids
        report.at("rank 1 enters an all-reduce late")
        try:
            world.call("kit.preflight.onranks:come_late", args={"rank": 1, "seconds": 1.5}, timeout_s=0.5)
            report.row("the late rank is named", passed=False, why="the call returned before the late rank entered")
        except RankTimeout as error:
            named = ", ".join(map(str, error.culprits)) or "none"
            report.row("the late rank is named", passed=error.culprits == (1,), why=f"named: {named}; late: 1")
        idle_again(world, 6.0)
        ready = ask(report, world, "a group of both ranks", "prepare", deadline_s=DEADLINE_S)
        report.row("a group with a deadline", passed=all(ready))
        ended = ask(
            report,
            world,
            f"both ranks wait {DEADLINE_S:g} s for an absent peer",
            "wait_in_vain",
            deadline_s=DEADLINE_S,
        )
        for one in ended:
            in_time = bool(one["error"]) and DEADLINE_S / 2 <= one["seconds"] <= DEADLINE_S + 2
            why = f"deadline {DEADLINE_S:g} s; {one['error'] or 'no error was raised'}"
            report.row(f"{one['way']} without its peer", passed=in_time, value=one["seconds"], unit="s", why=why)
        after = ask(report, world, "WORLD after the failure", "survive")
        alive = world.pids == before and all(one["host"] and one["device"] for one in after)
        report.row("survivors use WORLD again", passed=alive, why=f"values of sums on the host and on {device}")
        report.row("the failed group is given up", passed=True, value=max(one["give_up"] for one in after), unit="s")


def idle_again(world: World, seconds: float) -> None:
    """Wait until the ranks have answered the abandoned call."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return world.run("pass")
        except KitError as error:
            if isinstance(error, RankTimeout) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


# -- probes 6 to 9: host memory, resized storage, what the driver reports, memory of one GPU in two ranks ---------------


def host_memory(report: Report, device: str, settings: Settings) -> None:
    """6: a memfd can be registered with CUDA and is copied as fast as torch's pinned memory."""
    size = GIB if device == "cuda" else GIB // 16
    with started(report, device, settings, ranks=1) as world:
        (seen,) = ask(
            report, world, f"a memfd of {size // MIB} MiB: pages, registration, copies", "registered", size=size
        )
    limit = "without limit" if seen["memlock"] is None else f"{seen['memlock'] // 1024} KiB"
    report.row("memlock", passed=True, why=f"{limit} may be locked")
    report.row("pages supplied", passed=True, value=gb_s(size, seen["populate"]), unit="GB/s")
    if device == "cpu":
        report.row("copy into the memfd", passed=True, value=gb_s(size, seen["copy_in"]), unit="GB/s")
        report.row("copy out of the memfd", passed=True, value=gb_s(size, seen["copy_out"]), unit="GB/s")
        report.needs_gpu("cudaHostRegister", "host to device", "device to host")
        return
    done = seen["status"] == 0
    why = f"{size // MIB} MiB" if done else f"cudaError {seen['status']}: {seen['reason']}; memlock {limit}"
    report.row("cudaHostRegister", passed=done, value=seen["register"], unit="s", why=why)
    for way, what in (("h2d", "host to device"), ("d2h", "device to host")):
        pinned, pageable = gb_s(size, seen[f"pinned_{way}"]), gb_s(size, seen[f"pageable_{way}"])
        beside = f"torch's pinned memory {pinned:.1f} GB/s, pageable {pageable:.1f} GB/s"
        if not done:
            report.row(what, None, why=f"the memory is not registered; {beside}")
            continue
        rate = gb_s(size, seen[way])
        beside += "" if seen["right"] else "; the bytes are wrong"
        enough = rate >= REGISTERED_SHARE * pinned and seen["right"]
        report.row(what, enough, f"{beside}; required: {REGISTERED_SHARE:g} of pinned", rate, "GB/s")
        report.time(**{what.replace(" ", "_"): seen[way]})


def gb_s(size: int, seconds: float) -> float:
    return size / max(seconds, 1e-9) / 1e9


def resize(report: Report, device: str, settings: Settings) -> None:
    """7: a flat buffer with views is resized to nothing and back."""
    expandable = bool(settings.get("env"))
    if expandable and device == "cpu":
        report.needs_gpu("expandable segments")
        return
    size = 2 * GIB if device == "cuda" else GIB // 16
    with started(report, device, settings, ranks=1) as world:
        (seen,) = ask(
            report,
            world,
            f"a buffer of {size // MIB} MiB with views: resized to nothing and back",
            "resized",
            size=size,
        )
    source = "the driver's memory in use" if device == "cuda" else "resident anonymous memory"
    for way, what in (("left", "given back"), ("came", "taken again")):
        share = seen[way] / size
        why = f"{mib(seen[way]):g} of {size // MIB} MiB, from {source}; required: {100 * GIVES_BACK:g} %"
        report.row(what, passed=share >= GIVES_BACK, value=100 * share, unit="%", why=why)
    report.row("views", passed=seen["same"], why="digests of the buffer and of three views of it, before and after")
    report.row("resize to nothing", passed=True, value=1e3 * seen["out"], unit="ms")


def driver_memory(report: Report, device: str, settings: Settings) -> None:
    """8: whether the driver reports memory per process, and what a rank holds besides tensors."""
    if device == "cpu":
        report.needs_gpu("NVML lists the rank's process", "residual of a rank")
        return
    with started(report, device, settings) as world:
        seen = ask(report, world, "what the driver reports for each rank", "driver_view")
    for rows in driver_rows(seen):
        report.row(*rows)


def driver_rows(seen: Sequence[Seen]) -> list[Line]:
    """Per process if NVML lists it, else the whole GPU's memory divided by the ranks that share it."""
    listed = all(one["process_used"] is not None for one in seen)
    source = "NVML lists the rank's process"
    if not listed:
        source = "NVML does not list this pid (a container's pid namespace); fallback: the GPU's memory in use, divided by its ranks"
    rows: list[Line] = [("NVML lists the rank's process", listed or None, source)]
    for number, one in enumerate(seen):
        together = [other for other in seen if other["device"] == one["device"]]
        used, residual = "NVML, this process", (one["process_used"] or 0) - one["reserved"]
        if not listed:
            whole = max(other["driver_used"] for other in together)
            used = f"whole GPU / {len(together)} ranks"
            residual = (whole - sum(other["reserved"] for other in together)) / len(together)
        why = f"{used}; allocator {mib(one['reserved']):g} MiB, whole GPU {mib(one['driver_used']):g} MiB"
        rows.append((f"residual of rank {number}", residual > 0, why, mib(residual), "MiB"))
    return rows


def ipc(report: Report, device: str, settings: Settings) -> None:
    """9: one rank's GPU memory opened in another rank; released, then killed."""
    expandable = bool(settings.get("env"))
    if device == "cpu":
        report.needs_gpu("CUDA IPC with expandable segments" if expandable else "CUDA IPC")
        return
    size, before = 64 * MIB, shm_names()
    with started(report, device, settings) as world:
        report.at("a handle from rank 0 to rank 1")
        if not handed_over(report, world, size, keep=False, expandable=expandable):
            return
        report.at("both release the memory")
        world.call("kit.preflight.onranks:close", ranks=[1])
        (left,) = world.call("kit.preflight.onranks:close", ranks=[0])
        report.row("memory freed by its owner", passed=left == 0, value=mib(left), unit="MiB still allocated")
        report.at("a second handle, and SIGKILL for the rank that holds it")
        if handed_over(report, world, size, keep=True, expandable=expandable):
            os.kill(world.pids[1], signal.SIGKILL)
            try:
                world.call("kit.preflight.onranks:close", timeout_s=10.0)
                report.row("the killed rank is noticed", passed=False, why="a call to it returned")
            except KitError as error:
                report.row("the killed rank is noticed", passed=True, why=type(error).__name__)
    report.at("leftovers in /dev/shm")
    left_names = sorted(shm_names() - before)
    report.row("shared memory afterwards", not left_names, ", ".join(left_names), len(left_names), "names in /dev/shm")


def handed_over(report: Report, world: World, size: int, *, keep: bool, expandable: bool) -> bool:
    """Whether rank 1 reads what rank 0 wrote, and vice versa."""
    what = "a second handle" if keep else "memory of rank 0 in rank 1"
    (seen,) = world.call("kit.preflight.onranks:offer", ranks=[0], size=size)
    if "error" not in seen:
        asked = {"handle": seen["handle"], "size": size, "keep": keep}
        (seen,) = world.call("kit.preflight.onranks:take", ranks=[1], args=asked)
    if "error" in seen:
        # Expandable segments are shared via a descriptor of the other process, which needs a permission (ptrace) that containers deny.
        scope = machine.ptrace_scope()
        why = f"{seen['error']}; {'no Yama' if scope is None else f'ptrace_scope {scope}'}"
        report.row(what, None if expandable else False, why)
        return False
    (written,) = world.call("kit.preflight.onranks:written", ranks=[0])
    report.row(
        what, passed=seen["same"] and written, value=size // MIB, unit="MiB", why="every word in both directions"
    )
    return True


# -- probe 10: tiny training jobs, and a communicator that is suspended and resumed -------------------------------------


def jobs(report: Report, device: str, settings: Settings) -> None:
    """10: tiny jobs give the same bits twice; experts; suspend and resume."""
    if not settings["megatron"]:
        report.row("tiny jobs", None, why="the ranks' Python has no megatron.core")
        return
    with started(report, device, settings, megatron=True) as world:
        for name, layout in (("tp2", {"tp": 2}), ("pp2", {"pp": 2})):
            measured = ask(
                report,
                world,
                f"tiny jobs with {name}: two steps, twice, in float32 and bfloat16",
                "twice",
                layout=layout,
                dtypes=["float32", "bfloat16"],
            )
            for dtype in ("float32", "bfloat16"):
                report.row(*bitwise(f"{name} {dtype}", [one[dtype] for one in measured]))
            if name == "tp2":
                plain = [one["float32"] for one in measured]
                report.time(step=max(one["step"] for one in plain), job=max(one["job"] for one in plain))
                report.time(layout=max(one["layout"] for one in measured))
        seen = ask(report, world, "one step with four experts", "experts")
        report.row("experts, one step", passed=all(one["finite"] for one in seen), why=f"loss {seen[0]['loss']:.4f}")
        for row in suspend_rows(ask(report, world, "a communicator suspended and resumed", "suspended")):
            report.row(*row)


def bitwise(name: str, ranks: Sequence[Seen]) -> Line:
    """Losses, gradient norms and every tensor after two steps, of two jobs."""
    apart = {number: one["apart"] for number, one in enumerate(ranks) if one["apart"]}
    fine = not apart and all(one["finite"] for one in ranks)
    why = f"{ranks[0]['tensors']} values compared per rank, loss {ranks[0]['loss']:.4f}"
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
    freed, right = mib(max(one["freed"] for one in ranks)), all(one["right"] for one in ranks)
    return [
        ("suspend frees", freed > 0, stats, freed, "MiB"),
        ("suspend", True, "", max(one["suspend"] for one in ranks), "s"),
        (
            "resume",
            right,
            f"the sum is {'correct again' if right else 'wrong'}",
            max(one["resume"] for one in ranks),
            "s",
        ),
    ]
