"""Where each role may run is checked before any rank starts, in one sentence per rule; the plan depends on who sleeps."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kit
from kit.errors import BadInput
from kit.labs import definition
from kit.labs.definition import world_sizes
from kit.labs.rankside import Context
from kit.labs.served import VLLM_BYTES
from kit.labs.sync.lab import SyncConfig, plan, replica_model, roles
from kit.labs.sync.lab import fits as sync_fits
from kit.labs.sync.ranks.trainer import SyncTrainer
from kit.megatron.config import model_bytes
from kit.sync.transports import RankPlace, best_transport

GIB = 2**30


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"ranks": 4},
            "3 replicas of infer_tp=1 leaves 1 ranks for the trainer, which needs a multiple of tp x pp = 2",
        ),
        ({"ranks": 3}, "leaves 0 ranks for the trainer"),
        ({"ranks": 8, "replicas": 2, "tp": 3, "infer_tp": 1}, "tp=3 does not divide 4 heads"),
        ({"ranks": 8, "replicas": 2, "infer_tp": 3}, "infer_tp=3 does not divide|tp=3 does not divide 4 heads"),
        ({"replicas": 1}, "replicas=1 cannot share devices with the trainer"),
        (
            {"ranks": 3, "replicas": 1, "infer_tp": 2, "tp": 1},
            "one replica sleeps while another one serves.*or placement=apart$",
        ),
        (
            {"ranks": 4, "replicas": 2},
            "2 trainer ranks on the devices of 2 replicas of infer_tp=1 leave no replica to serve: use at most 1 trainer ranks",
        ),
        ({"ranks": 6, "replicas": 2}, "4 trainer ranks on the devices of 2 replicas .* use at most 1 trainer ranks"),
        ({"worlds": "two", "transport": "broadcast"}, "needs a process group inside one World"),
        (
            {"ranks": 2, "tp": 1, "replicas": 1, "placement": "apart", "transport": "broadcast"},
            "needs at least one rank outside the sync group",
        ),
        ({"transport": "pigeon"}, "transport"),
        (
            {"arena": "cache", "placement": "apart"},
            "arena=cache keeps the weights of an offloaded trainer in the kit's buckets: use placement=overlap",
        ),
        ({"arena": "cache", "implementation": "mine:Sync"}, "arena=cache .* without implementation="),
        ({"transport": "ipc", "device": "cpu"}, "transport=ipc shares CUDA memory"),
        *(
            ({"refresh": "adopted", **other}, f"refresh=adopted .* does not work with {name}: use refresh=staged$")
            for other, name in (
                ({"device": "cuda"}, "device=cuda"),
                ({"transport": "broadcast"}, "transport=broadcast"),
                ({"transport": "pkg:Own", "delta": "tensor"}, "delta=tensor and transport=pkg:Own"),
                ({"ranks": 6, "replicas": 2, "infer_tp": 2}, "infer_tp=2"),
                ({"serve": "transformers", "size": "small"}, "serve=transformers"),
                ({"receiver": "mine:Own"}, "receiver=mine:Own"),
                ({"implementation": "mine:Sync"}, "implementation=mine:Sync"),
            )
        ),
        (
            {"oversize": "refuse", "bucket_mib": 0.01},
            r"is less than the largest tensor \(0.0625 MiB\) and oversize=refuse",
        ),
        (
            {"serve": "transformers", "ranks": 6, "replicas": 2, "infer_tp": 2},
            "serve=transformers puts a whole model on each rank, but infer_tp=2: use infer_tp=1",
        ),
        ({"serve": "mine:Engine", "receiver": "mine:Side"}, "receiver=mine:Side loads into the kit's model"),
        (
            {"serve": "vllm", "placement": "apart", "ranks": 4, "replicas": 2},
            "heads whose width is a multiple of 32, but those of size=tiny have 16: use size=small",
        ),
        (
            {"serve": "vllm", "size": "small", "ranks": 6, "replicas": 2, "infer_tp": 2},
            "serve=vllm puts a whole model on each rank, but infer_tp=2: use infer_tp=1",
        ),
        ({"prewarm": True, "placement": "apart"}, "with placement=apart none does: use placement=overlap"),
        ({"serve": "vllm", "device": "cuda"}, "serve=vllm runs on a CPU here, but device=cuda"),
        ({"serve": "sglang"}, "serve must be one of megatron, transformers, vllm, or module:attr"),
        ({"delta": "word", "arena": "cache"}, "compares two versions of the weights, but arena=cache keeps one"),
        ({"kv_scales": True, "serve": "transformers"}, "kv_scales needs the kit's model on both ends"),
        ({"experts": 4, "tp": 1, "serve": "transformers"}, "experts=4 needs the kit's model on both ends"),
        (
            {"experts": 4, "tp": 1, "dtype": "bfloat16"},
            "dtype=bfloat16 may round so that a token goes to other experts",
        ),
        ({"experts": 1, "tp": 1}, "experts=1 is too few: a token goes to 2 of them"),
        ({"experts": 4}, "experts=4 with tp=2 is not supported"),
        ({"delta": "word", "serve": "transformers"}, "serve=transformers loads whole tensors, but delta=word"),
        (
            {"delta": "tensor", "serve": "vllm", "size": "small", "placement": "apart"},
            "loads a packed layer only as a whole, but delta=tensor",
        ),
        ({"delta": "word", "receiver": "mine:Side"}, "receiver=mine:Side loads whole tensors.*use delta=tensor"),
        ({"delta": "tensor", "implementation": "mine:Sync"}, "delta=tensor belongs to the kit's own synchroniser"),
        ({"delta": "tensor", "verify": "none"}, "compares all weights after every sync: leave verify"),
        ({"delta": "tensor", "verify_share": 0.5}, "compares all weights after every sync: leave verify"),
        ({"verify_share": 0}, "verify_share must be a number from 0.001 to 1, not 0"),
        ({"verify": "crc"}, "verify must be one of auto, none, xxh3, sha256"),
        ({"cycles": 0}, "cycles must be a whole number from 1"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_one_sentence(config: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        kit.lab("sync", **config)
    assert "\n" not in str(caught.value)


def test_a_world_of_ones_own_cannot_be_two(tmp_path, monkeypatch, nothing_left: None) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    with kit.World(1) as world, pytest.raises(BadInput):
        kit.lab("sync", world=world, worlds="two")


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "free_memory", lambda: 16 * GIB)
    monkeypatch.setattr(definition, "free_gpu_bytes", list)
    sync_fits(SyncConfig(size="125m", layers=2))
    with pytest.raises(BadInput, match="for copies on the way to the replicas"):
        sync_fits(SyncConfig(size="qwen2.5-0.5b"))


def test_engines_count_in_what_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's process gets the weights through memory that both ends map."""
    monkeypatch.setattr("kit.labs.sync.lab.check_engine_there", lambda config: None)
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr("kit.labs.sync.lab.check_fits", lambda _, host, kept, **__: asked.append((host, kept)))
    config = SyncConfig(serve="vllm", size="small")
    sync_fits(config)
    sync_fits(SyncConfig(size="small"))
    (vllm, words), (megatron, fewer_words) = asked
    weights = model_bytes(replica_model(config), ranks=1)["params"]
    assert (vllm - megatron) * config.ranks / config.replicas == pytest.approx(VLLM_BYTES + weights, abs=config.ranks)
    assert words == f"{fewer_words} and for engines"


def test_a_package_that_the_ranks_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.labs.served.python_has", lambda path, module: module != "transformers")
    sync_fits(SyncConfig())
    with pytest.raises(BadInput, match="serve=transformers needs the package transformers in the ranks' Python"):
        sync_fits(SyncConfig(serve="transformers"))


def test_an_engine_needs_its_own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KIT_VLLM_PYTHON", raising=False)
    engine = {"serve": "vllm", "placement": "apart", "ranks": 4, "replicas": 2, "size": "small"}
    with pytest.raises(BadInput, match="serve=vllm needs a Python that has vLLM, and none was named: make env-vllm"):
        sync_fits(SyncConfig(**engine))
    with pytest.raises(BadInput, match=f"{sys.executable} does not have it"):
        sync_fits(SyncConfig(**engine, replica_python=sys.executable))


def test_replicas_are_counted_not_devices() -> None:
    """Two trainer devices put one replica of two devices to sleep."""
    config = SyncConfig(ranks=6, replicas=2, infer_tp=2)
    assert [config.sleeps(replica) for replica in range(2)] == [True, False]
    assert not SyncConfig(ranks=4, tp=1, replicas=3, placement="apart").shares


def test_only_who_shares_a_device_wakes() -> None:
    phases = [step.phase for step in plan(SyncConfig(cycles=1))]
    assert phases == [
        "prepare", "base", "train", "refresh", "offload", "expand", "verify", "shrink", "sweep", "rehearse", "end",
    ]  # fmt: skip
    apart = SyncConfig(cycles=2, ranks=4, replicas=2, placement="apart", sweep=False)
    assert {step.phase: step.roles for step in plan(SyncConfig(cycles=1)) if step.roles} == {
        "train": ("trainer",),
        "refresh": ("trainer", "replica"),
        "offload": ("trainer",),
        "expand": ("trainer", "sleeper"),
    }
    assert {role.name: role.ranks for role in roles(SyncConfig())} == {
        "trainer": (0, 1),
        "replica": (4,),
        "sleeper": (2, 3),
    }
    assert [step.phase for step in plan(apart)] == [
        "prepare", "base", "train", "refresh", "verify", "train", "refresh", "verify", "rehearse", "end",
    ]  # fmt: skip
    assert world_sizes(roles(apart)) == (4,)
    assert world_sizes(roles(SyncConfig(worlds="two"))) == (2, 3)


@pytest.mark.parametrize(
    ("gpu", "devices", "nodes", "chosen"),
    [
        ("GPU-1", ("cuda:0", "cuda:0"), (), "ipc"),
        ("GPU-1", ("cuda:0", "cuda:0"), (0, 1), "broadcast"),
        ("GPU-1", ("cuda:0", "cuda:1"), (), "shm"),
        ("", ("cuda:0", "cuda:0"), (), "shm"),  # sharing the allocator's memory needs a permission
        ("", ("cpu", "cpu"), (), "shm"),
        ("", ("cpu", "cpu"), (0, 1), "broadcast"),
    ],
)
def test_the_trainer_knows_where_replicas_are(
    gpu: str, devices: tuple[str, str], nodes: tuple[int, ...], chosen: str
) -> None:
    ctx = Context(
        rank=0,
        world_size=2,
        world_sizes=(2,),
        world=0,
        role="",
        roles={},
        meeting="here",
        device=torch.device(devices[0]),
        config=None,
        devices=devices,
        nodes=nodes,
    )
    trainer: Any = SimpleNamespace(ctx=ctx, where=RankPlace(ctx.machine_of(0), "here 0", gpu))
    assert best_transport(trainer.where, SyncTrainer.place_of(trainer, 1)) == chosen
