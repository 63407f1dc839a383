"""Doubles of inference engines: their calls for new weights as small state machines, over the kit's model on any device.

A call that the state does not allow raises, as the engine's does: an update without a beginning, a second beginning, more tensors after a
failure. An update that failed must still be ended, and is then not published. Only the end of an update sets the label and drops the
cached prefixes. `VllmCalls` leaves it to the caller to pause requests; a `SglangSession` lets no forward in until it is ended.

A trainer's code drives them call by call. With the kit's sender (`receiver=kit.sync.protocols:VllmCalls`) `load`, `finalize` and `abandon`
make the same calls. Limit: a prefix is one number that depends on the first parameter, which is enough to see a stale one in the logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from kit.errors import KitError

Named = Iterable[tuple[str, torch.Tensor]]


class DoubleContext(Protocol):
    """`ctx` of a receiving side, as far as a double needs it."""

    @property
    def chunks(self) -> Sequence[Any]: ...
    def loader(self) -> Callable[[str, torch.Tensor], None]: ...
    def forward(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def writing(self) -> contextlib.AbstractContextManager[None]: ...


class CallRefused(KitError):  # noqa: N818 - it is what happened
    """The engine's state does not allow this call."""


class EngineDouble:
    """One update at a time, the label of the weights, and cached prefixes; `begin` and `end` have the engine's own names in a subclass."""

    begin_name = end_name = ""

    def __init__(self, ctx: DoubleContext) -> None:
        self.ctx = ctx
        self.updating = self.failed = False
        self.weight_version = 0  # updates that were published, unless the caller gives numbers of its own
        self.prefixes: dict[bytes, float] = {}
        self.driven = False  # whether the kit's receiver has begun an update

    def begin(self) -> None:
        if self.updating:
            raise CallRefused(f"{self.begin_name}: an update is open; call {self.end_name} first, also after a failure")
        self.write = self.ctx.loader()
        self.updating, self.failed = True, False

    def update(self, tensors: Named) -> None:
        if not self.updating:
            raise CallRefused(f"weights came without an open update; call {self.begin_name} first")
        if self.failed:
            raise CallRefused(f"this update has failed; call {self.end_name}")
        try:
            for name, tensor in tensors:
                self.write(name, tensor)
        except BaseException:
            self.failed = True
            raise

    def end(self, weight_version: int | None = None) -> None:
        if not self.updating:
            raise CallRefused(f"{self.end_name}: no update is open")
        self.updating = False
        if not self.failed:
            self.weight_version = self.weight_version + 1 if weight_version is None else weight_version
        self.drop_prefixes()

    def drop_prefixes(self) -> None:
        self.prefixes.clear()

    # -- the receiving side of the kit's sender ------------------------------------------------------------------------

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if not self.driven:
            self.begin()
            self.driven = True
        self.update([(name, tensor)])

    def finalize(self) -> None:
        """After all tensors of a version, or when the kit has put the old weights back."""
        if self.driven:
            self.driven = False
            self.end()
        else:
            self.drop_prefixes()

    def abandon(self) -> None:
        """The sync failed."""
        if self.driven:
            self.driven, self.failed = False, True
            self.end()

    def sleep(self) -> None:
        self.drop_prefixes()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's logits; a prefix that was cached with other weights moves all of them."""
        now = float(next(self.ctx.chunks[0].parameters()).detach().double().sum())
        cached = self.prefixes.setdefault(bytes(str(tokens.tolist()), "ascii"), now)
        return self.ctx.forward(tokens) + (cached - now)


class VllmCalls(EngineDouble):
    """vLLM's weight transfer. Forwards go on meanwhile unless the caller pauses them."""

    begin_name, end_name = "start_weight_update", "finish_weight_update"
    initialised = False

    def init_weight_transfer_engine(self) -> None:
        self.initialised = True

    def start_weight_update(self) -> None:
        if not self.initialised:
            raise CallRefused("start_weight_update: call init_weight_transfer_engine first")
        super().begin()

    def update_weights(self, tensors: Named) -> None:
        self.update(tensors)

    def finish_weight_update(self, weight_version: int | None = None) -> None:
        self.end(weight_version)

    def begin(self) -> None:
        if not self.initialised:
            self.init_weight_transfer_engine()
        self.start_weight_update()


class SglangSession(EngineDouble):
    """SGLang's session. It holds the engine's writer lock until it is ended."""

    begin_name, end_name = "begin_weight_update", "end_weight_update"

    def __init__(self, ctx: DoubleContext) -> None:
        super().__init__(ctx)
        self.lock = contextlib.ExitStack()

    def begin_weight_update(self) -> None:
        self.begin()

    def update_weights_from_tensor(self, tensors: Named) -> None:
        self.update(tensors)

    def end_weight_update(self, weight_version: int | None = None) -> None:
        self.end(weight_version)

    def begin(self) -> None:
        super().begin()
        try:
            self.lock.enter_context(self.ctx.writing())
        except BaseException:
            self.updating = False
            raise

    def end(self, weight_version: int | None = None) -> None:
        try:
            super().end(weight_version)
        finally:
            self.lock.close()
