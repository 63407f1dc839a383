"""The parts of a reference: what is run, in which order, and what it is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kit.bench.cost import Cost, total
from kit.bench.session import chosen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GPU_MINUTES = 8.0
ASSUMED_BOX = {
    "ranks": {"suspend_why": "NCCL 2.28.9 cannot suspend communicators"}
}  # one H200, torch 2.11, in doctor's words


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One command with its files. `cost` is what it does, `needs` what NCCL must have for it ("suspend")."""

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    needs: str = ""

    @property
    def lab(self) -> str:
        """Its lab; empty for a bench."""
        return self.command[1] if self.command[0] == "run" else ""


def lab(name: str, called: str = "", *, cost: Cost | None = None, needs: str = "", **settings: Any) -> Part:
    work = Cost(process=1, megatron=1) if cost is None else cost
    return Part(name=f"lab-{called or name}", command=("run", name), settings=settings, cost=work, needs=needs)


def bench(name: str, *words: str, called: str = "", quick: bool = False, device: str = "") -> Part:
    """Some parts of a bench, or all of it."""
    module = import_module(f"kit.bench.{name}")
    parts = module.parts(module.QUICK if quick else module.Sizes(), device or "cpu")
    some = [part.cost for part in chosen(name, parts, words).values()]
    command = ["bench", name, *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    command += [option for word in words for option in ("--part", word)]
    label = "".join(f".{text}" for text in [called or "-".join(words)] if text)
    return Part(name=f"bench-{name}{label}", command=tuple(command), cost=Cost(process=1) + total(some))


def offload(
    mode: str, cycles: int, *, gib: float, weight: float, hashing: tuple[float, float], **settings: Any
) -> Part:
    """The offload lab: three builds, three times the training, and copies and hashes of `gib` for the controls and in each cycle."""
    first, each = hashing
    cost = Cost(process=1, megatron=1, job=3, step=3 * (cycles + 1) * weight, group=25 * cycles)
    cost += Cost(copy=gib * (first + each * cycles))
    needs = "suspend" if mode == "suspend" else ""
    return lab("offload", f"offload-{mode}", cost=cost, needs=needs, mode=mode, cycles=cycles, **settings)


def split(called: str, ways: int, *, microbatches: int = 10, **settings: Any) -> Part:
    """The split lab; `ways` counts steps of every way to cut, beside which there are the rehearsals."""
    cost = Cost(process=1, megatron=1, job=4, step=(20 + 2 * ways) * microbatches / 10)
    return lab("split", called, cost=cost, microbatches=microbatches, **settings)


def on_cpu() -> tuple[Part, ...]:
    # Enough bytes to be seen.
    seen: dict[str, Any] = {"size": "125m", "layers": 1, "seq": 16, "steps": 1, "microbatches": 1}
    sizes: dict[str, Any] = {"gib": 0.68, "weight": 5, "hashing": (12, 9)}
    return (
        lab("smoke", cost=Cost(process=1, world=1, group=40), cycles=5),
        *(offload(mode, 5, **sizes, **seen) for mode in ("exact", "abort", "manual", "official")),
        split("split", 40),
        lab("sync", cost=Cost(process=1, megatron=2, job=2, step=20), cycles=3),
        bench("world", "start", "megatron", called="start"),
        bench("world", "step", "death", "restart", "calls", "notebook", "help", called="steps"),
        bench("world", "torchrun"),
        bench("offload", "tensors.125m", called="125m"),
        bench("offload", "tensors.qwen2.5-0.5b", "saver", called="qwen2.5-0.5b"),
        bench("offload", "leaks"),
        bench("offload", "bitwise"),
        bench("release", "groups"),
        bench("release", "ranks"),
        *(bench("sync", shape) for shape in ("model", "small", "large")),
        bench("sync", "digests", "growth", called="others"),
        bench("routing"),
        bench("split", "steps.megatron", "steps.pipeline", called="steps"),
        bench("split", "steps.fsdp2", "steps.experts", called="more-steps"),
        bench("split", "losses", "memory", called="losses-and-memory"),
        bench("split", "grid.2"),
        bench("split", "grid.4"),
    )


def on_gpus() -> tuple[Part, ...]:
    """The most telling first, since there may be time for some only. Each asks for the GPU by name: one that cannot have it fails."""
    gpu = {"device": "cuda"}
    large: dict[str, Any] = {"size": "qwen2.5-0.5b", "layers": 2, "dtype": "bfloat16", "seq": 512, "steps": 1}
    sizes: dict[str, Any] = {"gib": 2.8, "weight": 3, "hashing": (5, 4), **large, "microbatches": 1, **gpu}
    fewer: dict[str, Any] = {"steps": 2, "chunks": [1, 2], "microbatches": 4, "level": "tokens", **gpu}
    return (
        offload("exact", 3, **sizes),
        *(offload(mode, 2, **sizes) for mode in ("suspend", "manual", "abort")),
        bench("release", "groups.own", called="own", quick=True, **gpu),
        split("split-bfloat16", 6, dtype="bfloat16", **fewer),
        bench("split", "steps.megatron", "steps.pipeline", called="steps", quick=True, **gpu),
        *(bench("sync", f"gpus.{way}", called=f"gpus-{way}", quick=True, **gpu) for way in ("ipc", "shm", "broadcast")),
        lab("sync", cost=Cost(process=1, megatron=1.5, job=3, step=20), cycles=2, **gpu),
        split("split-float32", 6, dtype="float32", **fewer),
        bench("offload", "tensors.125m", called="125m", quick=True, **gpu),
        lab("smoke", cost=Cost(process=1, world=1, group=24), cycles=3, **gpu),
        bench("world", "step", "restart", called="steps", quick=True),
        bench("routing", quick=True, **gpu),
    )


def able(parts: Sequence[Part], found: Mapping[str, Any]) -> tuple[list[Part], dict[str, str]]:
    """What this box can run, and why it cannot run the rest, both as doctor found."""
    why = found["ranks"].get("suspend_why") or ""
    out = {part.name: why for part in parts if part.needs == "suspend" and why}
    return [part for part in parts if part.name not in out], out
