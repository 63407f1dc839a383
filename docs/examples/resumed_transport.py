"""Buckets that a receiver still has from a sync that failed are not sent again.
kit run sync --set transport=docs.examples.resumed_transport:Resumed"""

import hashlib
from typing import Any

import torch

from kit.sync.transports import Transport, memory

KEPT: dict[int, torch.Tensor] = {}  # on a receiver: buckets of a sync that did not end
NOTES: dict[
    str, dict[int, str]
] = {}  # on the sender, with the bug: the digest of each bucket that was sent to a receiver


class Resumed(Transport):
    """Receivers say what they still have; the sender sends everything else."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.has: dict[str, dict[int, str]] = {}
        self.left = len(ctx.sizes)
        if ctx.role == "sender":
            for name, link in ctx.links.items():
                message, _ = link.expect("kept")
                self.has[name] = {int(index): digest for index, digest in message["digests"].items()}
        else:
            self.say({"kind": "kept", "digests": {index: digest_of(buffer) for index, buffer in KEPT.items()}})

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        digest = digest_of(buffer)
        for name, link in self.ctx.links.items():
            same = self.has[name].get(index) == digest
            link.send({"kind": "same" if same else "bytes"})
            if not same:
                link.send_bytes(memory(buffer))

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        if self.ctx.sender.message("a bucket")["kind"] == "same":
            into.copy_(KEPT.get(index, into))
        else:
            self.ctx.sender.receive_bytes(memory(into))
            KEPT[index] = into.clone()
        return into

    def done(self, index: int) -> None:
        super().done(index)
        self.left -= 1

    def close(self) -> None:
        if self.ctx.role == "receiver" and not self.left:
            KEPT.clear()


def digest_of(buffer: torch.Tensor) -> str:
    return hashlib.sha256(memory(buffer)).hexdigest()


# -- with one bug each ---------------------------------------------------------------------------------------------------


class ResumedByNotes(Resumed):
    """After a failure the sender goes by its own notes: a bucket counts as received once it is sent."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.has = {name: NOTES.get(name, {}) for name in ctx.links}

    def send(self, index: int, buffer: torch.Tensor) -> None:
        super().send(index, buffer)
        for name in self.ctx.links:
            NOTES.setdefault(name, {})[index] = digest_of(buffer)

    def flush(self) -> None:
        super().flush()
        NOTES.clear()  # receivers forget too
