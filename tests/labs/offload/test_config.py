"""Impossible settings are refused in one sentence, before any rank starts."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

import kit
from kit.errors import BadInput
from kit.labs import definition
from kit.labs.offload.faults import EXACT
from kit.labs.offload.lab import OffloadConfig
from kit.labs.offload.lab import fits as offload_fits
from kit.megatron import groups

GIB = 2**30


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"mode": "abort", "groups": False, "weights": False, "grads": False, "optimizer": False}, "nothing would be"),
        (
            {"mode": "manual", "include_world": True},
            "include_world=true needs mode=exact, abort or suspend, not 'manual'",
        ),
        ({"groups": False, "weights": False, "grads": False, "optimizer": False}, "nothing would be released"),
        ({"tp": 3}, "tp=3 does not divide 4 heads"),
        ({"tp": 2, "ranks": 3}, "tp\\*pp=2 does not divide ranks=3"),
        ({"pp": 3, "ranks": 3, "tp": 1}, "pp=3 does not divide 4 layers"),
        ({"experts": 2, "tp": 2}, "Megatron asks for tp=1"),
        ({"tp": 1, "cp": 3, "ranks": 2}, "tp\\*pp\\*cp=3 does not divide ranks=2"),
        ({"vpp": 2}, "vpp=2 needs a pipeline: set pp=2 or more"),
        ({"tp": 1, "pp": 2, "vpp": 3}, "pp\\*vpp=6 does not divide 4 layers"),
        ({"tp": 1, "pp": 2, "vpp": 2, "microbatches": 3}, "microbatches=3 must be a multiple of pp=2"),
        ({"mode": "official", "implementation": "mine:Whole"}, "mode=official configures the kit's own releaser"),
        ({"include_world": True, "groups": False}, "include_world=true needs groups=true"),
        ({"mode": "gentle"}, "mode must be one of exact, abort, manual, official, suspend, not 'gentle'"),
        ({"cycles": 0}, "cycles must be a whole number from 1 to 1000, not 0"),
        ({"implementation": "mine"}, "implementation must be 'module:attr', not 'mine'"),
        ({"implementation": "mine:Missing"}, "implementation=mine:Missing cannot be loaded by the ranks' Python"),
    ],
)
def test_one_sentence(config: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        kit.lab("offload", **config)
    assert "\n" not in str(caught.value)


def test_a_job_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "free_memory", lambda: 10 * GIB)
    monkeypatch.setattr(definition, "free_gpu_bytes", list)
    offload_fits(OffloadConfig(size="125m"))
    with pytest.raises(
        BadInput, match=r"size=qwen2.5-0.5b does not fit: 2 ranks x \(.* GiB, but 10.0 GiB are free"
    ) as caught:
        kit.lab("offload", size="qwen2.5-0.5b")
    numbers = [
        float(word.strip("(")) for word in str(caught.value).split() if word.strip("(").replace(".", "").isdigit()
    ]
    ranks, job, arena, process, all_of_it, _ = numbers
    assert ranks * (job + arena + process) == pytest.approx(all_of_it, rel=0.01)


def test_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "free_memory", lambda: 1000 * GIB)
    monkeypatch.setattr(definition, "free_gpu_bytes", lambda: [80 * GIB, 2 * GIB])
    offload_fits(OffloadConfig(size="125m"))
    with pytest.raises(
        BadInput, match=r"of weights, gradients and optimizer for each rank, but 2\.0 GiB are free on a GPU"
    ):
        kit.lab("offload", size="qwen2.5-0.5b")
    offload_fits(OffloadConfig(size="qwen2.5-0.5b", device="cpu"))


def test_a_gpu_that_is_too_small_for_those_who_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "free_memory", lambda: 1000 * GIB)
    monkeypatch.setattr(definition, "free_gpu_bytes", lambda: [12 * GIB])
    offload_fits(OffloadConfig(size="qwen2.5-0.5b", tp=1, ranks=1))
    with pytest.raises(BadInput, match=r"on each of 2 ranks that share a GPU, but 12\.0 GiB are free on a GPU"):
        offload_fits(OffloadConfig(size="qwen2.5-0.5b", tp=1, ranks=2))


def test_the_modes_are_those_of_the_room_that_releases() -> None:
    hints = get_type_hints(OffloadConfig)
    assert get_args(hints["mode"]) == groups.MODES
    assert EXACT == groups.EXACT


def test_suspending_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"mode=suspend needs CUDA: .* and device=cpu has none"):
        kit.lab("offload", mode="suspend", device="cpu")
    monkeypatch.setattr("kit.labs.offload.lab.free_gpu_bytes", list)
    with pytest.raises(BadInput, match=r"mode=suspend needs CUDA: .* and this machine has no GPU driver"):
        kit.lab("offload", mode="suspend")
    monkeypatch.setattr("kit.labs.offload.lab.free_gpu_bytes", lambda: [80 * GIB])
    offload_fits(OffloadConfig(mode="suspend"))
