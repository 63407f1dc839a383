"""The stand-in makes "cuda" mean the CPU, is installed once and can be removed; with a GPU it is not installed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kit.megatron import standin

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for boxes without a GPU")


@pytest.fixture
def installed():
    standin.install()
    yield
    standin.uninstall()


@without_gpu
def test_cuda_means_the_cpu(installed):
    assert standin.stands_in()
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.zeros(2).to("cuda:0").device.type == "cpu"
    assert torch.zeros(2).cuda().device.type == "cpu"
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())


@without_gpu
def test_the_mode_can_be_left_out_for_a_while(installed):
    with standin.off():
        assert torch.zeros(2).type() == "torch.FloatTensor"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"


@without_gpu
def test_the_mode_holds_on_threads_that_start_later(installed):
    class Own(threading.Thread):
        def run(self):
            made.append(torch.zeros(2, device="cuda"))

    made = []
    thread = Own()
    thread.start()
    thread.join()
    with ThreadPoolExecutor() as pool:
        made.append(pool.submit(torch.zeros, 2, device="cuda").result())
    assert [tensor.device.type for tensor in made] == ["cpu", "cpu"]
    standin.uninstall()
    with ThreadPoolExecutor() as pool:
        assert pool.submit(torch.zeros, 2).result().type() == "torch.FloatTensor"


@without_gpu
def test_random_states_are_the_cpus(installed):
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))


@without_gpu
def test_installing_twice_is_installing_once_and_it_can_be_undone():
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "FloatTensor", "get_rng_state")}
    standin.install()
    standin.install()
    assert standin.stands_in()
    standin.uninstall()
    assert not standin.stands_in()
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_what_megatron_forgot_to_define_is_there_on_a_gpu_too(monkeypatch):
    """With a stand-in for the GPU. Megatron 0.16 without Transformer Engine does not define the name; newer versions define it as None."""
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    standin.install()
    assert not standin.stands_in()
    assert moe_utils.te_general_gemm is None
    assert torch.cuda.current_device is before
    assert torch.zeros(2).type() == "torch.FloatTensor"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_inert_where_there_is_a_gpu():
    before = torch.cuda.current_device
    standin.install()
    assert not standin.stands_in()
    assert torch.cuda.current_device is before


def test_a_gpu_in_sight_keeps_it_out(monkeypatch):
    before = torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    standin.install()
    assert not standin.stands_in()
    assert torch.cuda.current_device is before
