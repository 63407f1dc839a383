"""The environment of ranks that may use a GPU, set in one place before anything calls the driver.

`assumed`: the values are taken from the sources that `kit.world.device` names; no GPU has confirmed them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit import machine
from kit.results.run import CPU_WANTED
from kit.world import World, device, rankside
from kit.world.device import SETTINGS, Seat, choose_device, prepare_device

WHOLE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "{folder}/nccl_trace_rank_",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_ALGO": "^NVLS",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
OLD = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
FOLDER = Path("/run/a-world")


def made(folder: Path = FOLDER) -> dict[str, str]:
    return {name: value.format(folder=folder) for name, value in WHOLE.items()}


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_all_of_it_where_a_gpu_may_be_used(with_cuda: None, wanted: str) -> None:
    environ = {"PATH": "/bin"}
    prepare_device(environ, wanted, FOLDER)
    assert environ == {"PATH": "/bin", **made()}
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == "/run/a-world/nccl_trace_rank_"
    assert all(one.why for one in SETTINGS)


def test_the_reason_of_a_cpu_that_was_asked_for() -> None:
    assert choose_device("cpu", 0, 1).why == CPU_WANTED


# A torch that looks as if it was built with CUDA and had a GPU; calls that start the driver are noted.
FORKING = """
import importlib, os, torch
started, process = [], os.getpid()

def starts_the_driver(name, answer):
    def call(*_):
        if os.getpid() == process:
            started.append(name)
        return answer
    return call

torch.version.cuda = "13.0"
torch._C._cuda_isInBadFork = lambda: False
for name in ("init", "getDeviceCount", "getDevice", "setDevice", "getDeviceProperties", "getCurrentRawStream"):
    setattr(torch._C, f"_cuda_{name}", starts_the_driver(name, 1))
from kit.labs.discover import discover, validate
from kit.world import agentside, device, rankside
device.spare("auto")
modules = set()
for lab in discover().labs.values():
    roles = lab.roles_of(validate(lab, {}))
    modules |= {*lab.preload, *(place.partition(":")[0] for place in (lab.phases, *(role.phases for role in roles)) if place)}
for module in sorted(modules):
    importlib.import_module(module)
print(len(modules), torch.cuda.is_available(), started)
"""


@pytest.mark.slow
def test_what_is_loaded_before_the_ranks_are_forked_starts_no_driver() -> None:
    """A driver that was started before the fork is dead in every rank."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], capture_output=True, text=True, check=True)
    modules, available, started = done.stdout.splitlines()[-1].split(maxsplit=2)
    assert (int(modules) > 5, available, started) == (True, "True", "[]")


def test_the_docs_list_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rented-box.md").read_text()
    assert [
        line.split("|")[1:3] for line in page.splitlines() if line.startswith(("| `TORCH_", "| `NCCL_", "| `CU"))
    ] == [[f" `{name}` ", f" `{value}` "] for name, value in WHOLE.items()]


def test_nothing_for_ranks_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(torch.version, "cuda", None)
    prepare_device(environ, "auto", FOLDER)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    prepare_device(environ, "cpu", FOLDER)
    assert environ == {}


@pytest.mark.parametrize("name", [*WHOLE, *OLD])
def test_what_a_person_has_set_stays_under_its_old_name_too(with_cuda: None, name: str) -> None:
    environ = {name: "a person's"}
    prepare_device(environ, "cuda", FOLDER)
    replaced = OLD.get(name, name)
    assert environ == {**{key: value for key, value in made().items() if key != replaced}, name: "a person's"}


def test_a_rank_has_it_before_it_looks_for_its_gpu(
    with_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [*WHOLE, "KIT_RANK", "KIT_FOLDER", "NCCL_HOSTID"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    seen: dict[str, str] = {}

    def choose(*_: Any) -> Seat:
        seen.update(os.environ)
        return Seat(torch.device("cuda", 0), "stand-in", {"NCCL_HOSTID": "host"})

    monkeypatch.setattr(rankside, "choose_device", choose)
    order = {"device": "cuda", "first": 0, "before": 0, "neighbours": 1, "devices": []}
    node: Any = SimpleNamespace(order=order, node=0, folder=tmp_path)
    rankside.Rank(node)
    assert {name: seen.get(name) for name in WHOLE} == made(tmp_path)
    assert "NCCL_HOSTID" not in seen
    assert os.environ["NCCL_HOSTID"] == "host"
    for name in [*WHOLE, "KIT_RANK", "KIT_FOLDER", "NCCL_HOSTID"]:
        del os.environ[name]  # otherwise monkeypatch would restore the values that the rank set


# -- CUDA's driver is not initialised in the process that forks the ranks, even if something there counts GPUs --------


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-in for torch's own count, since this torch need not support CUDA: reports two GPUs and records the caller's pid."""
    note = tmp_path / "asked"

    def count() -> int:
        note.write_text(str(os.getpid()))
        return 2

    monkeypatch.setattr(device, "_plain", count)
    monkeypatch.setattr(device._C, device.COUNT, count, raising=False)
    device.counted_by_a_child.cache_clear()
    yield note
    device.counted_by_a_child.cache_clear()


def test_gpus_are_counted_by_a_child(asked: Path) -> None:
    device.spare("auto")
    assert getattr(torch._C, device.COUNT)() == 2
    assert int(asked.read_text()) != os.getpid()
    device.restore()
    assert getattr(torch._C, device.COUNT)() == 2
    assert int(asked.read_text()) == os.getpid()


def test_for_ranks_on_the_host_nobody_is_asked(asked: Path) -> None:
    device.spare("cpu")
    assert getattr(torch._C, device.COUNT)() == 0
    assert not asked.exists()


@pytest.mark.parametrize(
    ("kernel", "nvml", "told"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023",
            None,
            "535.129.03",
        ),
        ("", "550.54.15", "550.54.15"),
        ("", None, "of unknown version"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_reported_with_its_driver(
    kernel: str, nvml: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(text: Any, _: int) -> int:
        text.value = str(nvml).encode()
        return machine.NVML_FINE

    file = tmp_path / "version"
    file.write_text(kernel)
    monkeypatch.setattr(machine, "GPU_DRIVERS", (file,))
    monkeypatch.setattr(machine, "nvml", lambda: nvml and SimpleNamespace(nvmlSystemGetDriverVersion=version))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seat = choose_device("auto", 0, 2)
    assert str(seat.device) == "cpu"
    assert f"for CUDA 13.0 finds no usable GPU with the driver {told}; install a driver for CUDA 13.0" in seat.why


def test_a_driver_that_was_started_too_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    seat = choose_device("auto", 0, 2)
    assert str(seat.device) == "cpu"
    assert "started CUDA before they were forked" in seat.why
    with pytest.raises(RuntimeError, match="device='cuda' cannot be had: a module that was loaded for the ranks"):
        choose_device("cuda", 0, 2)


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_ranks_have_a_driver_of_their_own(wanted: str, nothing_left: None) -> None:
    """Needs a torch built with CUDA, but no GPU."""
    with World(1, device=wanted, python=sys.executable, preload=("megatron.core",)) as world:
        assert world.eval("torch.cuda._is_in_bad_fork()") == [False]
        if world.device == "cpu":
            assert world.eval("torch.cuda.is_available()") == [False]
