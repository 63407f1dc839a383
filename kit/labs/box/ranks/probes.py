"""The probes on a rank: standard library, torch and Megatron only. Ranks measure and record; the rules judge.

A probe that needs a GPU records nothing without one. Seconds of one operation are metrics that end with `_seconds`.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import datetime as dt
import gc
import math
import os
import pickle
import resource
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.multiprocessing import reductions

from kit import machine, nccl
from kit.labs.box.lab import DEADLINE_S
from kit.labs.rankside import Context
from kit.machine import GIB, MIB
from kit.measure import resource_counts
from kit.measure.facts import code_in_words, gpu_code, imported
from kit.measure.host import map_shared, populate, trim, unmap
from kit.measure.observers.births import group_facts
from kit.measure.observers.tensors import tensor_digest
from kit.measure.phase import current_device, device_memory, host_memory_metrics, seconds_on_device, synchronize

SHARED = 64 * MIB  # memory that one rank opens of another
PIECE = 64 * MIB  # what is hashed in one go
SEVERAL = 10  # groups
NVIDIA_SMI_S = 3.0
NOT_EXPANDABLE = "the allocator took no expandable segment"
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Loaded with this module, before ranks are forked; a library that was built for another box may raise anything.
MEGATRON_MISSING = imported("megatron.core", "megatron-core")[1]


class Probes:
    """One object per rank; a phase is a probe."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.record = ctx.record
        self.held: torch.Tensor | None = None  # memory that two ranks share
        self.group: Any = None  # of all ranks, for the wait for an absent peer

    # -- seats, collectives, groups ------------------------------------------------------------------------------------

    def seats(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """This rank's device, whether a kernel runs there, and what the driver and NCCL are set to."""
        where, wanted = device(), self.ctx.config.device
        self.record("elsewhere", wanted not in {"auto", where.type}, text=str(where))
        numbers = torch.arange(1000, device=where, dtype=torch.float64)
        self.record("kernel_error", abs(float((numbers * 2).sum()) - 999_000.0))
        if where.type == "cpu":
            return
        self.record("dead_context", torch.cuda._is_in_bad_fork())
        (code,) = gpu_code(torch.cuda.current_device())
        self.record("no_code", not code["torch"], text=code_in_words(code))
        mode = os.environ.get(WATCHDOG, "not set")
        self.record("watchdog", mode != "0", text=f"{WATCHDOG} is {mode}")
        if self.ctx.rank == 0:
            rows, why = machine.query_gpus("compute_mode", timeout_s=NVIDIA_SMI_S)
            modes = ", ".join(sorted({mode for (mode,) in rows}))
            refused = len(set(self.ctx.devices)) < len(self.ctx.devices) and modes != "Default"
            self.record(
                "exclusive", refused if modes else None, text=modes or why or "no GPU in the list of nvidia-smi"
            )

    def all_reduce(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Whether WORLD has its communicator before its first collective; small all-reduces on the device and on the host."""
        where, repeats = device(), 100
        if where.type == "cuda":
            backend = dist.distributed_c10d._get_default_group()._get_backend(where)
            is_ready = getattr(backend, "_is_initialized", None)
            unknown = "only some versions of torch show NCCL's state"
            self.record("unconnected", is_ready and not is_ready(), text="" if is_ready else unknown)
        for name, place in {"all_reduce": where, "all_reduce_host": torch.device("cpu")}.items():
            right = sums_are_exact(place)
            self.meet()
            value = torch.ones(1, device=place)
            seconds = seconds_on_device(lambda value=value: [dist.all_reduce(value) for _ in range(repeats)])  # type: ignore[misc]
            self.record(f"{name}_seconds", seconds / repeats, "s")
            self.record(f"{name}_wrong", not (sums_are_exact(place) and right))

    def groups(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Groups of all ranks are made, used once and destroyed, on every backend."""
        where, everyone = device(), range(dist.get_world_size())
        for backend, place in {
            "gloo": torch.device("cpu"),
            **({"nccl": where} if where.type == "cuda" else {}),
        }.items():
            made: list[Any] = []
            right: list[bool] = []
            self.meet()
            make = seconds_on_device(
                lambda: made.extend(dist.new_group(list(everyone), backend=backend) for _ in range(SEVERAL))  # noqa: B023
            )
            use = seconds_on_device(lambda: right.extend(sums_are_exact(place, group) for group in made))  # noqa: B023
            self.meet()
            destroy = seconds_on_device(lambda: [dist.destroy_process_group(group) for group in made])  # noqa: B023
            self.record(f"{backend}_wrong", right.count(False))
            on_host, on_device = backend == "gloo", place.type == where.type
            for name in (*(["group_host"] if on_host else []), *(["group"] if on_device else [])):
                self.record(f"{name}_seconds", (make + use) / SEVERAL, "s")
            self.record(f"{backend}_made_seconds", make / SEVERAL, "s")
            self.record(f"{backend}_destroyed_seconds", destroy / SEVERAL, "s")

    def suspend(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """One communicator is suspended and resumed, where this NCCL can."""
        where = device()
        if where.type == "cpu":
            return
        if why := nccl.no_suspend(nccl.running(), torch.__version__):
            self.record("suspend_refused", 1, text=why)
            return
        group: Any = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
        right = sums_are_exact(where, group)
        backend = group._get_backend(where)
        try:
            stats = [dict(backend.memory_stats())]
        # A torch that was built for an older NCCL has no such call; with NCCL's memory manager switched off it raises.
        except (AttributeError, RuntimeError) as error:
            self.record("suspend_refused", 1, text=f"NCCL's memory statistics: {error_line(error)}")
            return
        self.meet()
        before = bytes_in_use()
        self.meet()
        try:
            self.record("suspend_seconds", seconds_on_device(backend.suspend), "s")
        except RuntimeError as error:
            self.record("suspend_wrong", 1, text=error_line(error))
            return
        self.meet()
        freed = before - bytes_in_use()
        stats.append(dict(backend.memory_stats()))
        self.meet()
        self.record("resume_seconds", seconds_on_device(backend.resume), "s")
        right = sums_are_exact(where, group) and right
        self.record("suspend_wrong", not right, text="the sum is correct again" if right else "the sum is wrong")
        self.record(
            "suspend_freed", freed, "B", text=f"NCCL's statistics: {stats[0]} before, {stats[1]} while suspended"
        )
        dist.destroy_process_group(group)

    # -- memory: what a GPU copies from, storage resized to zero and back, the driver's numbers ------------------------

    def host_memory(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """A memfd is mapped, populated and, with a GPU, registered with CUDA; copies from it and into it."""
        on_gpu = device().type == "cuda"
        size = GIB if on_gpu else GIB // 16
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "without limit" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
        self.record("memlock", None if soft == resource.RLIM_INFINITY else soft, "B", text=limit)
        with contextlib.ExitStack() as undo:
            fd = os.memfd_create("kit-preflight")
            undo.callback(os.close, fd)
            os.ftruncate(fd, size)
            address = map_shared(fd, size)
            undo.callback(unmap, address, size)
            self.record_rate("populated", size, seconds_on_device(lambda: populate(address, size)))
            mapped = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
            if on_gpu:
                self.copies(address, mapped, f"memlock {limit}")
            else:
                pageable = torch.full((size,), 3, dtype=torch.uint8)
                self.record_rate("copied_in", size, fastest_copy(mapped, pageable))
                pageable.zero_()
                self.record_rate("copied_out", size, fastest_copy(pageable, mapped))
                self.record("wrong_bytes", int((pageable != 3).sum()))

    def copies(self, address: int, mapped: torch.Tensor, limit: str) -> None:
        """Copies to the GPU and back: from the registered mapping, from torch's pinned memory, and from pageable memory."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        size = mapped.numel()
        on_gpu = torch.zeros(size, dtype=torch.uint8, device=device())
        mapped.fill_(3)
        wait_for_gpu()
        start = time.perf_counter()
        status = int(cudart.cudaHostRegister(address, size, 0))
        self.record("register_seconds", time.perf_counter() - start, "s")
        why = f"cudaError {status}: {refused_because()}; {limit}" if status else ""
        self.record("register_error", status, text=why)
        if not status:
            try:
                to_device = fastest_copy(on_gpu, mapped)
                arrived = bool((on_gpu == 3).all())
                on_gpu.fill_(5)
                to_host = fastest_copy(mapped, on_gpu)
                right = arrived and bool((mapped[::512] == 5).all())  # one of 512 bytes: the host is slow
            finally:
                wait_for_gpu()
                cudart.cudaHostUnregister(address)
            self.record("host_to_device_seconds", to_device, "s")
            self.record("device_to_host_seconds", to_host, "s")
            self.record_rate("registered_to_device", size, to_device)
            self.record_rate("registered_to_host", size, to_host)
            self.record("wrong_bytes", not right)
        part = on_gpu[: size // 4]  # enough for a rate; populating more pages takes longer than copying them
        for name, host in (
            ("pinned", torch.empty(part.numel(), dtype=torch.uint8, pin_memory=True)),
            ("pageable", torch.ones(part.numel(), dtype=torch.uint8)),
        ):
            self.record_rate(f"{name}_to_device", part.numel(), fastest_copy(part, host))
            self.record_rate(f"{name}_to_host", part.numel(), fastest_copy(host, part))

    def record_rate(self, name: str, size: int, seconds: float) -> None:
        self.record(name, size / max(seconds, 1e-9) / 1e9, "GB/s")

    def resize(self, cycle: int, *, expandable: bool = False) -> None:  # noqa: ARG002 - as above
        """The storage of a flat buffer with views is resized to nothing and back: bytes that leave and come, and every view's bits."""
        size = 2 * GIB if device().type == "cuda" else GIB // 16
        flat = torch.empty(size, dtype=torch.uint8, device=device())
        if expandable and not in_expandable_segment(flat):
            self.record("refused", 1, text=NOT_EXPANDABLE)
            return
        for number, piece in enumerate(piece_views(flat)):
            piece.view(torch.int64).copy_(torch.arange(piece.numel() // 8, device=flat.device) * (2 * number + 3))
        half = size // 2 // 8 * 8
        views = [
            flat[:half].view(torch.bfloat16),
            flat[half : half + PIECE].view(torch.float32),
            flat.view(torch.int64),
        ]
        before = [weighted_sum(view) for view in (flat, *views)]
        kept = flat.clone()  # on the same device, because another probe measures copies to the host
        let_go()
        full = bytes_in_use()
        self.record(
            "shrink_seconds", seconds_on_device(lambda: self.change_size(flat, 0)) + seconds_on_device(let_go), "s"
        )
        empty = bytes_in_use()
        self.record("grow_seconds", seconds_on_device(lambda: self.change_size(flat, size)), "s")
        flat.copy_(kept)
        self.record("given_back", (full - empty) / size, text=f"{mib(full - empty)} of {mib(size)}")
        self.record(
            "taken_again", (bytes_in_use() - empty) / size, text=f"{mib(bytes_in_use() - empty)} of {mib(size)}"
        )
        moved = [view.untyped_storage().data_ptr() != flat.data_ptr() for view in views]
        after = [weighted_sum(view) for view in (flat, *views)]
        self.record("views_changed", sum(map(int.__ne__, before, after)) + sum(moved))

    def change_size(self, flat: torch.Tensor, size: int) -> None:
        flat.untyped_storage().resize_(size)

    def resize_expandable(self, cycle: int) -> None:
        if device().type == "cuda":
            with expandable_segments():
                self.resize(cycle, expandable=True)

    def driver_memory(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """The readings of the driver and the allocator after a little work."""
        where = device()
        if where.type == "cpu":
            return
        block = torch.ones(256 * MIB, dtype=torch.uint8, device=where)
        wait_for_gpu()
        self.meet()
        seen = device_memory(str(where))
        self.meet()  # all ranks must read while all have their block
        assert seen is not None
        del block
        for name, value in seen._asdict().items():
            self.record(f"seen_{name}", value, "B", text=str(where))

    # -- memory of one GPU that two ranks use ---------------------------------------------------------------------------

    def ipc(self, cycle: int, *, expandable: bool = False) -> None:  # noqa: ARG002 - as above
        """Memory of rank 0 is opened in the last rank, read and written there. Its owner releases it first, as the sender of a sync does,
        then the reader; then the owner collects it."""
        if device().type == "cpu":
            return
        gc.collect()
        before = torch.cuda.memory_allocated()
        if not self.hand_over(expandable=expandable):
            return
        owner = self.ctx.rank == 0
        for turn in (owner, not owner, owner):  # torch keeps a block alive while a reader has it open
            self.meet()
            if turn:
                self.held = None
                gc.collect()
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                let_go()
        if owner:
            self.record("still_allocated", torch.cuda.memory_allocated() - before, "B")

    def ipc_expandable(self, cycle: int) -> None:
        if device().type == "cuda":
            with expandable_segments():
                self.ipc(cycle, expandable=True)

    def hand_over(self, *, expandable: bool = False) -> bool:
        """Whether the last rank opened memory of rank 0. It reads every bit and writes a first word, which the owner must see."""
        reader, words = dist.get_world_size() - 1, SHARED // 8
        gc.collect()
        let_go()
        pattern = torch.arange(words, dtype=torch.int64, device=device()) * 7 + 1
        note: dict[str, Any] = {}
        if self.ctx.rank == 0:
            self.held = pattern
            wait_for_gpu()
            if expandable and not in_expandable_segment(pattern):
                note["error"] = NOT_EXPANDABLE
            else:
                try:
                    _, arguments = reductions.reduce_tensor(pattern)  # type: ignore[no-untyped-call]
                    note["handle"] = base64.b64encode(pickle.dumps(arguments)).decode()
                except RuntimeError as error:
                    note["error"] = error_line(error)
        note = self.tell(note, source=0)
        if self.ctx.rank == reader and "handle" in note:
            try:
                arguments = pickle.loads(base64.b64decode(note["handle"]))  # noqa: S301 - made by rank 0
                value = reductions.rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
                note = {"wrong_words": int((value != pattern.to(value.device)).sum())}
                value[0] = -1
                torch.cuda.synchronize(value.device)  # its owner's GPU, which may not be this rank's
                self.held = value
            except RuntimeError as error:
                note = {"error": error_line(error)}
        note = self.tell(note, source=reader)
        if self.ctx.rank == 0 and "error" in note:
            # Expandable segments are shared by a descriptor of the other process: containers deny the permission (ptrace).
            scope = machine.ptrace_scope()
            yama = "no Yama" if scope is None else f"ptrace_scope {scope}"
            self.record("refused", 1, text=f"{note['error']}; {yama}")
        elif self.ctx.rank == 0:
            wait_for_gpu()
            unseen = int(pattern[0].item()) != -1
            text = "the owner does not see the reader's word" if unseen else ""
            self.record("wrong_words", note["wrong_words"] + unseen, text=text)
        return "error" not in note

    def tell(self, note: dict[str, Any], source: int) -> dict[str, Any]:
        """One rank's note, on all ranks."""
        notes = [note]
        dist.broadcast_object_list(notes, src=source, device=torch.device("cpu"))
        return notes[0]

    def hold(self) -> None:
        """What the killed rank holds when it is killed."""
        if device().type == "cuda":
            self.hand_over()

    # -- a peer that does not come --------------------------------------------------------------------------------------

    def come_late(self, *, rank: int, seconds: float) -> None:
        """An all-reduce that one rank enters late."""
        if self.ctx.rank == rank:
            time.sleep(seconds)
        value = torch.ones(1, device=device())
        dist.all_reduce(value)
        wait_for_gpu()

    def prepare_to_wait(self) -> None:
        """A group of all ranks that works, with a deadline."""
        self.group = dist.new_group(
            list(range(dist.get_world_size())),
            backend="nccl" if device().type == "cuda" else "gloo",
            timeout=dt.timedelta(seconds=DEADLINE_S),
        )
        self.record("group_wrong", not sums_are_exact(device(), self.group))
        wait_for_gpu()
        self.meet()

    def wait_in_vain(self) -> None:
        """Every rank waits for a peer that does not come: rank 0 in a collective of a working group, the others in the making of one."""
        act = self.start_collective if self.ctx.rank == 0 else join_alone
        start, error_text = time.perf_counter(), ""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - any exception ends the wait, and its words are recorded
            error_text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        self.record("wait_seconds", time.perf_counter() - start, "s", text=error_text, way=act.__name__)

    def start_collective(self) -> None:
        value = torch.ones(1, device=device())
        work = dist.all_reduce(value, group=self.group, async_op=True)
        # gloo keeps the group's own deadline
        work.wait(dt.timedelta(seconds=DEADLINE_S)) if value.is_cuda else work.wait()

    def survive(self) -> bool:
        """Abandon the group, as after a failure, and use WORLD again."""
        group, self.group = self.group, None
        start = time.perf_counter()
        if device().type == "cuda":
            group.abort()
        dist.destroy_process_group(group)
        self.record("give_up_seconds", time.perf_counter() - start, "s")
        right = sums_are_exact(torch.device("cpu")) and sums_are_exact(device())
        self.record("world_wrong", not right)
        return right

    def meet(self) -> None:
        """A barrier over the host, without work on the GPU."""
        dist.all_reduce(torch.zeros(1))

    # -- with Megatron: groups destroyed exactly and made again, tiny training jobs ---------------------------------------

    def has_megatron(self) -> bool:
        if MEGATRON_MISSING:
            self.record("megatron_missing", 1, text=MEGATRON_MISSING)
        return not MEGATRON_MISSING

    def rebuild(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Ten groups are destroyed exactly and made again inside their handles, twice: levels, seconds, options and bits."""
        if not self.has_megatron():
            return
        from kit.megatron import groups, standin
        from kit.megatron.handles import parallel_state

        groups.install()
        standin.install()
        # A first group, used once: what a process keeps of it for good is not a leak.
        once = dist.new_group(list(range(dist.get_world_size())))
        bits_of(once)
        dist.destroy_process_group(once)
        del once
        levels = {"without": self.level()}
        made = [make_group(number) for number in range(SEVERAL)]
        # In Megatron's module a destroy finds them: some in Megatron's names, the others in one more name.
        own = ("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
        further = "_MORE_FOR_THE_PREFLIGHT_GROUPS"
        names = {**dict(zip(own, made, strict=False)), further: made[len(own) :]}
        for name, value in names.items():
            setattr(parallel_state(), name, value)
        bits = [bits_of(group) for group in made]
        options = [options_of(group) for group in made]
        levels["with"] = self.level()
        for turn in (1, 2):
            self.meet()
            start = time.perf_counter()
            stats = groups.destroy("exact", timeout_s=5.0)
            wait_for_gpu()
            self.record("group_destroy_seconds", (time.perf_counter() - start) / SEVERAL, "s", turn=turn)
            self.record_level("without", turn, levels["without"])
            again: list[str] = []
            reload = seconds_on_device(lambda: groups.reload(stats["snapshot"], timeout_s=5.0))  # noqa: B023
            use = seconds_on_device(lambda: again.extend(bits_of(group) for group in made))  # noqa: B023
            self.record("group_reload_seconds", (reload + use) / SEVERAL, "s", turn=turn)
            self.record_level("with", turn, levels["with"])
            self.record("objects_alive", len(stats["alive"]), turn=turn)
            self.record("bits_changed", sum(map(str.__ne__, bits, again)), turn=turn)
            changed = changed_options(options, [options_of(group) for group in made])
            self.record("options_changed", len(changed), text="; ".join(changed), turn=turn)
        groups.destroy("exact", timeout_s=5.0)
        delattr(parallel_state(), further)

    def level(self) -> dict[str, int]:
        """What this process holds once all ranks have reached this point."""
        gc.collect()
        wait_for_gpu()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.meet()
        levels = resource_counts()._asdict()
        if torch.cuda.is_available():
            levels["driver"] = bytes_in_use()
        self.meet()
        return levels

    def record_level(self, state: str, turn: int, baseline: Mapping[str, int]) -> None:
        """How far each count and the driver's memory are off the first time in this state."""
        for name, value in self.level().items():
            unit, metric = ("B", "driver_off") if name == "driver" else ("1", "off_baseline")
            where = f"{name} {state} groups: {value}, at first {baseline[name]}"
            self.record(metric, value - baseline[name], unit, text=where, counted=name, state=state, turn=turn)

    def job_tp(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.twice(tp=2)

    def job_pp(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.twice(pp=2)

    def twice(self, **layout: Any) -> None:
        """In each dtype two jobs of this layout on the same groups, two steps each: what differs; seconds of groups, job and step."""
        if not self.has_megatron():
            return
        from kit.megatron import groups, model
        from kit.megatron.config import ModelConfig

        plain = ModelConfig(layers=2, **layout)
        self.record("layout_seconds", seconds_on_device(lambda: model.initialise(plain)), "s")
        for dtype in ("float32", "bfloat16"):
            first, second = (self.job(ModelConfig(layers=2, dtype=dtype, **layout)) for _ in range(2))
            names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
            compared = f"{len(first)} values compared" if not names else f"differs in {', '.join(names[:3])}"
            self.record("values_changed", len(names), text=compared, dtype=dtype)
        groups.destroy("exact", timeout_s=10.0)

    def job(self, config: Any) -> dict[str, str]:
        """A job of two steps: its losses, gradient norms and tensors as bits."""
        from kit.megatron import model

        start = time.perf_counter()
        job = model.assemble_job(config, device())
        wait_for_gpu()
        built = time.perf_counter() - start
        steps = job.step(1)
        second = seconds_on_device(lambda: steps.extend(job.step(1)))
        numbers = {f"step {i} {name}": float(value) for i, step in enumerate(steps) for name, value in step.items()}
        bits = {**{name: value.hex() for name, value in numbers.items()}, **job.hashes()}
        job.mover.close()
        if config.dtype == "float32":
            self.record("job_seconds", built, "s")
            self.record("step_seconds", second, "s")
        self.record("loss", steps[-1]["loss"], dtype=config.dtype)
        self.record("not_finite", sum(not math.isfinite(value) for value in numbers.values()), dtype=config.dtype)
        return bits

    def job_experts(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """One step of a job with four experts over two ranks."""
        if not self.has_megatron():
            return
        from kit.megatron import groups, model
        from kit.megatron.config import ModelConfig

        job = model.build(ModelConfig(layers=2, experts=4, ep=2))
        (step,) = job.step(1)
        job.mover.close()
        groups.destroy("exact", timeout_s=10.0)
        self.record("loss", step["loss"])
        self.record("not_finite", sum(not math.isfinite(step[name]) for name in ("loss", "grad_norm")))


# -- this rank's device and its memory ----------------------------------------------------------------------------------


def device() -> torch.device:
    """The rank's device; a World on the host hides the GPUs from its ranks."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def wait_for_gpu() -> None:
    """Wait until the GPU has finished all work."""
    synchronize(current_device())


def sums_are_exact(where: torch.device, group: Any = None) -> bool:
    """An all-reduce with values that depend on the rank, compared with the exact sum."""
    size, rank = dist.get_world_size(), dist.get_rank()
    value = torch.tensor([(rank + 1) ** 2, rank], dtype=torch.float64, device=where)
    dist.all_reduce(value, group=group)
    return value.tolist() == [sum((r + 1) ** 2 for r in range(size)), sum(range(size))]


def fastest_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    return min(seconds_on_device(lambda: target.copy_(source, non_blocking=True)) for _ in range(2))


def refused_because() -> str:
    """Clear the last CUDA error, which the next call would report again."""
    try:
        torch.ones(1, device=device()).sum().item()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "CUDA gives no reason"


def weighted_sum(view: torch.Tensor) -> int:
    """A sum weighted by position, so moved bytes show; in pieces, because each product needs memory."""
    total = 0
    for number, piece in enumerate(piece_views(view.reshape(-1).view(torch.uint8)), 1):
        words = piece.view(torch.int64)
        total += number * int((words * (torch.arange(1, words.numel() + 1, device=words.device) * 2 + 1)).sum())
    return total


def piece_views(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def let_go() -> None:
    """Return freed blocks to the driver or to the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        trim()


def bytes_in_use() -> int:
    """Bytes of the GPU in use, as reported by the driver; without a GPU this process's anonymous memory."""
    wait_for_gpu()
    seen = device_memory(current_device())
    return seen.driver_used if seen else host_memory_metrics().get("anon_rss", 0)


@contextlib.contextmanager
def expandable_segments() -> Iterator[None]:
    """Inside, new CUDA memory comes from expandable segments; as the environment has it afterwards."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    change: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.9 and newer
    change = change or torch.cuda.memory._set_allocator_settings
    let_go()
    change("expandable_segments:True")
    try:
        yield
    finally:
        gc.collect()
        let_go()
        change(given or "expandable_segments:False")


def in_expandable_segment(value: torch.Tensor) -> bool:
    if not value.is_cuda:
        return False
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["is_expandable"]]  # type: ignore[no-untyped-call]
    ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
    return any(start <= value.data_ptr() < end for start, end in ends)


def mib(size: float) -> str:
    return f"{size / MIB:.1f} MiB"


def error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- groups -------------------------------------------------------------------------------------------------------------


def join_alone() -> None:
    """Make a group as the second of two ranks while the first, which provides the id (NCCL) or address (gloo), is absent."""
    deadline, where = dt.timedelta(seconds=DEADLINE_S), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=deadline)
    kind: Any = dist.ProcessGroupNCCL if device().type == "cuda" else dist.ProcessGroupGloo
    group = kind(PrefixStore(f"kit-preflight-absent-{dist.get_rank()}", store), 1, 2, deadline)
    try:
        group.allreduce([torch.ones(1, device=device())]).wait()
    finally:
        if device().type == "cuda":
            group.abort()


def make_group(number: int) -> Any:
    """Every other group with options that are not the defaults."""
    seconds, given = dt.timedelta(seconds=600 + number), None
    if number % 2 and device().type == "cuda":
        given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        given._timeout = seconds
    everyone = list(range(dist.get_world_size()))
    return dist.new_group(everyone, timeout=seconds, pg_options=given, group_desc=f"PREFLIGHT_{number}")


def bits_of(group: Any) -> str:
    """The bits of an all-reduce of this rank's random numbers."""
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    value = torch.randn(4096, generator=generator).to(device())
    dist.all_reduce(value, group=group)
    return tensor_digest(value)


def options_of(group: Any) -> dict[str, Any]:
    """The options of the group's backend, read from torch and not from the snapshot."""
    seen = group_facts(group)
    return {**seen["backends"][device().type], "description": seen["description"]}


def changed_options(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    return sorted(
        f"group {number}: {name} {old.get(name)} -> {new.get(name)}"
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        for name in old.keys() | new.keys()
        if old.get(name) != new.get(name)
    )
