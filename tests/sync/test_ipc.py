"""Buckets by CUDA handles, with stand-ins for the GPU: where they land, and why a handle may not be opened.

`assumed`: torch's error texts are those of CUDACachingAllocator.cpp (ExpandableSegment::fromShared) of 2.9 to 2.13; no GPU has raised
them.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.errors import KitError
from kit.sync import sender, transports
from kit.sync.buckets import Bound
from kit.sync.cache import Ring
from kit.sync.link import Listener
from kit.sync.receiver import Call, landing
from kit.sync.sender import Report, SyncLog
from kit.sync.transports import Ipc, Transport, TransportContext, make, opened_block
from tests.sync.ranks.service import LAYOUT, Host, at_once, receiver_of, sender_of, table, target, tensors
from tests.sync.ranks.transports import SIZES, bucket, receive, send
from tests.sync.test_transports import between

GPU = torch.device("cuda", 0)


class Shared:
    """Host memory in place of GPU memory, and numbers in place of its handles.

    `assumed`: the rules of torch's CudaIPCTypes.cpp. A block that was sent counts the ends that have it open. When its owner drops it, it
    is freed if the count is 0; else it waits in a limbo, which only `ipc_collect` of its process empties of blocks with a count of 0. Here
    each end has a thread instead of a process.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, torch.Tensor] = {}
        self.sent: list[int] = []  # the block of each handle
        self.open: Counter[int] = Counter()
        self.limbo: set[int] = set()
        self.owners: dict[int, int] = {}  # the thread that made a block

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == GPU
        block, name = torch.zeros(size, dtype=dtype), len(self.blocks) + len(self.sent)
        self.blocks[name] = block.detach()
        self.owners[name] = threading.get_ident()
        weakref.finalize(block, self.drop, name)
        return block

    def drop(self, name: int) -> None:
        if self.open[name]:
            self.limbo.add(name)
        else:
            del self.blocks[name]

    def handle(self, slot: torch.Tensor) -> list[Any]:
        (name,) = (name for name, block in self.blocks.items() if block.data_ptr() == slot.data_ptr())
        self.sent.append(name)
        self.open[name] += 1
        return [len(self.sent) - 1]

    def opened(self, handle: list[Any]) -> torch.Tensor:
        name = self.sent[handle[0]]
        there = self.blocks[name].detach()
        weakref.finalize(there, self.open.subtract, [name])
        return there

    def collect(self) -> None:
        mine = [name for name in self.limbo if self.owners[name] == threading.get_ident()]
        for name in [name for name in mine if not self.open[name]]:
            self.limbo.discard(name)
            del self.blocks[name]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Shared:
    shared = Shared()
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(is_available=lambda: True, current_stream=lambda _: stream, ipc_collect=shared.collect)
    monkeypatch.setattr(
        transports, "torch", SimpleNamespace(cuda=cuda, empty=shared.empty, uint8=torch.uint8, Tensor=torch.Tensor)
    )
    monkeypatch.setattr(transports, "handle_of", shared.handle)
    monkeypatch.setattr(transports, "opened_block", shared.opened)
    return shared


@pytest.mark.parametrize("receivers", [1, 3])
def test_every_byte_arrives_from_slots_that_are_written_again(gpu: Shared, receivers: int) -> None:
    _, *differ = between(Ipc, send, *[receive] * receivers, device=GPU)
    assert differ == [[]] * receivers


@pytest.mark.parametrize("on_device", [True, False])
def test_what_is_applied_at_once_lands_where_the_transport_puts_it(on_device: bool) -> None:
    """The device "meta" stands for the GPU: only the place of the buffer matters."""
    landed: list[torch.device] = []
    call = Call.__new__(Call)
    receiver: Any = SimpleNamespace(device=torch.device("meta"))
    applier: Any = SimpleNamespace(apply=lambda _, buffer: landed.append(buffer.device))
    call.receiver, call.layout, call.applier, call.digests, call.log = receiver, LAYOUT, applier, None, SyncLog()
    transport: Any = SimpleNamespace(receive=lambda _, into: into, done=lambda _: None, on_device=on_device)
    call.stream(transport)
    assert {str(device) for device in landed} == {"meta" if on_device else "cpu"}
    assert Ipc.on_device


@pytest.mark.parametrize(("free", "where"), [(99, "cpu"), (100, "cuda")])
def test_what_is_stored_stays_on_a_gpu_with_twice_the_room(monkeypatch: Any, free: int, where: str) -> None:
    """The driver's answer is made up, since the decision needs no GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1000))
    transport: Any = SimpleNamespace(on_device=True)
    assert landing(transport, torch.device("cuda"), 50).type == where
    assert landing(transport, torch.device("cuda")).type == "cuda"  # applied at once: needs one bucket only
    transport.on_device = False
    assert landing(transport, torch.device("cuda"), 1).type == "cpu"
    del transport.on_device  # as an own one that does not say
    assert landing(transport, torch.device("cuda")).type == "cpu"


def test_live_weights_are_packed_on_the_gpu_and_not_sent_from_the_host(gpu: Shared) -> None:
    def other_bytes(transport: Transport) -> None:
        for index, size in enumerate(SIZES):
            transport.send(index, torch.full((size,), 9, dtype=torch.uint8))
        transport.flush()

    def pack(index: int, out: torch.Tensor) -> None:
        out.copy_(bucket(index))

    _, differ = between(Ipc, other_bytes, receive, device=GPU, pack=pack)
    assert differ == []


@pytest.fixture
def on_gpu(gpu: Shared, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Both ends of a service whose transports take host memory for GPU memory."""

    def made(kind: str, ctx: TransportContext, **how: Any) -> Transport:
        return make(kind, replace(ctx, device=GPU), **how)

    monkeypatch.setattr(sender, "on_gpu", lambda *_: True)
    return made


@pytest.mark.parametrize("ring", [True, False])
def test_a_version_goes_from_gpu_to_gpu(
    on_gpu: Callable[..., Any], gpu: Shared, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring keeps nothing, so it is not even packed; a cache is packed for replicas that wake later. No block on the GPU stays."""
    packed: list[str] = []
    pack = Bound.pack

    def seen(self: Bound, index: int, out: torch.Tensor, **how: Any) -> None:
        packed.append("the cache" if how else "the card")
        pack(self, index, out, **how)

    monkeypatch.setattr(Bound, "pack", seen)
    with Listener() as listener:
        sender = sender_of(listener, cache=Ring(LAYOUT, timeout_s=5.0) if ring else None, transport="ipc")
        host = Host()
        receiver = receiver_of("r1", host, listener.address)
        sender.make = receiver.make = on_gpu
        targets = [target("r1", state="paused")]
        for version in (1, 2):
            weights = tensors(version)
            act = partial(sender.sync, version, targets, lambda weights=weights: weights)
            report, received = at_once(act, receiver.join)
            assert isinstance(report, Report), report
            assert not isinstance(received, Exception), received
            assert table(host.tensors) == table(weights)
            assert gpu.blocks == {}
        sender.cache.close()
    every = 2 * len(LAYOUT.buckets)
    assert packed.count("the card") == every
    assert packed.count("the cache") == (0 if ring else every)


@pytest.mark.parametrize(
    ("devices", "here", "same"),
    [
        (["cuda:0", "cuda:0"], "cuda:0", True),
        (["cuda:0", "cuda:1"], "cuda:0", False),
        (["cuda", "cuda"], "cpu", False),
        ([], "cuda:0", True),
    ],
)
def test_weights_are_on_the_senders_gpu(devices: list[str], here: str, same: bool) -> None:
    some: Any = [SimpleNamespace(device=torch.device(device)) for device in devices]
    assert sender.on_gpu(some, torch.device(here)) is same


@pytest.mark.parametrize(
    ("value", "needed"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments: true", True),
        ("expandable_segments:False", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_goes_by_descriptors_is_known_by_the_allocators_setting(
    name: str, value: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`assumed`: torch reads both names (c10/core/AllocatorConfig.cpp, 2.9 to 2.13); older builds read the second one too."""
    monkeypatch.setenv(name, value)
    assert transports.needs_permission() is needed


PERMITTED = "pidfd_getfd: Operation not permitted\nException raised from fromShared"
KERNEL = (
    "The kernel on this machine does not support the pidfd_open syscall needed to use IPC for CUDA tensors when ..."
)


@pytest.mark.parametrize(
    ("words", "names_the_setting"), [(PERMITTED, True), (KERNEL, True), ("CUDA error: invalid device context", False)]
)
def test_why_a_handle_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, words: str, names_the_setting: bool) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuses, raising=False)
    with pytest.raises(KitError) as refused:
        opened_block([0, {"bytes": "AA=="}])
    message = str(refused.value)
    assert message.startswith(f"the sender's GPU memory cannot be opened here ({words.partition(chr(10))[0]})")
    assert ("use expandable_segments:False, or transport=shm" in message) == names_the_setting
