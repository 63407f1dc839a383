"""The receiver's end of a sync: it follows the sender's commands and restores its old state if anything fails.

A serving receiver first stores all buckets, then changes its weights between two forwards; forwards wait until the end. Until then
everything can be undone: weights, version and route, whichever end failed. After `activate` a receiver is only ready: the sender ends the
sync for replicas that are ready on every rank, so that no replica runs two versions. A receiver that pauses or wakes puts buckets into its
weights as they arrive, and has no route after a failure. Receivers wait twice as long as the sender, which may wait its whole deadline for
another receiver and then names that one. Limits: a refresh needs a copy of the receiver's shards until it can no longer be undone and,
with every transport except shm, memory for all buckets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, cast

import torch

from kit.errors import KitError
from kit.sync.adopting import Adopting
from kit.sync.buckets import Applier, Layout, Mismatch, Weights
from kit.sync.cache import BASE, KeptMappings, starts
from kit.sync.hashes import Digests
from kit.sync.link import BRIEF_S, FAILED, Link, PeerFailed, PeerGone, call
from kit.sync.sender import HOLDS, KEEP, LAYOUT, SyncLog
from kit.sync.transports import Transport, TransportContext, make, received

SENDER = "the sender"
STREAMS = ("stream", "expand")  # paths in which weights change bucket by bucket
CONSEQUENCE_S = 1.0  # longer than the sender's GRACE_S: whoever fails because of another receiver hears of it before it reports itself
PATIENCE = 2  # a receiver waits this many times `timeout_s`


class Host(Protocol):
    """The object that holds the weights and serves with them. `wake` allocates the memory of the weights again, `sleep` releases it; no
    forward runs inside `writing`; `finalize` recomputes what is derived from the weights, after all weights of a version are in place;
    `digests` returns the digests of all full tensors."""

    def wake(self) -> None: ...
    def sleep(self) -> None: ...
    def writing(self) -> contextlib.AbstractContextManager[None]: ...
    def finalize(self) -> None: ...
    def digests(self, algorithm: str) -> dict[str, str]: ...


class TransportFailed(KitError):  # noqa: N818 - it is what happened
    """This end of a transport raised an error that is not the kit's."""


class WrongBytes(KitError):  # noqa: N818 - it is what was found
    """Received bytes differ from what was sent."""

    def __init__(self, message: str, *, bucket: int, tensors: tuple[str, ...]) -> None:
        super().__init__(message)
        self.bucket = bucket
        self.tensors = tensors


@dataclass(eq=False, repr=False)
class Receiver:
    """`version` is the last published version; `whole`: whether all weights are that version's; `routed`: whether this receiver may get
    requests."""

    name: str
    weights: Callable[[], Weights]
    host: Host
    _: KW_ONLY
    address: dict[str, Any]
    device: torch.device
    timeout_s: float = 60.0
    kept: KeptMappings | None = None  # mappings kept between syncs, for a sender that keeps its memory
    adopts: bool = False  # `weights` returns `Adopting`, which becomes views of the sender's memory where it is shared
    layout: tuple[str, Layout | None] = "", None  # id and layout that the sender sent last; it is not sent again
    version: int = BASE
    whole: bool = False
    routed: bool = False

    def __post_init__(self) -> None:
        self.calls: type[Call] = Call  # the class that takes part in one sync
        self.make = make  # makes a transport by name; an observer may replace it

    def join(self) -> Call:
        """Take part in the next sync, and return it once it has ended. On failure, restore the old state, then raise the error of this
        end or of the sender. If that cannot be restored either, this receiver has no route."""
        hello = {LAYOUT: self.layout[0], HOLDS: self.version if self.whole else None}
        with call(self.address, self.name, peer=SENDER, timeout_s=PATIENCE * self.timeout_s, hello=hello) as link:
            sync = self.calls(self, link)
            try:
                sync.run()
            except BaseException as error:
                try:
                    sync.undo()
                except Exception as worse:  # noqa: BLE001 - the first error is the one to raise
                    self.routed = self.whole = False
                    error.add_note(f"the undo failed too, and this receiver has no route any more: {worse}")
                words = sync.reason_of_the_sender(error)
                with contextlib.suppress(KitError):
                    link.send(failure_message(error))
                if words is not None:
                    raise words from (None if isinstance(error, PeerGone) else error)
                raise
            finally:
                sync.close()
        return sync


class Call:
    """One sync on a receiver, with a method for each command of the sender."""

    def __init__(self, receiver: Receiver, link: Link) -> None:
        self.receiver = receiver
        self.link = link
        self.path, self.version, self.kind = "", BASE, ""
        self.began = 0.0  # by the sender's clock
        self.log = SyncLog()
        self.transport: Transport | None = None
        self.applier: Applier
        self.digests: Digests | None = None
        self.stored: list[torch.Tensor] = []
        self.before: Callable[[], None] | None = None  # puts the old weights back, while a refresh can be undone
        self.was = receiver.version, receiver.routed
        self.changing = False  # some serving weights may be new, some old
        self.in_doubt = False  # ready to run the version, but other ranks of the replica may not be
        self.woke = self.committed = False
        self.writing = contextlib.ExitStack()

    def run(self) -> None:
        message = self.link.expect("begin")[0]
        self.path, self.version, self.began = message["path"], message["version"], message["began"]
        self.mates = message["mates"]  # other ranks of its replica
        self.begin(message)
        while True:
            message = self.link.message("the sender's next step")
            kind = message["kind"]
            if kind == FAILED:
                self.in_doubt = False
                if message.get(KEEP):
                    self.commit()
            if kind not in STEPS:
                raise PeerFailed(SENDER, "the next step", message)
            getattr(self, kind)(message)
            self.log.event({"verify": "verified", "apply": "applied"}.get(kind, kind))
            if kind == "end":
                return

    def reason_of_the_sender(self, error: BaseException) -> PeerFailed | None:
        """If the sender or another receiver has failed, a transport raises an error, and the reason is on the link, or will be soon."""
        patience_s = CONSEQUENCE_S if isinstance(error, TransportFailed) else 0.0
        if isinstance(error, KitError) and not isinstance(error, PeerGone | TransportFailed):
            return None
        within_s = math.inf if isinstance(error, PeerGone) else BRIEF_S + patience_s
        return self.link.last_words("the sender's next step", within_s, patience_s)

    @contextlib.contextmanager
    def at_the_transport(self) -> Iterator[None]:
        """Name the transport in an error that is not the kit's."""
        try:
            yield
        except KitError:
            raise
        except Exception as error:
            end = f"{self.receiver.name}'s end of the transport {self.kind}"
            raise TransportFailed(f"{end} raised {type(error).__name__}: {error}") from error

    def begin(self, message: dict[str, Any]) -> None:
        if message["path"] == "base":
            self.log.event("begin")
            self.link.send({"kind": "base", "digests": self.receiver.host.digests(message["algorithm"])})
            return
        base, changes = message["base"], message["changes"]
        if base is not None and (base != self.receiver.version or not self.receiver.whole):
            has = f"version {self.receiver.version}" if self.receiver.whole else "no whole version"
            raise KitError(f"the sender sent changes to version {base}, but {self.receiver.name} has {has}")
        if message["path"] in STREAMS:
            self.receiver.whole = False
            self.receiver.routed = False
            self.log.event("inactive")
        if message["path"] == "expand":
            self.receiver.host.wake()
            self.woke = True
            self.log.event("wake")
        if message["path"] == "stream":
            self.writing.enter_context(self.receiver.host.writing())
            self.log.event("gate")
        self.log.event("begin")
        if message["layout"] is not None:
            self.receiver.layout = message[LAYOUT], Layout.from_json(message["layout"])
        known = self.receiver.layout[1]
        if known is None:
            raise KitError("the sender sent no bucket layout")
        self.layout = known if changes is None else Layout.from_json(changes)
        self.slots = message["slots"]  # places in the sender's memory if it does not hold all buckets, else 0
        weights = self.receiver.weights()
        self.adopts = self.receiver.adopts and message["transport"] == "shm" and not self.slots and changes is None
        if self.adopts:
            self.applier = cast("Adopting", weights).adopt(known)
        else:
            self.applier = weights.bind(known, None if changes is None else self.layout)
        self.digests = Digests(self.layout, message["version"], algorithm=message["verify"], share=message["share"])
        self.link.send({"kind": "ready"})
        self.log.event("ready")
        self.kind = message["transport"]
        with self.log.stage("receive"), self.at_the_transport():
            self.transport = self.receiver.make(message["transport"], self.context(message))
        if message["path"] in STREAMS:
            self.stream(self.transport)
        else:
            self.store(self.transport)
            with self.log.stage("keep"):
                self.before = weights.keep()
        self.log.event("received")

    def stream(self, transport: Transport) -> None:
        for index, into, buffer in self.receive(transport, landing(transport, self.receiver.device), reuse=True):
            self.look(index, buffer)
            with self.log.stage("apply"):
                self.apply_bucket(index, buffer)
            if self.digests is not None and (self.slots or buffer.data_ptr() == into.data_ptr()):
                self.digests.wait(index)  # a later bucket overwrites this place
            with self.at_the_transport():
                transport.done(index)

    def store(self, transport: Transport) -> None:
        place = landing(transport, self.receiver.device, sum(self.layout.sizes))
        for index, _, buffer in self.receive(transport, place, reuse=False):
            self.look(index, buffer)
            self.stored.append(buffer)
            with self.at_the_transport():
                transport.done(index)

    # -- commands after all buckets have arrived -------------------------------------------------------------------------

    def verify(self, message: dict[str, Any]) -> None:
        assert self.digests is not None
        with self.log.stage("verify"):
            differing = self.digests.differences(self.layout, message["digests"])
        if differing:
            raise WrongBytes(wrong_bytes(differing), bucket=differing[0][0], tensors=names_in(differing))
        self.link.send({"kind": "verified"})

    def apply(self, message: dict[str, Any]) -> None:  # noqa: ARG002 - every step gets the message
        if self.path == "refresh":
            with self.log.stage("gate"):
                self.writing.enter_context(self.receiver.host.writing())
            self.log.event("gate")
            self.changing = True
            with self.log.stage("apply"):
                self.apply_stored()
        self.link.send({"kind": "applied"})

    def teardown(self, message: dict[str, Any]) -> None:  # noqa: ARG002 - as above
        with self.log.stage("teardown"):
            self.let_go()
        self.link.send({"kind": "closed"})

    def finalize(self, message: dict[str, Any]) -> None:  # noqa: ARG002 - as above
        with self.log.stage("finalize"):
            self.receiver.host.finalize()
        self.link.send({"kind": "finalized"})

    def acknowledge(self, message: dict[str, Any]) -> None:
        """Only after changes: whether they led to the trainer's weights is the sender's to judge."""
        with self.log.stage("acknowledge"):
            digests = self.receiver.host.digests(message["algorithm"])
        self.link.send({"kind": "acknowledged", "digests": digests})

    def publish(self, message: dict[str, Any]) -> None:
        self.receiver.version = message["version"]
        self.link.send({"kind": "published"})

    def activate(self, message: dict[str, Any]) -> None:  # noqa: ARG002 - as above
        """Report that this rank is ready to run the version; forwards still wait."""
        self.in_doubt = True
        self.link.send({"kind": "activated"})

    def end(self, message: dict[str, Any]) -> None:  # noqa: ARG002 - as above
        self.commit()
        self.link.send({"kind": "ended"})

    def commit(self) -> None:
        """Let forwards run with the new weights: all ranks of the replica are ready. Nothing can be undone from here on."""
        self.committed = self.receiver.routed = True
        self.receiver.whole = True
        self.writing.close()
        self.before = None  # after the gate: to free a version takes longer than to put another in its place

    def apply_bucket(self, index: int, buffer: torch.Tensor) -> None:
        self.applier.apply(index, buffer)

    def apply_stored(self) -> None:
        for index, buffer in enumerate(self.stored):
            self.apply_bucket(index, buffer)

    def look(self, index: int, buffer: torch.Tensor) -> None:
        if self.digests is not None and self.digests.count:
            self.digests.add_packed(index, buffer)

    def receive(
        self, transport: Transport, device: torch.device, *, reuse: bool
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield each bucket's number, memory for it, and the tensor that has its bytes. The memory is for all buckets, or for one and
        reused; pages are allocated when they are first written."""
        sizes = self.layout.sizes
        places, total = starts(sizes, 1 if reuse else 0)
        memory = torch.empty(total, dtype=torch.uint8, device=device)
        for index, (place, size) in enumerate(zip(places, sizes, strict=True)):
            into = memory[place : place + size]
            with self.log.stage("receive"), self.at_the_transport():
                buffer = received(transport, index, into)
            yield index, into, buffer

    def context(self, message: dict[str, Any]) -> TransportContext:
        return TransportContext(
            role="receiver",
            name=self.receiver.name,
            links={SENDER: self.link},
            sizes=self.layout.sizes,
            starts=starts(self.layout.sizes, self.slots)[0],
            device=self.receiver.device,
            timeout_s=self.receiver.timeout_s,
            ranks=tuple(message["ranks"]),
            place=message["place"],
            pieces=self.layout.pieces,
            kept=self.receiver.kept if message["base"] is None else None,  # memory of changes is not kept
            adopts=self.adopts,
        )

    def let_go(self) -> None:
        transport, self.transport = self.transport, None
        self.stored = []
        if transport is not None:
            with self.at_the_transport():
                transport.close()

    def undo(self) -> None:
        """Restore weights, version and route if they changed; sleep again after a wake. This rank gets no route if other ranks of the
        replica may run the new version."""
        if self.committed:
            return
        self.receiver.version, self.receiver.routed = self.was
        if self.in_doubt and self.mates:
            self.receiver.routed = False
        if abandon := getattr(self.receiver.host, "abandon", None):
            abandon()  # an engine must end its update before the old weights come back
        if self.before and self.changing:
            self.before()
            self.receiver.host.finalize()
        if self.path == "stream" or self.woke:
            self.receiver.routed = False
        if self.woke:
            self.receiver.host.sleep()

    def close(self) -> None:
        """Release everything that belongs to the sync, however it ended."""
        with self.writing:  # forwards must run again, whatever is raised inside
            if self.digests is not None:
                self.digests.close()
            with contextlib.suppress(KitError):
                self.let_go()
            self.before = None


def wrong_bytes(differing: Sequence[tuple[int, str]]) -> str:
    """The first bucket with its tensors, and the other buckets that differ."""
    first = differing[0][0]
    names = names_in([pair for pair in differing if pair[0] == first])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    sentence = f"bucket {first} differs from what was sent: {', '.join(names[:3])}{more}"
    if later := sorted({bucket for bucket, _ in differing} - {first}):
        numbers = ", ".join(map(str, later[:3])) + ", ..." * (len(later) > 3)
        sentence += f"; so do{'es' * (len(later) == 1)} bucket{'s' * (len(later) > 1)} {numbers}"
    return sentence


def names_in(differing: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for _, name in differing))


STEPS = ("verify", "apply", "teardown", "finalize", "acknowledge", "publish", "activate", "end")
ROOMY = 2  # a refresh stores a version on the GPU if this many times its bytes are free there


def landing(transport: Transport, device: torch.device, stored: int = 0) -> torch.device:
    """The device for arriving buckets: the receiver's if the transport writes there and a GPU has room for what is stored, else the CPU."""
    host = torch.device("cpu")
    if not getattr(transport, "on_device", False):
        return host
    if stored and device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < ROOMY * stored:
        return host
    return device


def failure_message(error: BaseException) -> dict[str, Any]:
    kind = "" if isinstance(error, KitError) else f"{type(error).__name__}: "
    message: dict[str, Any] = {"kind": FAILED, "why": "; ".join([f"{kind}{error}", *getattr(error, "__notes__", ())])}
    if isinstance(error, WrongBytes | Mismatch):
        message |= {"bucket": error.bucket, "tensors": error.tensors}
    return message
