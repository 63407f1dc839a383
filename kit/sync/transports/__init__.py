"""Transports of buckets by name, and the choice between two locations."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from kit.errors import BadInput
from kit.target import is_target, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.sync.transports.base import Transport, TransportContext

    Make = Callable[[TransportContext], Transport]

NAMES = {
    "shm": "kit.sync.transports.direct:Shm",
    "broadcast": "kit.sync.transports.groups:Broadcast",
    "rendezvous": "kit.sync.transports.groups:Rendezvous",
    "serialize": "kit.sync.transports.direct:Serialize",
    "ipc": "kit.sync.transports.direct:Ipc",
    "per-tensor": "kit.sync.transports.groups:PerTensor",
}
CALLS = ("send", "flush", "receive", "done", "close")


class Place(NamedTuple):
    """The location of a rank. `gpu` identifies its GPU on the host, as a UUID does; empty without one."""

    host: str
    world: int | str
    gpu: str = ""


def choose(sender: Place, receiver: Place) -> str:
    """The best transport between two ranks. `serialize` and `per-tensor` are used on request only: `serialize` if the ends cannot share
    a group (different builds of torch, only one open port), `per-tensor` for comparison."""
    if sender.host == receiver.host:
        return "ipc" if sender.gpu and sender.gpu == receiver.gpu else "shm"
    return "broadcast" if sender.world == receiver.world else "rendezvous"


def by_name(name: str) -> Make:
    """The transport with this name, or your own at `module:attr`. It is called with a context on each end."""
    target = NAMES.get(name, name)
    if not is_target(target):
        raise BadInput(f"unknown transport {name!r}: use {', '.join(NAMES)} or module:attr")
    try:
        found = load(target)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"transport {name} cannot be loaded on this rank: {error}") from error
    if not callable(found):
        raise BadInput(f"transport {name} is {found!r}, which cannot be called with a TransportContext")
    return cast("Make", found)


def make(kind: str | Make, ctx: TransportContext, *, ring: bool = False) -> Transport:
    """This end of a transport, which is given by name or as a type. With a ring the sender also needs `ahead`."""
    made = (by_name(kind) if isinstance(kind, str) else kind)(ctx)
    if lacks := [name for name in (*CALLS, *["ahead"] * ring) if not callable(getattr(made, name, None))]:
        why = ", which a ring needs" if lacks == ["ahead"] else ""
        raise BadInput(f"transport {kind}: the object it returned lacks {', '.join(lacks)}{why}")
    return made
