"""Checks that need a GPU, run through the ranks' Python. One GPU is enough: ranks share it. None of this has run on one yet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.machine import has_gpu_driver
from kit.results import Verdict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_gpu_driver(), reason="this machine has no GPU driver"),
]
LARGE: dict[str, Any] = {"size": "125m", "seq": 64, "device": "cuda"}


def failed(verdict: Verdict) -> set[str]:
    return {row.check for row in verdict if row.passed is False}


def row(verdict: Verdict, check: str) -> tuple[bool | None, float | None, str]:
    found = next(one for one in verdict if one.check == check)
    return found.passed, found.measured, found.why


def test_ranks_reduce_on_the_gpu_and_on_the_host(nothing_left: None) -> None:
    with kit.World(2, device="cuda") as world:
        for place in ("device", "'cpu'"):
            world.run(f"x = torch.ones(1, device={place}) * (rank + 1); dist.all_reduce(x)")
            assert world.eval("x.item()") == [3.0, 3.0]
        if world.eval("torch.cuda.device_count()")[0] == 1:
            assert {one["device"] for one in world.status()} == {"cuda:0"}
            assert "shared" in world.status()[0]["why"]


def test_a_matrix_product_before_deterministic_mode_does_not_forbid_it(nothing_left: None) -> None:
    with kit.World(1, device="cuda") as world:
        world.run("a = torch.ones(64, 64, device=device); a @ a")
        world.run("torch.use_deterministic_algorithms(True); a @ a")


def test_ranks_on_the_host_see_no_gpu(nothing_left: None) -> None:
    with kit.World(2, device="cpu") as world:
        assert world.eval("torch.cuda.is_available()") == [False, False]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 1, "pp": 2}, {"tp": 1, "distributed_optimizer": True}])
def test_an_exact_release_passes_every_check(tmp_path: Path, layout: dict[str, Any]) -> None:
    verdict = kit.run("offload", out=tmp_path / "run", cycles=5, **LARGE, **layout).verdict()
    assert failed(verdict) == set()
    for check in ("training_continues_bitwise", "tensors_restored", "every_group_communicates"):
        assert row(verdict, check)[:2] == (True, 0.0)
    for check, limit in (("memory_drift", 200), ("residual", 500)):
        passed, measured, why = row(verdict, check)
        assert passed, why
        assert measured is not None
        assert measured <= limit


@pytest.mark.parametrize("mode", ["official", "manual"])
def test_the_ways_in_common_use_leak(tmp_path: Path, mode: str) -> None:
    verdict = kit.run("offload", out=tmp_path / "run", mode=mode, cycles=3, **LARGE).verdict()
    assert {"groups_return_to_baseline", "handles_alive"} <= failed(verdict)


def test_suspend_works_or_is_refused_by_version(tmp_path: Path) -> None:
    with kit.World(1, device="cuda") as world:
        world.run("from kit import nccl")
        (why,) = world.eval("nccl.no_suspend(nccl.running(), torch.__version__)")
    settings: dict[str, Any] = {"mode": "suspend", "cycles": 2, **LARGE}
    if why:
        with pytest.raises(BadInput, match="mode=suspend is not available"):
            kit.run("offload", out=tmp_path / "run", **settings)
        return
    verdict = kit.run("offload", out=tmp_path / "run", **settings).verdict()
    assert row(verdict, "training_continues_bitwise")[:2] == (True, 0.0)
    assert row(verdict, "every_group_communicates")[:2] == (True, 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [{}, {"pp": 2}])
def test_pieces_are_the_plain_step(tmp_path: Path, dtype: str, layout: dict[str, Any]) -> None:
    verdict = kit.run("split", out=tmp_path / "run", device="cuda", dtype=dtype, **layout).verdict()
    assert failed(verdict) == set()


@pytest.mark.parametrize("transport", ["auto", "ipc", "broadcast", "shm"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, transport: str) -> None:
    run = kit.run("sync", out=tmp_path / "run", device="cuda", transport=transport, cycles=2, sweep=False)
    assert failed(run.verdict()) == set()
    assert row(run.verdict(), "bit_exact")[:2] == (True, 0.0)


def test_tensors_leave_the_gpu_and_come_back(tmp_path: Path) -> None:
    run = kit.run("offload", out=tmp_path / "run", cycles=2, groups=False, **LARGE)
    frame = run.frame()
    share = row(run.verdict(), "tensors_released")[1]
    assert share is not None
    assert share >= 0.9
    assert not math.isnan(frame[frame["metric"] == "driver_used"]["value"].max())
