"""Host memory for offloaded tensors, and the copies to it. CUDA's runtime and streams are stand-ins here: no GPU is used.

Whether copies are asynchronous, and how fast they are, needs a GPU.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from kit.errors import KitError
from kit.megatron import tensors
from kit.megatron.tensors import Arena, Elsewhere, Mover, copy_on_streams, pieces

CUDA = torch.device("cuda", 0)


class Runtime:
    """Stand-in for CUDA's runtime: keeps the size of pinned memory by address."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = refuses

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's own name
        if self.refuses:
            return 801
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - as above
        del self.pinned[address]
        return 0


def mapped() -> bool:
    """Whether this process has an arena mapped."""
    return "memfd:kit-arena" in Path("/proc/self/maps").read_text()


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_arena_that_is_dropped_without_a_close_leaves_no_file():
    before = files()
    arenas = [Arena(torch.device("cpu")) for _ in range(3)]
    assert files() == before  # a job that stays on its device has no arena
    arenas[0].open()
    assert arenas[1].grow(512)
    assert files() == before + 2
    arenas[0].close()
    del arenas
    assert files() == before


def test_an_arena_for_a_gpu_is_pinned_as_large_as_it_is(monkeypatch):
    runtime, before = Runtime(), files()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    arena = Arena(CUDA)
    assert arena.grow(3 * 2**20)
    assert list(runtime.pinned.values()) == [3 * 2**20]
    arena.view(arena.reserve(5), 5).copy_(torch.arange(5, dtype=torch.uint8))
    second = arena.reserve(7)
    assert second == 512
    arena.view(second, 7).fill_(9)
    assert arena.view(0, 5).tolist() == [0, 1, 2, 3, 4]
    arena.clear()
    assert not arena.grow(2**20)
    assert arena.grow(5 * 2**20)
    assert list(runtime.pinned.values()) == [5 * 2**20]  # the smaller one was unpinned
    assert mapped()
    arena.close()
    assert (runtime.pinned, mapped(), files()) == ({}, False, before)


def test_where_the_driver_does_not_pin_it_torch_does(monkeypatch):
    plain, asked = torch.empty, []

    def empty(size, *, dtype, pin_memory):
        asked.append((size, pin_memory))
        return plain(size, dtype=dtype)  # pinning needs a GPU

    def reported(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: operation not supported")  # of the earlier refusal

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(refuses=True))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "ones", reported)
    arena = Arena(CUDA)
    assert arena.grow(2**20)
    assert (asked, arena.size, mapped()) == ([(2**20, True)], 2**20, False)
    arena.view(arena.reserve(3), 3).fill_(1)
    arena.close()


class Stream:
    """Stand-in for a stream: records the calls in order."""

    message: list[str]

    def __init__(self, device: torch.device) -> None:
        self.name = f"side {sum(line.startswith('made') for line in self.message)}"
        self.message.append(f"made {self.name}")

    def synchronize(self) -> None:
        self.message.append(f"{self.name} is done")


@pytest.fixture
def message(monkeypatch):
    Stream.message = []

    @contextlib.contextmanager
    def on(stream):
        Stream.message.append(f"copy on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: Stream.message.append(f"all of {device} is done"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return Stream.message


def test_copies_wait_for_what_was_begun_and_are_done_at_the_end(message):
    source = torch.arange(200, dtype=torch.uint8)
    targets = [torch.zeros(120, dtype=torch.uint8), torch.zeros(80, dtype=torch.uint8)]
    copy_on_streams(zip(targets, source.split([120, 80]), strict=True), CUDA)
    assert torch.equal(torch.cat(targets), source)
    assert [line for line in message if not line.startswith("made")] == [
        "all of cuda:0 is done",  # this also waits for work of other streams than the current one
        "copy on side 0",
        "copy on side 1",
        "side 0 is done",
        "side 1 is done",
    ]


def test_copies_under_way_are_waited_for_where_one_fails(message):
    source = torch.arange(4, dtype=torch.uint8)
    pairs = [(torch.zeros(4, dtype=torch.uint8), source), (torch.zeros(3, dtype=torch.uint8), source)]
    with pytest.raises(RuntimeError, match="must match the size"):
        copy_on_streams(pairs, CUDA)
    assert message[-2:] == ["side 0 is done", "side 1 is done"]


def test_a_release_that_fails_leaves_every_tensor_where_it_is(monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError("no memory")

    layer = torch.nn.Linear(8, 8)
    weights = layer.weight.detach().clone()
    mover = Mover([layer], torch.optim.SGD(layer.parameters()), torch.device("cpu"))
    with monkeypatch.context() as failing:
        failing.setattr(tensors, "transfer", full)
        with pytest.raises(OSError, match="no memory"):
            mover.release()
    assert mover.away == ()
    mover.release()
    mover.close()
    assert torch.equal(layer.weight, weights)


def test_large_copies_are_cut_and_small_ones_are_not():
    source = torch.arange(25, dtype=torch.uint8)
    target = torch.zeros(25, dtype=torch.uint8)
    cut = list(pieces([(target, source), (target[:3], source[:3])], size=10))
    assert [to.numel() for to, _ in cut] == [10, 10, 5, 3]
    for to, what in cut[:3]:
        to.copy_(what)
    assert torch.equal(target, source)


def test_a_restore_that_fails_names_the_tensor_leaves_all_away_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    net(torch.ones(2, 8)).sum().backward()
    mover = Mover([net], torch.optim.AdamW(net.parameters()), torch.device("cpu"))
    before = tensors.hashes([net], mover.optimizer)
    mover.release()
    resize, calls = torch.UntypedStorage.resize_, [0]

    def refuses_the_third(storage: torch.UntypedStorage, size: int) -> object:
        calls[0] += bool(size)
        if calls[0] == 3 and size:
            raise torch.OutOfMemoryError("no memory, on purpose")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", refuses_the_third, raising=False)
        with pytest.raises(KitError, match=r"(weights|grads) chunk0\S+ could not be brought back .*on purpose"):
            mover.restore()
    assert mover.items() == []
    assert mover.away == ("weights", "grads")
    mover.restore()
    assert tensors.hashes([net], mover.optimizer) == before
    mover.close()


def test_what_is_elsewhere_is_freed_without_a_copy_and_filled_again():
    """A storage counts only if the tensors that are elsewhere are all that lies in it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)).requires_grad_(
        requires_grad=False
    )
    first, second = (layer.weight.data for layer in model)
    before = [first.clone(), second.clone()]
    mover = Mover([model], None, torch.device("cpu"))
    halves = list(first.chunk(2))

    def fill() -> None:
        assert torch.equal(second, before[1])
        first.copy_(before[0] + 1)

    mover.release(elsewhere=Elsewhere([*halves, *halves, second[:4]], fill))
    assert mover.away == ("weights",)
    left = sum(tensor.untyped_storage().nbytes() for tensor in (first, second))
    assert left == 0
    assert mover.arena.used == 512  # for the second, half of which is nowhere else
    with pytest.raises(KitError, match="weights are already off the device"):
        mover.release()
    mover.restore()
    assert torch.equal(first, before[0] + 1)
    assert mover.away == ()
    mover.close()


def test_a_reload_whose_fill_fails_leaves_everything_away():
    model = torch.nn.Linear(8, 8, bias=False)
    before, fails = model.weight.detach().clone(), [True]

    def fill() -> None:
        if fails.pop():
            fails.append(False)
            raise KitError("no buckets")
        model.weight.data.copy_(before)

    mover = Mover([model], None, torch.device("cpu"))
    mover.release(elsewhere=Elsewhere([model.weight.data], fill))
    with pytest.raises(KitError, match="no buckets"):
        mover.restore()
    left = model.weight.untyped_storage().nbytes()
    assert (mover.away, left) == (("weights",), 0)
    mover.restore()
    assert torch.equal(model.weight, before)
    mover.close()


def test_tensors_in_lists_of_an_optimizers_state_are_found() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3)).exp().sum()
        loss.backward()
        return loss

    optimizer.step(loss)
    found = {name: tensor for kind, name, tensor in tensors.named_tensors([net], optimizer) if kind == "optimizer"}
    assert found["optimizer0.param0.old_dirs.0"] is optimizer.state[net.weight]["old_dirs"][0]
    assert found["optimizer0.param0.d"] is optimizer.state[net.weight]["d"]
