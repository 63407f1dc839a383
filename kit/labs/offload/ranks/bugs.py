"""The known bugs of the lab `offload`: what a fault puts in place of the right code."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs.offload.ranks.job import JobContext
from kit.labs.offload.ranks.phases import Offload
from kit.labs.offload.ranks.releaser import KitReleaser, State
from kit.megatron import groups, ownership, tensors
from kit.megatron.groups import DestroyFailed
from kit.megatron.handles import Handle, c10d, groups_in, megatron_groups, parallel_state, registered
from kit.megatron.split import random_states, set_random_states
from kit.target import replaced

init, destroy, reload = KitReleaser.__init__, KitReleaser.destroy, KitReleaser.reload
release_tensors, restore_tensors = KitReleaser.release_tensors, KitReleaser.restore_tensors
move_back = tensors.Mover.restore
make_job, reload_phase = Offload.make_job, Offload.reload
meet = groups.meet
as_found, new_process_group = ownership.as_found, c10d._new_process_group_helper

LEAK_BYTES = 16 * 2**20
SLOW_S = 1.5
SLOWER_S = 0.5
LATE_S = 0.3
LOSSY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


def keep(releaser: KitReleaser, leaked: Any) -> None:
    """Leak something for as long as the job lives, but not into the next lab on these ranks."""
    vars(releaser).setdefault("leaked", []).append(leaked)


def on_last_rank(releaser: KitReleaser) -> bool:
    return releaser.ctx.rank == releaser.ctx.world_size - 1


# -- in place of KitReleaser.destroy ---------------------------------------------------------------------------------------


def leaks_a_gloo_group(releaser: KitReleaser) -> State:
    keep(releaser, dist.new_group(backend="gloo"))
    return destroy(releaser)


def leaks_a_device_group(releaser: KitReleaser) -> State:
    keep(releaser, dist.new_group())
    return destroy(releaser)


def keeps_a_group_alive(releaser: KitReleaser) -> State:
    keep(releaser, next(group.kit_inner for group in megatron_groups() if isinstance(group, Handle)))
    return destroy(releaser)


def keeps_world(releaser: KitReleaser) -> State:
    config = releaser.ctx.config
    return groups.destroy(config.mode, timeout_s=config.meet_timeout_s)


def stays_away_on_the_last_rank(releaser: KitReleaser) -> State:
    return {"snapshot": groups.snapshot()} if on_last_rank(releaser) else destroy(releaser)


def swallows_a_failure(releaser: KitReleaser) -> State:
    try:
        return destroy(releaser)
    except DestroyFailed as failure:
        return failure.stats


def forgets_only_the_groups(releaser: KitReleaser) -> State:  # noqa: ARG001 - a method of the releaser
    """Destroy the groups in the group globals and set only these to None, as home-made helpers often do."""
    snapshot = groups.snapshot()
    module = parallel_state()
    for name in [name for name in vars(module) if name.startswith("_") and "_GROUP" in name]:
        for group in groups_in(getattr(module, name)):
            if group in c10d._world.pg_map:
                dist.destroy_process_group(group)
        setattr(module, name, None)
    return {"snapshot": snapshot}


def leaks_a_descriptor_on_failure(releaser: KitReleaser) -> State:
    """It is closed when the job ends."""
    try:
        return destroy(releaser)
    except DestroyFailed:
        weakref.finalize(releaser, os.close, os.open(os.devnull, os.O_RDONLY))
        raise


# -- in place of KitReleaser.reload ----------------------------------------------------------------------------------------


def reloads_from_five_sizes(releaser: KitReleaser, stats: State) -> State:  # noqa: ARG001 - a method of the releaser
    given = stats["snapshot"]["init_arguments"]
    parallel_state().initialize_model_parallel(**{key: given[key] for key in LOSSY if key in given})
    return {}


def counts_groups_from_one(releaser: KitReleaser, stats: State) -> State:
    """As a fresh default group does, although the groups that came back have these names."""
    reloaded = reload(releaser, stats)
    c10d._world.group_count = 1
    return reloaded


def leaves_a_dead_group_in_a_layer(releaser: KitReleaser, stats: State) -> State:
    """The first module that keeps a group gets one that is destroyed."""
    reloaded = reload(releaser, stats)
    dead = dist.new_group()
    dist.destroy_process_group(dead)
    for module in releaser.ctx.chunks[0].modules():
        for name, value in vars(module).items():
            if isinstance(value, dist.ProcessGroup):
                setattr(module, name, dead)
                return reloaded
    raise RuntimeError("no layer keeps a process group, so none can go stale")


# -- in place of KitReleaser.restore_tensors -------------------------------------------------------------------------------


def leaks_memory(releaser: KitReleaser) -> State:
    keep(releaser, bytearray(b"x" * LEAK_BYTES))
    return restore_tensors(releaser)


def seeds_again(releaser: KitReleaser) -> State:
    stats = restore_tensors(releaser)
    torch.manual_seed(releaser.ctx.config.seed)
    return stats


def leaves_a_file(releaser: KitReleaser) -> State:
    """In shared memory, and not open or mapped anywhere. It is removed when the job ends."""
    fd, path = tempfile.mkstemp(prefix="kit-fault-", dir="/dev/shm")
    os.close(fd)
    weakref.finalize(releaser, os.unlink, path)
    return restore_tensors(releaser)


def copies_everything_twice(releaser: KitReleaser) -> State:
    stats = restore_tensors(releaser)
    _ = [item.storage.clone() for item in releaser.ctx.mover.items()]
    return stats


def flips_a_bit(releaser: KitReleaser) -> State:
    stats = restore_tensors(releaser)
    if on_last_rank(releaser):
        weight = next(releaser.ctx.chunks[0].module.parameters())
        weight.data.view(-1)[:1].view(torch.uint8)[0] ^= 1
    return stats


def returns_before_the_last_bytes(releaser: KitReleaser) -> State:
    """As a copy on a stream or thread that nobody waits for."""
    stats = restore_tensors(releaser)
    weights = [item for item in releaser.ctx.mover.items() if item.kind == "weights"]
    storage = max(weights, key=lambda item: item.size).storage
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    still_to_come = whole.clone()
    whole.zero_()

    def arrive() -> None:
        if storage.nbytes() == still_to_come.nbytes:  # not released again
            whole.copy_(still_to_come)

    threading.Timer(LATE_S, arrive).start()
    return stats


def halves_the_learning_rate(releaser: KitReleaser) -> State:
    stats = restore_tensors(releaser)
    for optimizer in tensors.inner_optimizers(releaser.ctx.optimizer):
        for group in optimizer.param_groups:
            group["lr"] /= 2
    return stats


def rewinds_the_schedule(releaser: KitReleaser) -> State:
    stats = restore_tensors(releaser)
    releaser.ctx.scheduler.num_steps = 0
    return stats


def loses_the_first_moments(releaser: KitReleaser) -> State:
    stats = restore_tensors(releaser)
    for item in releaser.ctx.mover.items():
        if item.name.endswith("exp_avg"):
            item.storage.fill_(0)
    return stats


def copies_a_main_grad(releaser: KitReleaser) -> State:
    stats = restore_tensors(releaser)
    parameter = next(releaser.ctx.chunks[0].module.parameters())
    parameter.main_grad = parameter.main_grad.clone()
    return stats


def skips_the_next_zeroing_of_gradients(releaser: KitReleaser) -> State:
    """Zeroing the gradient buffers does nothing once, and then becomes the plain method again."""
    stats = restore_tensors(releaser)
    for chunk in releaser.ctx.chunks:
        chunk.zero_grad_buffer = functools.partial(delattr, chunk, "zero_grad_buffer")
    return stats


def restores_alone(releaser: KitReleaser) -> State:
    return releaser.ctx.mover.restore()


def copies_before_the_first_release(releaser: KitReleaser) -> State:
    """The copies stay for as long as the job lives."""
    own = vars(releaser)
    if "second" not in own:
        own["second"] = [tensors.flat_bytes(item).clone() for item in releaser.ctx.mover.items()]
    return release_tensors(releaser)


def keeps_a_second_copy(releaser: KitReleaser) -> State:
    """Until the next reload, which makes another."""
    stats = restore_tensors(releaser)
    vars(releaser)["second"] = [tensors.flat_bytes(item).clone() for item in releaser.ctx.mover.items()]
    return stats


# -- in other places -------------------------------------------------------------------------------------------------------


def forgets_to_withdraw(what: str, rank: int, size: int, timeout_s: float, report: str = "") -> None:
    try:
        meet(what, rank, size, timeout_s, report)
    except KitError:
        groups._rounds[what] += 1
        raise


def leaves_a_patch(releaser: KitReleaser, ctx: JobContext) -> None:
    init(releaser, ctx)
    dist.barrier = functools.partial(dist.barrier)


def reloads_slowly_in_the_last_two_cycles(lab: Offload, cycle: int) -> None:
    reload_phase(lab, cycle)
    if cycle >= lab.config.cycles - 1:
        time.sleep(SLOW_S)


def reloads_more_slowly_in_each_cycle(lab: Offload, cycle: int) -> None:
    reload_phase(lab, cycle)
    time.sleep(SLOWER_S * max(0, cycle - 2))


def keeps_what_came_back(mover: tensors.Mover) -> State:
    """All memory first, as in the right code, but an error leaves what was allocated."""
    for item, _, _ in mover._waiting:
        tensors._allocate(item)
    return move_back(mover)


def makes_groups_without_timeout(*args: Any, backend_options: Any = None, **kwargs: Any) -> Any:
    """As if the argument had been left out: torch's default applies."""
    default = c10d._get_default_timeout(c10d.Backend(str(args[3]).rpartition(":")[2]))
    if backend_options is not None:
        backend_options._timeout = default
    return new_process_group(*args, backend_options=backend_options, **kwargs | {"timeout": default})


def makes_the_job_under_a_second_patch(lab: Offload) -> None:
    """Another wrapper of new_group makes a second group beside the inner one, and forgets it."""
    inner = dist.new_group

    def new_group_twice(*args: Any, **kwargs: Any) -> Any:
        inner(*args, **kwargs)
        return inner(*args, **kwargs)

    doors = ("torch.distributed:new_group", "torch.distributed.distributed_c10d:new_group")
    with replaced(dict.fromkeys(doors, new_group_twice)):
        make_job(lab)


@contextlib.contextmanager
def leaves_a_default_group() -> Iterator[None]:
    with as_found() if dist.is_initialized() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def leaves_the_tracker_as_drawn() -> Iterator[None]:
    drawn = random_states()
    try:
        with as_found():
            try:
                yield
            finally:
                drawn = random_states()
    finally:
        set_random_states((*random_states()[:2], drawn[2]))


@contextlib.contextmanager
def leaves_groups_in_their_handles() -> Iterator[None]:
    """After an error; over gloo such a group lives on with its sockets and threads."""
    before = {id(group) for group in registered()}
    with contextlib.ExitStack() as late, as_found():
        try:
            yield
        except BaseException:
            for handle in registered():
                if id(handle) not in before and isinstance(handle, Handle):
                    late.callback(setattr, handle, "kit_inner", handle.kit_inner)
            raise


@contextlib.contextmanager
def fails_in_its_cleanup() -> Iterator[None]:
    with as_found():
        try:
            yield
        except Exception:  # noqa: BLE001 - whatever it was, it is lost
            raise RuntimeError("cleaning up failed") from None
