"""What `kit bench offload`, `release` and `split` have their ranks do with a job: tensors out and back, groups released and brought back,
steps whole and in pieces, losses.

The things that are compared take turns within one loop, so that what else happens on the machine affects them alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from kit.bench.session import seconds_of, turn_by_turn
from kit.errors import BadInput, KitError
from kit.labs.split.lab import RECIPES, Recipe, SplitConfig, model_config
from kit.labs.split.ranks.backends import chunks_of
from kit.measure import counts, host
from kit.measure.phase import device_memory, host_memory, reset_peaks, timed
from kit.megatron import groups, model, split
from kit.megatron.config import ModelConfig
from kit.megatron.handles import c10d, current_groups, parallel_state
from kit.megatron.tensors import Item, Mover, memory, offload_natively, reload_natively
from kit.nccl import unbound
from kit.train import fsdp
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.options import Settings
from kit.train.plain import initial_weights
from kit.train.protocol import Batch, StepResult

# A private mapping of nothing. PROT_READ | PROT_WRITE is 3, MAP_PRIVATE | MAP_ANONYMOUS is 0x22.
_PROT, _MAP = 3, 0x22
_BLOCK = 2**30
SAVER, TAG = "torch_memory_saver", "kit-bench"


def tensors(*, size: str, cycles: int) -> dict[str, Any]:
    """Everything a job has, out and back `cycles` times; beside each move the plain copies that it is measured by."""
    job = model.build(ModelConfig(size=size, seq=16, microbatches=1))
    job.step(1)
    try:
        return _tensors(job, cycles)
    finally:
        job.mover.close()
        groups.destroy()


def _tensors(job: model.Training, cycles: int) -> dict[str, Any]:
    mover, cuda = job.mover, job.device.type == "cuda"
    sizes = [item.size for item in mover.items()]
    # Host memory that is supplied already, and not pinned: the driver copies to and from it by way of its own.
    pageable = torch.ones(sum(sizes), dtype=torch.uint8) if cuda else None
    times: dict[str, list[float]] = {}
    resident: list[tuple[int, int]] = []

    def sample(**taken: float) -> None:
        for name, seconds in taken.items():
            times.setdefault(name, []).append(seconds)

    def others() -> str:
        """Plain copies, and Megatron's own calls; why these were refused, if they were."""
        sample(**dict(zip(("clone_out", "clone_back"), one_by_one(mover.items()), strict=True)))
        if pageable is not None:
            sample(**dict(zip(("pageable_out", "pageable_back"), one_by_one(mover.items(), pageable), strict=True)))
        try:
            sample(native_out=offload_natively(job.chunks, job.optimizer, job.device)["seconds"])
            sample(native_back=reload_natively(job.chunks, job.optimizer)["seconds"])
        except BadInput as error:
            return str(error)
        return ""

    # On the CPU before the mover: what these leave of the C library's memory would be in the way of what it is judged by.
    refused = "" if cuda else [others() for _ in range(2)][-1]
    for cycle in range(cycles + 1):
        if cycle and cuda:
            refused = others()
        full = host_memory().get("anon_rss", 0)
        which = "steady" if cycle else "first"
        if cycle:
            sample(copy_out=_warm(mover, out=True))
        sample(**{f"{which}_out": mover.release()["seconds"]})
        resident.append((full, host_memory().get("anon_rss", 0)))
        if cycle and not cuda:
            # Each of these leaves pages behind that the next one gets: the mover and what it is judged by both follow one.
            for name in ("pieces", "populate"):
                sample(**{name: _into_new(mover.arena.address(0), mover.arena.used, pieces=name == "pieces")})
        sample(**{f"{which}_back": mover.restore()["seconds"]})
        if cycle:
            sample(copy_back=_warm(mover, out=False))
    return {
        "times": times,
        "bytes": sum(sizes),
        "tensors": len(sizes),
        "threads": host.workers(),
        "refused": refused,
        "resident": resident,
    }


def _warm(mover: Mover, *, out: bool) -> float:
    """A plain copy of as many bytes as the job has, between places that are there: with memcpy on the CPU, in blocks as large as
    memcpy likes best; on CUDA between each tensor and its place in pinned memory. Nothing may be waiting in the arena."""
    items, arena = mover.items(), mover.arena
    total = sum(item.size for item in items)
    if mover.device.type == "cpu":
        half = min(_BLOCK, total // 2)
        return timed(lambda: host.libc.memcpy(arena.address(0), arena.address(half), half)) * total / half
    places = [arena.reserve(item.size) for item in items]
    arena.clear()
    pairs = [(arena.view(place, item.size), flat(item)) for place, item in zip(places, items, strict=True)]

    def copy() -> None:
        for pinned, one in pairs:  # the places hold what the tensors hold: the way back changes nothing
            (pinned if out else one).copy_(one if out else pinned, non_blocking=True)

    return timed(copy)


def _into_new(source: int, size: int, *, pieces: bool) -> float:
    """Seconds to copy into new memory that is asked to be of large pages: on one thread, populated whole and filled by one memcpy; or piece
    by piece on as many threads as the mover has, which is what the machine can do."""
    target: int = host.libc.mmap(None, size, _PROT, _MAP, -1, 0)
    if target == host.MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"mapping {size} bytes failed")
    host.huge_pages(target, size)

    def work() -> None:
        if pieces:
            host.transfer([host.Move(target, source, size)], fresh=True, threads=host.workers())
        else:
            host.populate(target, size)
            host.libc.memcpy(target, source, size)

    taken = timed(work)
    host.libc.munmap(target, size)
    return taken


# -- what a job's own code would do, one tensor at a time: copies alone, which give nothing back -------------------------------


def flat(item: Item) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=item.storage.device).set_(item.storage)


def one_by_one(items: Sequence[Item], block: torch.Tensor | None = None) -> tuple[float, float]:
    """Seconds out and back of what one line of code does: each tensor into memory that is new, with `.cpu()` on CUDA, and back to where it
    was. With a block of host memory each goes to its place in that instead."""
    flats = [flat(item) for item in items]
    if block is None:
        kept: list[torch.Tensor] = []
        out = timed(lambda: kept.extend(one.cpu() if one.is_cuda else one.clone() for one in flats))
    else:
        kept = list(block.split([one.numel() for one in flats]))  # type: ignore[no-untyped-call]
        out = timed(lambda: [place.copy_(one) for one, place in zip(flats, kept, strict=True)])
    back = timed(lambda: [one.copy_(place) for one, place in zip(flats, kept, strict=True)])
    kept.clear()
    if block is None:
        host.trim()
    return out, back


# -- torch_memory_saver, where it is installed, on CUDA: all that the job allocates is in a region that it pauses. Its region also has what
# training leaves cached, which goes out and back too: `left` is how much that was in all. Has not run on a GPU yet. ------------


def saved(*, size: str, cycles: int) -> dict[str, Any]:
    """Seconds of pause and resume, and the bytes that left the GPU; or why it cannot be measured here."""
    if not torch.cuda.is_available():
        return {"refused": "not measured here: it pauses CUDA memory, which needs a GPU"}
    if not find_spec(SAVER):
        return {"refused": "not installed"}
    saver = import_module(SAVER).torch_memory_saver
    saver.hook_mode = "torch"  # the other one needs a library preloaded into the ranks
    with saver.region(tag=TAG, enable_cpu_backup=True):
        job = model.build(ModelConfig(size=size, seq=16, microbatches=1))
        job.step(1)
    try:
        return saver_cycles(saver, job, cycles)
    finally:
        job.mover.close()
        groups.destroy()


def saver_cycles(saver: Any, job: model.Training, cycles: int) -> dict[str, Any]:
    before = job.hashes()
    times: dict[str, list[float]] = {"out": [], "back": []}
    left = []
    for _ in range(cycles):
        full = _used(job)
        times["out"].append(timed(lambda: saver.pause(TAG)))
        left.append(full - _used(job))
        times["back"].append(timed(lambda: saver.resume(TAG)))
    if job.hashes() != before:
        raise KitError(f"{SAVER} brought other bytes back than it took")
    return {"times": times, "left": min(left)}


def _used(job: model.Training) -> int:
    seen = device_memory(str(job.device))
    assert seen is not None
    return seen.driver_used


# -- all groups of a job released and brought back in one way, again and again -----------------------------------------


GLOO, STORE = "gloo over the store", "ncclCommInitRankConfig over the store"
SPLIT, KEPT = "ncclCommSplit", "ncclCommResume"
EXTRA = "_MORE_FOR_THE_BENCH_GROUPS"  # a global among Megatron's own, so that every mode finds what it holds


def refused(*, mode: str) -> str:
    """Why these ranks cannot release in this way; empty where they can."""
    if mode not in groups.KEEPING:
        return ""
    try:
        groups.refuse_keeping()
    except BadInput as error:
        return str(error)
    return ""


def mechanism(*, mode: str, by_store: bool) -> str:
    """What makes this rank's communicators again. Under a default group that is bound to its device, torch splits it; the exact modes
    unbind it meanwhile, and so does `by_store`."""
    if not c10d._world.default_pg.bound_device_id:
        return STORE if torch.cuda.is_available() else GLOO
    if mode in groups.KEEPING:
        return KEPT
    return STORE if by_store or mode in groups.EXACT else SPLIT


def cycles(*, mode: str, by_store: bool, total: int, n: int) -> dict[str, Any]:
    """A job of tensor parallel 2 with `total` groups a rank, or as many as Megatron makes where that is 0 or less than it makes."""
    job = model.build(ModelConfig(tp=2, layers=1))
    own = len(current_groups())
    more = max(0, total - own)
    make_extra(more)
    job.step(1)
    every_group_talks()
    gc.collect()
    first = levels()
    seen = [cycle(mode, more, by_store=by_store) for _ in range(n)]
    last = levels()
    job.mover.close()
    left = {name: last.get(name, 0) - first[name] for name in first}
    return {"groups": own + more, "cycles": seen, "left": left, "mechanism": mechanism(mode=mode, by_store=by_store)}


def cycle(mode: str, more: int, *, by_store: bool) -> dict[str, Any]:
    """Seconds of each part, and what the release gave back by source."""
    before = levels()
    snapshot: list[Any] = []

    def back() -> None:
        with unbound(c10d._world.default_pg) if by_store else contextlib.nullcontext():
            groups.reload(snapshot[0])
            if mode not in (*groups.EXACT, *groups.KEEPING):
                make_extra(more)  # these two rebuild what Megatron makes; the caller makes the others again

    seconds = {"release": together(lambda: snapshot.append(groups.destroy(mode)["snapshot"]))}
    gc.collect()
    released = levels()  # once all have released: a GPU may be shared
    seconds |= {"back": together(back), "first collective": together(every_group_talks)}
    return {"seconds": seconds, "freed": {name: before[name] - released.get(name, 0) for name in before}}


def together(work: Callable[[], object]) -> float:
    """Seconds of this rank's own work; all ranks begin it together."""
    dist.barrier()
    return seconds_of(work)


def make_extra(number: int) -> None:
    """Groups of all ranks, in a global of Megatron's. It holds those that were there before no longer."""
    everyone = list(range(dist.get_world_size()))
    made = [dist.new_group(everyone, group_desc=f"MORE_{index}") for index in range(number)]
    setattr(parallel_state(), EXTRA, made)


def every_group_talks() -> None:
    wrong = [row["group"] for row in groups.talk(current_groups()) if not row["exact"]]
    assert not wrong, f"a wrong sum over {wrong}"


def levels() -> dict[str, int]:
    """What this process holds once all ranks have come here, by source: counts, and bytes. NCCL's own statistics are there while it has
    communicators."""
    dist.barrier()
    return {**counts()._asdict(), **memory(), **{f"comm_{name}": size for name, size in groups.communicators().items()}}


# -- steps of a job, whole and in pieces, and losses alone ---------------------------------------------------------------

PLAIN, AGAIN = "plain", "plain again"
WORDS = 1000  # a model has 50 to 150 times as many
AT_ONCE = 10  # passes of a loss in one sample: a single one takes about a millisecond
# So small a rate that every step meets the same loss: the ways can be seen to do the same work.
STILL = Settings(lr=1e-12, first_lr=1e-12, last_lr=1e-12)


class Bench:
    """A job, and the ways to step it."""

    def __init__(self, config: SplitConfig) -> None:
        self.config = config
        wanted = model_config(config)
        self.device = model.initialise(wanted)
        self.plain: Any
        self.pieces: Any
        if config.backend == "fsdp2":
            weights = initial_weights(wanted.geometry, config.seed)
            sharded = fsdp.build(wanted.geometry, weights, settings=STILL, device=self.device)
            self.plain, self.pieces = fsdp.FsdpSync(sharded), fsdp.FsdpSplit(sharded)
        else:
            self.job = model.assemble(wanted, self.device, STILL)
            self.plain, self.pieces = split.MegatronSync(self.job), split.MegatronSplit(self.job)
        self.loss = ClippedPolicyGradient(**RECIPES["grpo"])
        self.results: dict[str, list[StepResult]] = {}

    def data(self, *, full: bool = False) -> Batch:
        """Rows of this data rank, noise: answers of half a row to a whole one, or whole rows only."""
        vocab = model_config(self.config).geometry.vocab
        count = self.config.microbatches * self.config.micro_batch
        return noise(count, self.config.length, vocab, dist.get_rank(split.data_group()), full=full)

    def way(self, name: str, data: Batch, chunks: int | None) -> Callable[[], None]:
        """A whole step: plain, or in `chunks` calls (0: one per microbatch). The rows are cut beforehand."""
        config, results = self.config, self.results.setdefault(name, [])
        if chunks is None:
            return lambda: results.append(self.plain.run(self.loss, data, config.batch, config.micro_batch))
        pieces = chunks_of(data, chunks, config.micro_batch)

        def step() -> None:
            self.pieces.begin(self.loss, config.batch, config.micro_batch)
            for piece in pieces:
                self.pieces.microbatch(piece)
            results.append(self.pieces.finish())

        return step

    def apart(self, *names: str) -> float:
        """How far losses and norms of these ways are from each other, relative: a time without a content check is worth little."""
        results = [result for name in names for result in self.results[name]]
        if not all(result["updated"] for result in results):
            raise KitError("a step that was timed made no update: its gradients are not finite")
        numbers = [[result["global_loss"] for result in results], [result["grad_norm"] for result in results]]
        return max((max(each) - min(each)) / max(map(abs, each)) for each in numbers)


def noise(count: int, length: int, vocab: int, seed: int, *, full: bool = False) -> Batch:
    """Rows as a loss wants them, with log-probabilities about where those of an untrained model are."""
    generator = torch.Generator().manual_seed(seed)

    def near(middle: float) -> torch.Tensor:
        return middle + 0.1 * torch.randn(count, length, generator=generator)

    ids = torch.randint(0, vocab, (count, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)
    lengths = torch.full((count,), length) if full else lengths
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": (torch.arange(length)[None] < lengths[:, None]).float(),
        "sample_mask": torch.ones(count),
        "advantages": near(0.0) * 10,
        "prev_logprobs": near(-math.log(vocab)),
        "generation_logprobs": near(-math.log(vocab)),
        "reference_logprobs": near(-math.log(vocab)),
    }


def turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, turn by turn. All ranks begin each work together."""

    def once(name: str, _: int) -> float:
        dist.barrier()
        return timed(works[name])

    return turn_by_turn(list(works), rounds, once)


def steps(*, job: dict[str, Any], chunks: list[int], rounds: int) -> dict[str, Any]:
    """The plain step, the same once more, and the step cut in so many calls."""
    bench = Bench(SplitConfig(chunks=tuple(chunks), **job))
    data = bench.data()
    ways: dict[str, int | None] = {PLAIN: None, AGAIN: None} | {str(count): count for count in chunks}
    seconds = turns({name: bench.way(name, data, count) for name, count in ways.items()}, rounds)
    groups.destroy()
    return {"seconds": seconds, "apart": bench.apart(*ways)}


def experts(*, job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The plain step, and the one in pieces: on rows that are all alike, and on rows that need a correction of the experts' loss."""
    bench = Bench(SplitConfig(chunks=(1,), **job))
    alike, ragged = bench.data(full=True), bench.data()
    passes: list[object] = []
    bench.job.chunks[0].register_forward_pre_hook(lambda *_: passes.append(None))
    works = {
        PLAIN: bench.way(PLAIN, ragged, None),
        AGAIN: bench.way(AGAIN, ragged, None),
        "uncorrected": bench.way("uncorrected", alike, 1),
        "corrected": bench.way("corrected", ragged, 1),
    }
    seen = {}
    for name, work in works.items():
        passes.clear()
        work()
        seen[name] = len(passes)
    seconds = turns(works, rounds)
    groups.destroy()
    return {"seconds": seconds, "apart": bench.apart(PLAIN, AGAIN, "corrected"), "passes": seen}


def peak(*, job: dict[str, Any], chunks: int | None, steps: int) -> int:
    """The most bytes that this process had, from when the job stood: of the device's allocator, or resident on the host."""
    bench = Bench(SplitConfig(chunks=(chunks or 1,), **job))
    work = bench.way("alone", bench.data(), chunks)
    refused = reset_peaks(str(bench.device))
    if refused and bench.device.type == "cpu":
        raise KitError(f"peaks of memory cannot be set back here: {refused}")
    for _ in range(steps):
        work()
    bench.apart("alone")
    on_device = device_memory(str(bench.device))
    most = on_device.peak_allocated if on_device else host_memory().get("peak_rss")
    groups.destroy()
    if most is None:
        raise KitError("this kernel does not report a process's peak memory (VmHWM)")
    return most


def losses(*, rows: int, length: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Each loss forward and backward, bare and with its metrics: nothing but the loss; and one from the logits of a small vocabulary."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    batch = {name: value.to(device) for name, value in noise(rows, length + 1, 1000, 0).items()}
    current = (batch["prev_logprobs"][:, 1:] + 0.1).requires_grad_()
    logits = torch.randn(rows * length, WORDS, device=device).requires_grad_()
    answer = batch["input_ids"][:, 1:].flatten()

    def from_logits() -> torch.Tensor:
        return -functional.cross_entropy(logits, answer, reduction="none").view(rows, length)

    def passes(loss: Any, leaf: torch.Tensor, logprobs: Callable[[], torch.Tensor], n: int) -> None:
        for _ in range(n):
            leaf.grad = None
            value, _ = loss(logprobs(), batch, tokens=1000.0, sequences=8.0)
            value.backward()

    kinds: dict[str, tuple[Recipe, torch.Tensor, Callable[[], torch.Tensor], int]]
    kinds = {str(recipe): (recipe, current, lambda: current, AT_ONCE) for recipe in RECIPES}
    kinds[f"grpo from logits of {WORDS} words"] = ("grpo", logits, from_logits, 1)
    seen = {}
    for name, (recipe, leaf, logprobs, n) in kinds.items():
        ways = {"bare": loss_of(recipe, metrics=False), "metrics": loss_of(recipe, metrics=True)}
        taken = turns({way: partial(passes, loss, leaf, logprobs, n) for way, loss in ways.items()}, rounds)
        seen[name] = {way: [each / n for each in seconds] for way, seconds in taken.items()}
    return seen


def loss_of(recipe: Recipe, *, metrics: bool) -> Any:
    if recipe == "nll":
        return NegativeLogLikelihood(metrics=metrics)
    level: Any = "sequences" if recipe == "gspo" else "tokens"
    return ClippedPolicyGradient(level=level, metrics=metrics, **RECIPES[recipe])
