"""The settings of the sync lab, the placement of its roles on devices, and its phases in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from kit.errors import refuse_if
from kit.labs.definition import Definition, JobConfig, Option, Role, Step, check_fits, check_transport, model_of
from kit.labs.served import FOR_ENGINES, REPLICA_PYTHON, SERVE, check_engine_there, check_served, engine_bytes
from kit.labs.sync.faults import FAULTS
from kit.machine import has_gpu_driver
from kit.megatron.config import DTYPE_BYTES, ModelConfig, check, dtype_on, model_bytes

TRANSPORTS = ("auto", "shm", "broadcast", "rendezvous", "serialize", "ipc", "per-tensor")
ONE_WORLD = ("broadcast", "per-tensor")  # they create a group inside one World
ASKED, SELDOM = 256, 16  # a forward is attempted at each of these first buckets, and then at every 16th
CLOSED_S = 0.5  # how long groups, threads and sockets that are being closed may take after a failed sync
MOST_BESIDE = 0.5  # copies of the weights on the host beside the buckets: small models have much alignment


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig(JobConfig):
    """A trainer, inference replicas, and how weights get from the trainer to the replicas. Trainer ranks come first."""

    ranks: Annotated[int, Option("trainer and inference ranks together", low=2, high=4096)] = 5
    tp: Annotated[int, Option("tensor parallel size of the trainer", low=1, high=64)] = 2
    pp: Annotated[int, Option("pipeline parallel size of the trainer", low=1, high=64)] = 1
    experts: Annotated[int, Option("experts per layer; 0: a dense model", low=0, high=256)] = 0
    infer_tp: Annotated[int, Option("tensor parallel size of each inference replica", low=1, high=64)] = 1
    replicas: Annotated[int, Option("number of inference replicas", low=1, high=512)] = 3
    placement: Annotated[
        Literal["overlap", "apart"],
        Option("overlap: the trainer uses devices of the first replicas, which sleep; apart: it has its own devices"),
    ] = "overlap"
    worlds: Annotated[Literal["one", "two"], Option("run trainer and inference as one torchrun job or as two")] = "one"
    prewarm: Annotated[
        bool, Option("replicas that share devices with the trainer wake and sleep once before the first version")
    ] = False
    cycles: Annotated[int, Option("number of versions that are trained and sent to the replicas", low=1, high=1000)] = 3
    steps: Annotated[int, Option("optimizer steps per version", low=1, high=1000)] = 1
    refresh: Annotated[
        Literal["staged", "paused", "adopted"],
        Option(
            "staged: replicas serve until all bytes have arrived; paused: they stop, and bytes go directly into the weights; "
            "adopted: like staged, but buckets in shared memory become the weights, copy on write"
        ),
    ] = "staged"
    transport: Annotated[
        str,
        Option(
            "transport of buckets: auto (by the location of each receiver), a name, or your own as module:attr",
            target=True,
            names=TRANSPORTS,
        ),
    ] = "auto"
    serve: Annotated[str, SERVE] = "megatron"
    replica_python: Annotated[str, REPLICA_PYTHON] = ""
    receiver: Annotated[
        str,
        Option(
            "your own receiving side, module:attr; attr(ctx) has load, and may have finalize, forward, sleep and wake",
            target=True,
        ),
    ] = ""
    implementation: Annotated[
        str,
        Option(
            "your own synchroniser, module:attr, in place of the kit's; attr(ctx) has sync, and may have expand and shrink; "
            "or it has sync_weights",
            target=True,
        ),
    ] = ""
    bucket_mib: Annotated[
        float | None, Option("bucket size in MiB; null: from the sizes of the tensors", low=0.001, high=65536)
    ] = None
    oversize: Annotated[Literal["refuse", "split"], Option("treatment of a tensor larger than a bucket")] = "split"
    arena: Annotated[
        Literal["own", "cache"],
        Option(
            "where an offloaded trainer's weights are on the host: own: in a copy of their own; cache: in the buckets that were sent"
        ),
    ] = "own"
    verify: Annotated[
        Literal["auto", "none", "xxh3", "sha256"],
        Option(
            "digest that receivers compare before weights change; auto: xxh3 where the ranks have xxhash, else sha256"
        ),
    ] = "auto"
    verify_share: Annotated[
        float,
        Option("share of the tensors that receivers compare; other tensors with every version", low=0.001, high=1),
    ] = 1.0
    delta: Annotated[
        Literal["off", "tensor", "word"],
        Option(
            "what a version sends to replicas with the one before: off: everything; tensor: changed tensors; "
            "word: changed elements and their positions"
        ),
    ] = "off"
    kv_scales: Annotated[
        bool, Option("attention layers have scales of keys and values, which travel with the weights")
    ] = False
    lr: Annotated[float, Option("learning rate of the trainer", low=1e-8, high=1)] = 1e-3
    deadline_s: Annotated[
        float, Option("how long each end of a sync waits for the other", low=0.5, high=3600, unit="s")
    ] = 30.0
    sweep: Annotated[bool, Option("compare transports and bucket sizes on generated bytes")] = True
    sweep_mib: Annotated[int, Option("size of the data in that comparison", low=1, high=1 << 16, unit="MiB")] = 64

    def __post_init__(self) -> None:
        replicas = f"{self.replicas} replicas of infer_tp={self.infer_tp}"
        refuse_if(
            self.trainer_ranks < 1 or self.trainer_ranks % (self.tp * self.pp) > 0,
            f"ranks={self.ranks} with {replicas} leaves {max(self.trainer_ranks, 0)} ranks for the trainer, "
            f"which needs a multiple of tp x pp = {self.tp * self.pp}",
        )
        check_transport(self.transport, self.nodes)
        check(trainer_model(self), self.trainer_ranks)
        check(replica_model(self), self.infer_tp)
        check_served(self, replica_model(self))
        refuse_if(
            self.serve != "megatron" and self.receiver != "",
            f"receiver={self.receiver} loads into the kit's model, but serve={self.serve}: use one of the two",
        )
        overlap = self.placement == "overlap"
        refuse_if(
            self.prewarm and not overlap,
            "prewarm wakes replicas that sleep, but with placement=apart none does: use placement=overlap",
        )
        refuse_if(
            overlap and self.replicas < 2,
            f"replicas={self.replicas} cannot share devices with the trainer: one replica sleeps while another one serves; "
            "use at least 2, or placement=apart",
        )
        refuse_if(
            overlap and self.nodes > 1,
            f"placement=overlap shares the devices of one machine, but nodes={self.nodes}: use placement=apart",
        )
        room = self.infer_ranks - self.infer_tp
        refuse_if(
            overlap and self.trainer_ranks > room,
            f"{self.trainer_ranks} trainer ranks on the devices of {replicas} leave no replica to serve: "
            f"use at most {room} trainer ranks, more replicas, or placement=apart",
        )
        refuse_if(
            self.oversize == "refuse" and self.bucket_mib is not None and self.bucket_mib * 2**20 < self.largest,
            f"bucket_mib={self.bucket_mib} is less than the largest tensor ({self.largest / 2**20:.3g} MiB) "
            "and oversize=refuse: use larger buckets or oversize=split",
        )
        refuse_if(
            bool(self.implementation) and self.transport != "auto",
            f"transport={self.transport} belongs to the kit's own synchroniser: leave it out with "
            f"implementation={self.implementation}",
        )
        refuse_if(
            bool(self.implementation) and self.delta != "off",
            f"delta={self.delta} belongs to the kit's own synchroniser: leave it out with implementation={self.implementation}",
        )
        refuse_if(
            self.delta != "off" and self.arena == "cache",
            f"delta={self.delta} compares two versions of the weights, but arena=cache keeps one: use one of the two",
        )
        refuse_if(self.experts == 1, "experts=1 is too few: a token goes to 2 of them; use 2 or more, or 0")
        refuse_if(
            self.experts > 0 and self.serve != "megatron",
            f"experts={self.experts} needs the kit's model on both ends, but serve={self.serve}: use serve=megatron",
        )
        refuse_if(
            self.experts > 0 and self.dtype != "float32",
            f"dtype={self.dtype} may round so that a token goes to other experts, which changes its logits: use dtype=float32 with "
            f"experts={self.experts}",
        )
        refuse_if(
            self.kv_scales and self.serve != "megatron",
            f"kv_scales needs the kit's model on both ends, but serve={self.serve}: use serve=megatron",
        )
        refuse_if(
            self.delta == "word" and (self.receiver != "" or self.serve != "megatron"),
            f"{f'receiver={self.receiver}' if self.receiver else f'serve={self.serve}'} loads whole tensors, but delta=word sends "
            "parts of them: use delta=tensor",
        )
        refuse_if(
            self.delta != "off" and self.serve == "vllm",
            f"serve=vllm loads a packed layer only as a whole, but delta={self.delta} sends parts of it: use delta=off",
        )
        refuse_if(
            self.delta != "off" and (self.verify == "none" or self.verify_share < 1),
            f"delta={self.delta} compares all weights after every sync: leave verify and verify_share at their defaults",
        )
        refuse_if(
            self.arena == "cache" and (self.placement == "apart" or self.implementation != ""),
            "arena=cache keeps the weights of an offloaded trainer in the kit's buckets: use placement=overlap without implementation=",
        )
        plain = {"serve": "megatron", "receiver": "", "implementation": "", "delta": "off", "nodes": 1, "infer_tp": 1}
        other = [f"{name}={getattr(self, name)}" for name, value in plain.items() if getattr(self, name) != value]
        other += [f"transport={self.transport}"] * (self.transport not in {"auto", "shm"})
        other += ["device=cuda"] * (self.device == "cuda")
        refuse_if(
            self.refresh == "adopted" and bool(other),
            "refresh=adopted makes whole versions in this machine's shared memory the weights of the kit's model on the CPU, "
            f"which does not work with {' and '.join(other)}: use refresh=staged",
        )
        one_world = self.transport in ONE_WORLD
        refuse_if(
            self.worlds == "two" and one_world,
            f"transport={self.transport} needs a process group inside one World, but worlds=two: "
            "use rendezvous, shm or serialize",
        )
        refuse_if(
            one_world and self.awake == self.replicas and self.trainer_ranks == 1,
            f"transport={self.transport} needs at least one rank outside the sync group, but the sender and the replicas are all "
            f"{self.ranks} ranks: use shm, or add a trainer rank",
        )
        refuse_if(
            self.transport == "ipc" and self.device == "cpu",
            "transport=ipc shares CUDA memory and needs device=cuda",
        )

    @property
    def largest(self) -> int:
        g = trainer_model(self).geometry
        return g.hidden * max(g.vocab, g.ffn, g.hidden) * DTYPE_BYTES[dtype_on(self.dtype)]

    @property
    def own_transport(self) -> bool:
        return ":" in self.transport

    @property
    def infer_ranks(self) -> int:
        return self.infer_tp * self.replicas

    @property
    def trainer_ranks(self) -> int:
        return self.ranks - self.infer_ranks

    @property
    def trainer_devices(self) -> range:
        """Device numbers: the replicas have 0, 1, ...; higher numbers belong to the trainer only."""
        first = 0 if self.placement == "overlap" else self.infer_ranks
        return range(first, first + self.trainer_ranks)

    def sleeps(self, replica: int) -> bool:
        """Whether a replica shares a device with the trainer."""
        own = range(replica * self.infer_tp, (replica + 1) * self.infer_tp)
        return not set(own).isdisjoint(self.trainer_devices)

    @property
    def awake(self) -> int:
        return sum(not self.sleeps(replica) for replica in range(self.replicas))

    @property
    def shares(self) -> bool:
        return self.awake < self.replicas


def is_asked(bucket: int) -> bool:
    """Whether a forward is attempted at this bucket: at all of them a run with many would not end."""
    return bucket < ASKED or bucket % SELDOM == 0


def trainer_model(config: SyncConfig) -> ModelConfig:
    return model_of(config, microbatches=max(1, config.pp))


def replica_model(config: SyncConfig) -> ModelConfig:
    return model_of(config, tp=config.infer_tp, pp=1)


def roles(config: SyncConfig) -> tuple[Role, ...]:
    """The trainer, the replicas that serve, and those that sleep while the trainer uses their devices."""
    first, apart = config.trainer_ranks, int(config.worlds == "two")
    replicas: dict[bool, tuple[int, ...]] = {False: (), True: ()}
    for rank in range(first, config.ranks):
        replicas[config.sleeps((rank - first) // config.infer_tp)] += (rank,)
    named = (
        ("trainer", tuple(range(first)), 0),
        ("replica", replicas[False], apart),
        ("sleeper", replicas[True], apart),
    )
    return tuple(Role(name=name, ranks=ranks, world=world) for name, ranks, world in named if ranks)


def plan(config: SyncConfig) -> list[Step]:
    """The base, then every version: train it, send it to serving replicas, then to waking ones while the trainer is offloaded."""
    refresh = [("refresh", ("trainer", "replica"))] if config.awake else []
    expand = [("offload", ("trainer",)), ("expand", ("trainer", "sleeper"))] if config.shares else []
    cycle = [("train", ("trainer",)), *refresh, *expand, ("verify", ()), *([("shrink", ())] if config.shares else [])]
    steps = [Step(number, phase, who) for number in range(1, config.cycles + 1) for phase, who in cycle]
    last = [*(["sweep"] if config.sweep and not config.implementation else []), "rehearse", "end"]
    return [Step(0, "prepare"), Step(0, "base"), *steps, *(Step(0, phase) for phase in last)]


GATHERED, CACHED = 1, 2  # models on the sender's host
STAGED = 2  # of a serving replica's shards: the old weights for an undo, and the received buckets


def fits(config: SyncConfig) -> None:
    trainer = trainer_model(config)
    stages = [model_bytes(trainer, ranks=config.trainer_ranks, stage=stage)["total"] for stage in range(config.pp)]
    jobs = sum(stages) * (config.trainer_ranks // config.pp)
    whole = model_bytes(replica_model(config), ranks=config.infer_tp)["params"] * config.infer_tp
    engines = engine_bytes(config, whole) * config.replicas
    copies = whole * (GATHERED + CACHED + STAGED * config.awake) + engines
    job, host = (jobs + whole * config.replicas) // config.ranks, copies // config.ranks
    check_fits(config, job=job, host=host, kept="for copies on the way to the replicas" + FOR_ENGINES * bool(engines))
    refuse_if(
        config.refresh == "adopted" and config.device == "auto" and has_gpu_driver(),
        "refresh=adopted makes memory of the host the weights, but device=auto is a GPU here: use device=cpu or refresh=staged",
    )
    check_engine_there(config)


LAB = Definition(
    name="sync",
    summary="weights go from trainer shards to inference replicas, verified and versioned; no forward runs on torn weights",
    config=SyncConfig,
    plan=plan,
    roles=roles,
    fits=fits,
    phases="kit.labs.sync.ranks.phases:side",
    rules="kit.labs.sync.rules:RULES",
    presets="kit.labs.sync.rules:PRESETS",
    charts="kit.labs.sync.charts:CHARTS",
    first=("size", "ranks", "tp", "pp", "replicas", "placement", "transport", "cycles", "steps"),
    faults=FAULTS,
    preload=("megatron.core",),
)
