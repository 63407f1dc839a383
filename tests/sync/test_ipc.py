"""Buckets by CUDA handles, on stand-ins for the GPU: where they land, and why a handle may not be opened.

`assumed`: the words of torch are those of CUDACachingAllocator.cpp (ExpandableSegment::fromShared) of 2.9 to 2.13; no GPU has said them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.errors import KitError
from kit.sync.log import Log
from kit.sync.receiver import Call
from kit.sync.transports import ipc
from kit.sync.transports.ipc import Ipc, opened
from tests.sync.ranks.service import LAYOUT
from tests.sync.ranks.transports import receive, send
from tests.sync.test_transports import between

GPU = torch.device("cuda", 0)
SLOTS: list[torch.Tensor] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the host for that of the GPU, and numbers for its handles."""
    SLOTS.clear()

    def on_host(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == GPU
        return torch.zeros(size, dtype=dtype)

    def handle(slot: torch.Tensor) -> list[Any]:
        SLOTS.append(slot)
        return [len(SLOTS) - 1]

    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(is_available=lambda: True, current_stream=lambda _: stream, ipc_collect=lambda: None)
    monkeypatch.setattr(ipc, "torch", SimpleNamespace(cuda=cuda, empty=on_host, uint8=torch.uint8))
    monkeypatch.setattr(ipc, "handle_of", handle)
    monkeypatch.setattr(ipc, "opened", lambda found: SLOTS[found[0]])


@pytest.mark.parametrize("receivers", [1, 3])
def test_every_byte_arrives_from_slots_that_are_written_again(gpu: None, receivers: int) -> None:
    _, *differ = between(Ipc, send, *[receive] * receivers, device=GPU)
    assert differ == [[]] * receivers


@pytest.mark.parametrize("on_device", [True, False])
def test_what_is_applied_at_once_lands_where_the_transport_puts_it(on_device: bool) -> None:
    """A device without memory stands for the GPU: nothing but the room's place is looked at."""
    landed: list[torch.device] = []
    call = Call.__new__(Call)
    receiver: Any = SimpleNamespace(device=torch.device("meta"))
    applier: Any = SimpleNamespace(apply=lambda _, buffer: landed.append(buffer.device))
    call.receiver, call.layout, call.applier, call.digests, call.log = receiver, LAYOUT, applier, None, Log()
    call.received = SimpleNamespace(applied=0)  # type: ignore[assignment]
    transport: Any = SimpleNamespace(receive=lambda _, into: into, done=lambda _: None, on_device=on_device)
    call.stream(transport)
    assert {str(device) for device in landed} == {"meta" if on_device else "cpu"}
    assert Ipc.on_device


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
        opened([0, {"bytes": "AA=="}])
    said = str(refused.value)
    assert said.startswith(f"the sender's GPU memory cannot be opened here ({words.partition(chr(10))[0]})")
    assert ("use expandable_segments:False, or transport=shm" in said) == names_the_setting
