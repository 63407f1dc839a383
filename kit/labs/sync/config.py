"""What the sync lab can be told, who works on which device, and its phases in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from kit.errors import BadInput
from kit.labs.definition import Role, Step
from kit.labs.options import LabConfig, Option
from kit.megatron.config import DTYPE_BYTES, ModelConfig, check, dtype_on

TRANSPORTS = ("auto", "shm", "broadcast", "rendezvous", "serialize", "ipc", "per-tensor")
ONE_WORLD = ("broadcast", "per-tensor")  # they make a group inside of a World


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig(LabConfig):
    """A trainer, inference replicas, and how weights get from one to the others. Trainer ranks come first."""

    ranks: Annotated[int, Option("trainer and inference ranks together", low=2, high=4096)] = 5
    size: Annotated[Literal["tiny", "125m", "qwen2.5-0.5b"], Option("geometry of the model")] = "tiny"
    layers: Annotated[int | None, Option("layers; null: the size's own", low=1, high=200)] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option("type of the weights; auto: bfloat16 on CUDA, float32 on the CPU"),
    ] = "auto"
    seed: Annotated[int, Option("seed of weights and data", low=0, high=2**31)] = 1234
    tp: Annotated[int, Option("the trainer's tensor parallel size", low=1, high=64)] = 2
    pp: Annotated[int, Option("the trainer's pipeline parallel size", low=1, high=64)] = 1
    infer_tp: Annotated[int, Option("tensor parallel size of each inference replica", low=1, high=64)] = 1
    replicas: Annotated[int, Option("inference replicas", low=1, high=512)] = 3
    placement: Annotated[
        Literal["overlap", "apart"],
        Option("overlap: the trainer works on the replicas' first devices, and these replicas sleep meanwhile"),
    ] = "overlap"
    trainer_on: Annotated[
        tuple[int, ...],
        Option("devices of the trainer's ranks, the replicas' own counting from 0; empty: by placement"),
    ] = ()
    asynchronous: Annotated[bool, Option("whether replicas serve while the trainer trains")] = True
    worlds: Annotated[
        Literal["one", "two"], Option("whether trainer and inference are one torchrun job, or one each")
    ] = "one"
    cycles: Annotated[int, Option("training steps that are brought to the replicas", low=1, high=1000)] = 3
    steps: Annotated[int, Option("optimizer steps to a version", low=1, high=1000)] = 1
    refresh: Annotated[
        Literal["staged", "paused"],
        Option(
            "staged: replicas serve until all bytes are there; paused: they stop, and bytes go straight into weights"
        ),
    ] = "staged"
    transport: Annotated[
        str,
        Option(
            "how buckets travel: auto (by where each receiver lives), one by name, or your own, module:attr",
            target=True,
            names=TRANSPORTS,
        ),
    ] = "auto"
    bucket_mib: Annotated[
        float | None, Option("size of a bucket; null: found from the tensors", low=0.001, high=65536)
    ] = None
    oversize: Annotated[
        Literal["refuse", "split"], Option("what is done with a tensor that is larger than a bucket")
    ] = "split"
    verify: Annotated[
        Literal["none", "mix128", "xxh3", "sha256"], Option("digest that receivers compare before weights change")
    ] = "mix128"
    verify_share: Annotated[
        float, Option("which share of tensors is compared on the way, others with every version", low=0.001, high=1)
    ] = 1.0
    deadline_s: Annotated[
        float, Option("how long an end of a sync waits for the other", low=0.5, high=3600, unit="s")
    ] = 30.0
    sweep: Annotated[bool, Option("whether transports and bucket sizes are compared on bytes made for it")] = True
    sweep_mib: Annotated[int, Option("how many bytes that comparison moves", low=1, high=1 << 16, unit="MiB")] = 64

    def __post_init__(self) -> None:
        if self.trainer_ranks < 1 or self.trainer_ranks % (self.tp * self.pp):
            raise BadInput(
                f"ranks={self.ranks}: {self.replicas} replicas of infer_tp={self.infer_tp} leave {max(self.trainer_ranks, 0)} ranks to the "
                f"trainer, which needs a multiple of tp x pp = {self.tp * self.pp}"
            )
        check(trainer_model(self), self.trainer_ranks)
        check(replica_model(self), self.infer_tp)
        self._check_topology()
        if self.oversize == "refuse" and self.bucket_mib is not None and self.bucket_mib * 2**20 < self.largest:
            raise BadInput(
                f"bucket_mib={self.bucket_mib:g} is less than the largest tensor, {self.largest / 2**20:.3g} MiB, and oversize=refuse: "
                "make buckets larger, or let tensors be split"
            )
        if self.worlds == "two" and self.transport in ONE_WORLD:
            raise BadInput(
                f"transport={self.transport} makes a group inside of one World, which ranks of two cannot share: "
                "take rendezvous, shm or serialize"
            )
        if self.transport in ONE_WORLD and self.awake == self.replicas and self.trainer_ranks == 1:
            raise BadInput(
                f"transport={self.transport} needs a rank that takes no part, as its group is a proper part of the World: "
                "here the sender and all replicas would be all of it"
            )
        if self.transport == "ipc" and self.device == "cpu":
            raise BadInput("transport=ipc hands over CUDA memory: it needs device=cuda")

    def _check_topology(self) -> None:
        devices, pool = self.trainer_devices, set(range(self.infer_ranks))
        if len(devices) != self.trainer_ranks or len(set(devices)) != len(devices):
            raise BadInput(
                f"trainer_on={list(devices)} must name a device of its own for each of {self.trainer_ranks} ranks"
            )
        if self.placement == "apart" and not pool.isdisjoint(devices):
            shared = sorted(pool & set(devices))
            raise BadInput(f"placement=apart, and the trainer shares devices {shared} with replicas: take overlap")
        if pool.isdisjoint(devices):
            return
        if self.replicas < 2:
            raise BadInput(
                f"replicas={self.replicas}: at least two are needed where the trainer works on their devices, as one sleeps meanwhile "
                "and another serves; take 2 or more, or placement=apart"
            )
        room = self.infer_ranks - self.infer_tp
        if not self.trainer_on and self.trainer_ranks > room:
            raise BadInput(
                f"{self.trainer_ranks} ranks of the trainer on the devices of {self.replicas} replicas of infer_tp={self.infer_tp} leave "
                f"none to serve: at most {room} may be there; take fewer ranks, more replicas, or placement=apart"
            )
        if not set(devices) <= pool:
            raise BadInput(
                f"the trainer's devices {list(devices)} must all be of the pool, 0 to {self.infer_ranks - 1}, once one of them is"
            )
        if not self.awake:
            raise BadInput(
                f"each of {self.replicas} replicas shares a device with the trainer "
                f"(devices {list(devices)}, {self.infer_tp} to a replica): one whole replica at least must keep its devices to itself"
            )
        if not self.asynchronous:
            raise BadInput(
                "sharing devices needs asynchronous=true: the replicas that stay up serve while the trainer trains"
            )

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        g = trainer_model(self).geometry
        return g.hidden * max(g.vocab, g.ffn, g.hidden) * DTYPE_BYTES[dtype_on(self.dtype)]

    @property
    def infer_ranks(self) -> int:
        return self.infer_tp * self.replicas

    @property
    def trainer_ranks(self) -> int:
        return self.ranks - self.infer_ranks

    @property
    def trainer_devices(self) -> tuple[int, ...]:
        """Numbers in the pool, which is the replicas' devices from 0 on; what lies beyond is the trainer's alone."""
        first = 0 if self.placement == "overlap" else self.infer_ranks
        return self.trainer_on or tuple(range(first, first + self.trainer_ranks))

    def sleeps(self, replica: int) -> bool:
        """Whether a replica shares a device with the trainer."""
        own = range(replica * self.infer_tp, (replica + 1) * self.infer_tp)
        return not set(own).isdisjoint(self.trainer_devices)

    @property
    def awake(self) -> int:
        """Whole replicas that stay up."""
        return sum(not self.sleeps(replica) for replica in range(self.replicas))

    @property
    def shares(self) -> bool:
        return self.awake < self.replicas


def trainer_model(config: SyncConfig) -> ModelConfig:
    return ModelConfig(
        size=config.size,
        layers=config.layers,
        tp=config.tp,
        pp=config.pp,
        dtype=dtype_on(config.dtype),
        seed=config.seed,
        micro_batch=1,
        microbatches=max(1, config.pp),
    )


def replica_model(config: SyncConfig) -> ModelConfig:
    return ModelConfig(
        size=config.size, layers=config.layers, tp=config.infer_tp, dtype=dtype_on(config.dtype), seed=config.seed
    )


def roles(config: SyncConfig) -> tuple[Role, ...]:
    """The trainer, the replicas that serve, and those that sleep while the trainer works on their devices."""
    first, apart = config.trainer_ranks, int(config.worlds == "two")
    replicas = {
        sleeps: tuple(
            rank for rank in range(first, config.ranks) if config.sleeps((rank - first) // config.infer_tp) == sleeps
        )
        for sleeps in (False, True)
    }
    found = (
        Role(name="trainer", ranks=tuple(range(first))),
        Role(name="replica", ranks=replicas[False], world=apart),
        Role(name="sleeper", ranks=replicas[True], world=apart),
    )
    return tuple(role for role in found if role.ranks)


def plan(config: SyncConfig) -> list[Step]:
    """The base, then every version: trained, brought to those that serve, and to those that wake while the trainer's weights are away."""
    refresh = [("refresh", ("trainer", "replica"))] if config.awake else []
    expand = [("offload", ("trainer",)), ("expand", ("trainer", "sleeper"))] if config.shares else []
    cycle = [("train", ("trainer",)), *refresh, *expand, ("verify", ()), *([("shrink", ())] if config.shares else [])]
    steps = [Step(number, phase, who) for number in range(1, config.cycles + 1) for phase, who in cycle]
    return [
        Step(0, "prepare"),
        Step(0, "base"),
        *steps,
        *([Step(0, "sweep")] if config.sweep else []),
        Step(0, "rehearse"),
        Step(0, "end"),
    ]
