"""Decisions based on NCCL's version, compared with the versions in PyTorch's own builds."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kit import nccl
from kit.megatron import groups
from kit.world import device
from kit.world.device import choose_device
from tests.standins.compiled import shared_library


@pytest.mark.parametrize(
    ("number", "version"),
    [(22907, (2, 29, 7)), (22809, (2, 28, 9)), (23004, (2, 30, 4)), (21000, (2, 10, 0)), (2804, (2, 8, 4))],
)
def test_nccls_own_numbers_are_read(number, version):
    assert nccl.decode_version(number) == version
    assert nccl.version_text(version) == ".".join(map(str, version))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings NCCL")
def test_a_torch_without_cuda_has_none():
    assert nccl.running() is None
    assert nccl.version_text(None) is None


NCCL = "int ncclGetVersion(int *version) { *version = VERSION; return ERROR; }"


@pytest.mark.parametrize(
    ("number", "version", "able"),
    [
        (22602, (2, 26, 2), set()),
        (22707, (2, 27, 7), set()),
        (22809, (2, 28, 9), set()),
        (22903, (2, 29, 3), set()),
        (22907, (2, 29, 7), {"suspend"}),
        (23004, (2, 30, 4), {"suspend", "share by a flag"}),
        (23007, (2, 30, 7), {"suspend", "share by a flag"}),
    ],
)
def test_a_library_that_is_loaded_is_asked_itself(tmp_path, monkeypatch, number, version, able):
    """What ranks may do follows from the answer of a stand-in library with NCCL's one call, since this machine may lack NCCL."""
    monkeypatch.setattr(nccl, "LIBRARY", shared_library(tmp_path, NCCL, VERSION=number, ERROR=0))
    running = nccl.running()
    assert running == version
    suspends = nccl.no_suspend(running, "2.13.0+cu130", gpus=1) == ""
    shares = "NCCL_MULTI_RANK_GPU_ENABLE" in nccl.sharing_env(running, 0).env
    assert {name for name, can in (("suspend", suspends), ("share by a flag", shares)) if can} == able


def test_a_library_that_answers_with_an_error_has_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(nccl, "LIBRARY", shared_library(tmp_path, NCCL, VERSION=22907, ERROR=3))
    assert nccl.running() is None
    assert "there is no NCCL" in nccl.no_suspend(None, "2.13.0+cu130", gpus=1)


def test_nccl_inside_of_torch_is_asked_of_torch(monkeypatch):
    """With a stand-in for torch, because its wheels load NCCL as a library."""
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-that-is-not-there.so")
    monkeypatch.setitem(
        sys.modules,
        "torch",
        SimpleNamespace(cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 28, 9, "a")))),
    )
    assert nccl.running() == (2, 28, 9)
    monkeypatch.delitem(sys.modules, "torch")
    assert nccl.running() is None


# torch and the NCCL of its wheels: 2.11 for CUDA 12 and 13; 2.12 and 2.13 for CUDA 13 and for CUDA 12.6.
WHEELS = [
    ("2.11.0", (2, 28, 9), "2.28.9 cannot suspend"),
    ("2.12.1+cu130", (2, 29, 7), ""),
    ("2.13.0+cu130", (2, 29, 7), ""),
    ("2.13.0+cu126", (2, 29, 3), "2.29.3 cannot suspend"),
    ("2.11.0", (2, 29, 7), "torch 2.11.0 does not show"),
    ("2.13.0+cpu", None, "there is no NCCL"),
    ("2.14.0a0+git1234", (2, 30, 4), ""),
]


@pytest.mark.parametrize(("torch_version", "version", "why"), WHEELS)
def test_who_can_suspend(torch_version, version, why):
    message = nccl.no_suspend(version, torch_version)
    assert why in message
    assert bool(why) == bool(message)


@pytest.mark.parametrize(("torch_version", "version", "why"), WHEELS)
def test_whatever_the_versions_suspending_needs_a_gpu(torch_version, version, why):
    assert nccl.no_suspend(version, torch_version, gpus=0) == "it needs a GPU (NCCL)"
    assert nccl.no_suspend(version, torch_version, gpus=1) == nccl.no_suspend(version, torch_version)


@pytest.mark.parametrize(
    ("version", "cuda", "capability", "why"),
    [
        ((2, 28, 9), "12.8", (9, 0), ""),
        ((2, 29, 7), "13.0", (9, 0), ""),
        ((2, 29, 7), "13.0", (10, 3), ""),
        (
            (2, 24, 3),
            "12.4",
            (10, 0),
            "NCCL 2.24.3 has no kernels for sm_100, only what the driver can compile; 2.25.1 and newer have",
        ),
        (
            (2, 26, 2),
            "13.0",
            (11, 0),
            "NCCL 2.26.2 has no kernels for sm_110, only what the driver can compile; 2.27.5 and newer have",
        ),
        ((2, 29, 7), "13.0", (7, 0), "NCCL 2.29.7 for CUDA 13.0 has no kernels for sm_70: use a build for CUDA 12"),
        ((2, 28, 9), "12.8", (7, 0), ""),
        ((2, 29, 7), "13.0", (13, 0), ""),  # from PTX for sm_120
        (None, "13.0", (9, 0), ""),
    ],
)
def test_nccl_has_kernels_for_the_gpu_or_the_version_that_has_is_named(version, cuda, capability, why):
    """`assumed`: from the history of NCCL's makefiles/common.mk to 2.30: sm_90 in 2.15.1, sm_100 and sm_120 in 2.25.1, sm_110 in 2.27.5."""
    assert nccl.no_code(version, cuda, capability) == why


def test_gpus_are_shared_by_the_flag_where_there_is_one():
    flagged, hosts = nccl.sharing_env((2, 30, 0), 1), nccl.sharing_env((2, 29, 7), 1)
    assert flagged.env["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in flagged.env
    assert hosts.env["NCCL_HOSTID"] != nccl.sharing_env((2, 29, 7), 2).env["NCCL_HOSTID"]
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in hosts.env
    assert hosts.env["NCCL_MNNVL_ENABLE"] == "0"
    assert int(flagged.env["NCCL_MAX_CTAS"]) == int(hosts.env["NCCL_MAX_CTAS"]) <= 8
    assert nccl.sharing_env(None, 0) is None


@pytest.fixture
def gpus(monkeypatch):
    """Make torch report a number of GPUs, and NCCL a version: stand-ins for a machine with GPUs."""

    def have(count, version):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(device.nccl, "running", lambda: version)

    return have


def test_every_rank_gets_a_gpu_of_its_own_where_there_are_enough(gpus):
    gpus(4, (2, 28, 9))
    seats = [choose_device("auto", number, 4) for number in range(4)]
    assert [str(seat.device) for seat in seats] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert not any(seat.env for seat in seats)


@pytest.mark.parametrize("version", [(2, 28, 9), (2, 30, 0)])
def test_fewer_gpus_than_ranks_are_shared_and_it_is_reported(gpus, version):
    gpus(2, version)
    seats = [choose_device(wanted, number, 4) for number, wanted in enumerate(("auto", "cuda", "auto", "cuda"))]
    assert [str(seat.device) for seat in seats] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    for number, seat in enumerate(seats):
        assert seat.why.startswith("2 CUDA devices for 4 ranks, shared by ")
        assert seat.why.endswith("; communication times: shared GPU, not a product number")
        assert seat.env == nccl.sharing_env(version, number).env


def test_if_any_gpu_of_a_placement_repeats_every_rank_gets_the_environment_for_sharing(gpus):
    """NCCL must see one kind of host: a rank alone on its GPU talks to ranks that share theirs."""
    gpus(2, (2, 28, 9))
    seats = [choose_device("cuda", number, 3, (0, 0, 1), number) for number in range(3)]
    assert [str(seat.device) for seat in seats] == ["cuda:0", "cuda:0", "cuda:1"]
    assert [seat.env for seat in seats] == [nccl.sharing_env((2, 28, 9), number).env for number in range(3)]
    assert not any(choose_device("cuda", number, 2, (0, 1), number).env for number in range(2))


@pytest.mark.parametrize(("visible", "words"), [(None, "there are 1"), ("1", "CUDA_VISIBLE_DEVICES=1 leaves 1")])
def test_a_gpu_that_is_not_there_is_named_with_what_hides_it(gpus, monkeypatch, visible, words):
    gpus(1, (2, 28, 9))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(RuntimeError, match=rf"devices=\[1\] names GPU 1, and {words}, numbered from 0"):
        choose_device("cuda", 0, 1, (1,), 0)


def test_where_gpus_cannot_be_shared_auto_takes_the_host_and_cuda_is_refused(gpus):
    gpus(1, None)
    seat = choose_device("auto", 1, 2)
    assert (str(seat.device), seat.why) == ("cpu", "1 CUDA device for 2 ranks; without NCCL each rank needs its own")
    with pytest.raises(RuntimeError, match="cannot be had: 1 CUDA device for 2 ranks; without NCCL"):
        choose_device("cuda", 1, 2)


def test_it_asks_no_gpu_and_loads_nothing_heavy():
    code = "import sys; from kit import nccl; print(nccl.sharing_env((2, 28, 9), 0) is None, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class Default:
    """Stand-in for a default group bound to its device, with only the attribute that `unbound` reads."""

    def __init__(self, device):
        self.bound_device_id = device


@pytest.mark.parametrize("device", ["cuda:0", None])
def test_a_default_group_is_bound_again_whatever_happens(device):
    default = Default(device)
    with nccl.unbound(default):
        assert default.bound_device_id is None
    assert default.bound_device_id == device
    with pytest.raises(OSError, match="no room"), nccl.unbound(default):
        raise OSError("no room")
    assert default.bound_device_id == device


def test_a_group_that_cannot_be_made_again_leaves_the_default_one_bound(monkeypatch):
    default = Default("cuda:0")
    seen = []

    def helper(*_, **__):
        seen.append(default.bound_device_id)
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(groups.c10d, "_new_process_group_helper", helper)
    plain = {"ranks": [0, 1], "tag": None, "backend": "gloo", "name": "7", "options": {}, "timeout_s": 60.0}
    with pytest.raises(RuntimeError, match="the store is gone"):
        groups._make({**plain, "bound_device": None, "description": "tp"}, None, default, 0)
    assert seen == [None]
    assert default.bound_device_id == "cuda:0"
