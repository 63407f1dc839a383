"""The doubles answer as the engines do, call by call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from kit.errors import KitError
from kit.sync.protocols import CallRefused, EngineDouble, SglangSession, VllmCalls


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))


class Around:
    """The context of a double over one parameter, and what it was used for."""

    def __init__(self) -> None:
        self.chunks = [Model()]
        self.held: list[str] = []

    def loader(self) -> Callable[[str, torch.Tensor], None]:
        def write(name: str, tensor: torch.Tensor) -> None:
            with torch.no_grad():
                self.chunks[0].get_parameter(name).copy_(tensor)

        return write

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.chunks[0].weight.detach()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        self.held.append("in")
        yield
        self.held.append("out")


NEW = [("weight", torch.tensor([2.0, 3.0, 4.0]))]
TOKENS = torch.ones(3)


def vllm() -> VllmCalls:
    engine = VllmCalls(Around())
    engine.init_weight_transfer_engine()
    return engine


def sglang() -> SglangSession:
    return SglangSession(Around())


def test_vllm_must_be_made_ready_first() -> None:
    with pytest.raises(CallRefused, match="call init_weight_transfer_engine first"):
        VllmCalls(Around()).start_weight_update()


def test_an_update_of_vllm_is_published_by_its_end_only() -> None:
    engine = vllm()
    engine.start_weight_update()
    engine.update_weights(NEW)
    engine.update_weights(NEW)
    assert engine.weight_version == 0
    engine.finish_weight_update(7)
    assert engine.weight_version == 7
    assert torch.equal(engine.forward(TOKENS), NEW[0][1])


def test_a_session_of_sglang_holds_the_lock_until_it_is_ended() -> None:
    engine = sglang()
    engine.begin_weight_update()
    engine.update_weights_from_tensor(NEW)
    assert (engine.ctx.held, engine.weight_version) == (["in"], 0)  # type: ignore[attr-defined]
    engine.end_weight_update()
    assert (engine.ctx.held, engine.weight_version) == (["in", "out"], 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [vllm, sglang])
def test_calls_out_of_order_are_refused(make: Callable[[], EngineDouble]) -> None:
    engine = make()
    with pytest.raises(CallRefused, match=f"call {engine.begin_name} first"):
        engine.update(NEW)
    with pytest.raises(CallRefused, match=f"{engine.end_name}: no update is open"):
        engine.end()
    engine.begin()
    with pytest.raises(CallRefused, match=f"{engine.begin_name}: an update is open"):
        engine.begin()
    engine.end()
    assert engine.weight_version == 1


@pytest.mark.parametrize("make", [vllm, sglang])
def test_a_failed_update_must_be_ended_and_is_not_published(make: Callable[[], EngineDouble]) -> None:
    engine = make()
    engine.begin()
    with pytest.raises(AttributeError):
        engine.update([*NEW, ("other", TOKENS)])
    with pytest.raises(CallRefused, match="has failed"):
        engine.update(NEW)
    with pytest.raises(CallRefused, match="an update is open"):
        engine.begin()
    engine.end(5)
    assert engine.weight_version == 0
    engine.begin()
    engine.update(NEW)
    engine.end(5)
    assert engine.weight_version == 5


@pytest.mark.parametrize("make", [vllm, sglang])
def test_a_cached_prefix_lasts_until_the_end_of_an_update(make: Callable[[], EngineDouble]) -> None:
    engine = make()
    assert torch.equal(engine.forward(TOKENS), TOKENS)
    engine.begin()
    engine.update(NEW)
    assert not torch.equal(engine.forward(TOKENS), NEW[0][1])
    engine.end()
    assert torch.equal(engine.forward(TOKENS), NEW[0][1])


@pytest.mark.parametrize("make", [vllm, sglang])
def test_the_kits_receiver_makes_the_same_calls(make: Callable[[], EngineDouble]) -> None:
    engine = make()
    engine.load(*NEW[0])
    engine.load(*NEW[0])
    assert engine.updating
    engine.finalize()
    assert (engine.updating, engine.weight_version) == (False, 1)
    engine.load(*NEW[0])
    engine.abandon()
    engine.finalize()  # the old weights are back
    assert (engine.updating, engine.weight_version) == (False, 1)


def test_a_lock_that_cannot_be_had_leaves_no_session_open() -> None:
    class Busy(Around):
        @contextlib.contextmanager
        def writing(self) -> Iterator[None]:
            raise KitError("a forward did not end")
            yield

    engine = SglangSession(Busy())
    with pytest.raises(KitError, match="did not end"):
        engine.begin_weight_update()
    with pytest.raises(CallRefused, match="no update is open"):
        engine.end_weight_update()
