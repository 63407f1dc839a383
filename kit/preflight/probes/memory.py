"""Probes 6 to 9: host memory, resized storage, what the driver tells, memory of one GPU in two ranks."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from kit import machine
from kit.errors import KitError
from kit.preflight.probes import GIB, MIB, Line, Seen, Settings, mib, on_ranks, started
from kit.preflight.run import shm_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.preflight.report import Report
    from kit.world import World

GIVES_BACK = 0.9  # of a buffer's bytes, as the driver tells it
REGISTERED_SHARE = 0.8  # of the rate of torch's own pinned memory


def host_memory(report: Report, device: str, settings: Settings) -> None:
    """6: a memfd is registered with CUDA and is copied from as fast as torch's pinned memory."""
    size = GIB if device == "cuda" else GIB // 16
    with started(report, device, settings, ranks=1) as world:
        report.at(f"a memfd of {size // MIB} MiB: pages, registration, copies")
        (seen,) = on_ranks(world, ".memory:registered", size=size)
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
        if done:
            rate = gb_s(size, seen[way])
            enough = rate >= REGISTERED_SHARE * pinned and seen["right"]
            beside += "" if seen["right"] else "; the bytes are wrong"
            report.row(what, enough, f"{beside}; wanted: {REGISTERED_SHARE:g} of pinned", rate, "GB/s")
            report.time(**{{"h2d": "host_to_device", "d2h": "device_to_host"}[way]: seen[way]})
        else:
            report.row(what, None, why=f"the memory is not registered; {beside}")


def gb_s(size: int, seconds: float) -> float:
    return size / max(seconds, 1e-9) / 1e9


def resize(report: Report, device: str, settings: Settings) -> None:
    """7: a flat buffer with views goes to nothing and comes back."""
    expandable = bool(settings.get("env"))
    if expandable and device == "cpu":
        report.needs_gpu("expandable segments")
        return
    size = 2 * GIB if device == "cuda" else GIB // 16
    with started(report, device, settings, ranks=1) as world:
        report.at(f"a buffer of {size // MIB} MiB with views: resized to nothing and back")
        (seen,) = on_ranks(world, ".memory:resized", size=size)
    source = "the driver's memory in use" if device == "cuda" else "resident anonymous memory"
    for way, what in (("left", "given back"), ("came", "taken again")):
        share = seen[way] / size
        why = f"{mib(seen[way]):g} of {size // MIB} MiB, by {source}; wanted: {100 * GIVES_BACK:g} %"
        report.row(what, passed=share >= GIVES_BACK, value=100 * share, unit="%", why=why)
    report.row("views", passed=seen["same"], why="digests of the buffer and of three views of it, before and after")
    report.row("resize to nothing", passed=True, value=1e3 * seen["out"], unit="ms")


def driver_memory(report: Report, device: str, settings: Settings) -> None:
    """8: whose memory the driver tells, and what a rank has beside its tensors."""
    if device == "cpu":
        report.needs_gpu("NVML lists the rank's process", "residual of a rank")
        return
    with started(report, device, settings) as world:
        report.at("what the driver tells of each rank")
        seen = on_ranks(world, ".memory:driver_view")
    for rows in driver_rows(seen):
        report.row(*rows)


def driver_rows(seen: Sequence[Seen]) -> list[Line]:
    """By process where NVML lists it, else the whole GPU divided by the ranks that share it."""
    listed = all(one["process_used"] is not None for one in seen)
    source = "NVML lists the rank's own process"
    if not listed:
        source = "NVML does not list this pid (a container's pid namespace); fallback: the GPU's memory in use, divided by its ranks"
    rows: list[Line] = [("NVML lists the rank's process", listed or None, source)]
    for number, one in enumerate(seen):
        together = [other for other in seen if other["device"] == one["device"]]
        if listed:
            residual = one["process_used"] - one["reserved"]
        else:
            whole = max(other["driver_used"] for other in together)
            residual = (whole - sum(other["reserved"] for other in together)) / len(together)
        used = "NVML, this process" if listed else f"whole GPU / {len(together)} ranks"
        why = f"{used}; allocator {mib(one['reserved']):g} MiB, whole GPU {mib(one['driver_used']):g} MiB"
        rows.append((f"residual of rank {number}", residual > 0, why, mib(residual), "MiB"))
    return rows


def ipc(report: Report, device: str, settings: Settings) -> None:
    """9: one rank's GPU memory in another one, let go and killed."""
    expandable = bool(settings.get("env"))
    if device == "cpu":
        report.needs_gpu("CUDA IPC with expandable segments" if expandable else "CUDA IPC")
        return
    size, before = 64 * MIB, shm_names()
    with started(report, device, settings) as world:
        report.at("a handle from rank 0 to rank 1")
        if not handed_over(report, world, size, keep=False, expandable=expandable):
            return
        report.at("both let go")
        world.call("kit.preflight.onranks.memory:close", ranks=[1])
        (left,) = world.call("kit.preflight.onranks.memory:close", ranks=[0])
        report.row("memory given back by its owner", passed=left == 0, value=mib(left), unit="MiB still allocated")
        report.at("a second handle, and SIGKILL for the rank that holds it")
        if handed_over(report, world, size, keep=True, expandable=expandable):
            os.kill(world.pids[1], signal.SIGKILL)
            try:
                world.call("kit.preflight.onranks.memory:close", timeout_s=10.0)
                report.row("the killed rank is noticed", passed=False, why="a call to it returned")
            except KitError as error:
                report.row("the killed rank is noticed", passed=True, why=type(error).__name__)
    report.at("what is left in /dev/shm")
    left_names = sorted(shm_names() - before)
    report.row("shared memory afterwards", not left_names, ", ".join(left_names), len(left_names), "names in /dev/shm")


def handed_over(report: Report, world: World, size: int, *, keep: bool, expandable: bool) -> bool:
    """Whether rank 1 reads what rank 0 wrote, and rank 0 what rank 1 wrote."""
    what = "a second handle" if keep else "memory of rank 0 in rank 1"
    (offered,) = world.call("kit.preflight.onranks.memory:offer", ranks=[0], size=size)
    seen: dict[str, Any] = offered
    if "error" not in offered:
        asked = {"handle": offered["handle"], "size": size, "keep": keep}
        (seen,) = world.call("kit.preflight.onranks.memory:take", ranks=[1], args=asked)
    if "error" in seen:
        # Segments that expand are shared by a descriptor of the other process, which needs a permission (ptrace) that containers withhold.
        passed = None if expandable else False
        scope = machine.ptrace_scope()
        report.row(what, passed, why=f"{seen['error']}; {'no Yama' if scope is None else f'ptrace_scope {scope}'}")
        return False
    (written,) = world.call("kit.preflight.onranks.memory:written", ranks=[0])
    report.row(what, passed=seen["same"] and written, value=size // MIB, unit="MiB", why="every word, both ways")
    return True
