"""The ways for buckets to go, by name, and which is taken between two places."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kit.errors import BadInput
from kit.target import is_target, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.sync.transports.base import Transport, TransportContext

NAMES = {
    "shm": "kit.sync.transports.shm:Shm",
    "broadcast": "kit.sync.transports.groups:Broadcast",
    "rendezvous": "kit.sync.transports.rendezvous:Rendezvous",
    "serialize": "kit.sync.transports.serialize:Serialize",
    "ipc": "kit.sync.transports.ipc:Ipc",
    "per-tensor": "kit.sync.transports.groups:PerTensor",
}
CALLS = ("send", "flush", "receive", "done", "close")


class Place(NamedTuple):
    """Where a rank lives. `gpu` is what its GPU is called on every rank of the host, as its UUID; empty where there is none."""

    host: str
    world: int | str
    gpu: str = ""


def choose(sender: Place, receiver: Place) -> str:
    """The best way between two ranks. `serialize` and `per-tensor` are only taken when asked for: the one where the ends cannot
    meet in a group, as with other builds of torch or nothing but the link's port open; the other to compare with."""
    if sender.host == receiver.host:
        return "ipc" if sender.gpu and sender.gpu == receiver.gpu else "shm"
    return "broadcast" if sender.world == receiver.world else "rendezvous"


def by_name(name: str) -> Callable[[TransportContext], Transport]:
    """A transport's type, or of one's own what `module:attr` names. Called with a context on each end."""
    target = NAMES.get(name, name)
    if not is_target(target):
        raise BadInput(f"there is no transport {name!r}; allowed are {', '.join(NAMES)} and module:attr")
    try:
        found = load(target)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"the transport {name} cannot be had on this rank: {error}") from error
    if not callable(found):
        raise BadInput(f"the transport {name} is {found!r}, and something that takes a TransportContext is needed")
    made: Callable[[TransportContext], Transport] = found
    return made


def make(
    kind: str | Callable[[TransportContext], Transport], ctx: TransportContext, *, ring: bool = False
) -> Transport:
    """This end of a transport, given by its name or as a type. The sender of a ring asks it for `ahead` as well."""
    made = (by_name(kind) if isinstance(kind, str) else kind)(ctx)
    lacks = [name for name in (*CALLS, *["ahead"] * ring) if not callable(getattr(made, name, None))]
    if lacks:
        why = ", which a ring needs" if lacks == ["ahead"] else ""
        raise BadInput(f"the transport {kind}: the object it returned lacks {', '.join(lacks)}{why}")
    return made
