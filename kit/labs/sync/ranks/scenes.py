"""The ways in which a sync of the lab fails on purpose, by scene, and the code that fails.

What fails is a patch by name, as a fault is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kit.errors import KitError, RehearsedError
from kit.labs.sync.lab import SyncConfig
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.watch import SeenTransport
from kit.sync.buckets import Destination, Key, Layout
from kit.sync.link import ready
from kit.sync.receiver import Call
from kit.sync.sender import Gathered, Sender, Sending
from kit.sync.serving import Gate, GateTimeout

# The ways in which a sync fails. The trainer gathers weights without memory (emptied), or of another dtype and one too few (unlike). A
# receiver lacks a tensor (missing), waits for one that is not sent (unsent), or has another dtype or shape (unfit); its transport raises
# before a bucket in the middle has arrived, the first time that bytes of this version move (middle); it gets bytes that changed after
# sending (wrong-bytes) or after packing; its transport raises at the last bucket; so does the sender's (both); only the sender's raises
# (alone); the receiver leaves without a word at a bucket in the middle (gone), or reads nothing more there (stalled); it fails when all
# weights are new (late), or after others have published, or after the version became active; it does not answer a step (silent), or sends
# no first message (mute).
EXTRA = "rehearsed.weight"
ALONE = "alone"
LATE, MIDDLE = "late", "middle"
PACKED, WRONG_BYTES = "packed", "wrong-bytes"
# A smaller share of the tensors may be none of them, so wrong bytes may arrive unseen. A share above 1 - SURE may be the same tensors for
# two versions: of 14 tensors, 1 time in 10,000 at this limit.
SURE = 0.4
TOO_LATE = "activate"
CLOSING = ("left_unlisted", "left_groups", "left_fds", "left_sockets", "left_threads")
REFILL = "refill"  # fails nowhere
EMPTIED, UNLIKE = "emptied", "unlike"
GONE, MUTE, SILENT, STALLED = "gone", "mute", "silent", "stalled"
SILENCE_S = 2.0  # how long the sender waits for a silent receiver
LONGER = 0.9  # of what the others wait for the sender, so that they hear it although machines are busy
# The sender ends these before it has opened its end of a transport, and the receivers may wait for that in their constructors.
UNOPENED = ("missing", "unsent", "unfit", EMPTIED, UNLIKE)
STUCK = "the sender did not end the sync"
LOST = "lost"  # the receivers have lost the weights that were changed, and do not know it
# No transport is open when these fail. One that is not the kit's may take a failure that comes earlier for bytes.
AFTER_CLOSING = (LATE, "publish", TOO_LATE, MUTE, SILENT)
WHY = {  # what code that fails on purpose says; the sender's error must say it too
    MIDDLE: "rehearsed error before a bucket",
    "transport": "rehearsed error of the receiver's transport",
    "both": "rehearsed error of the receiver's transport",
    ALONE: "rehearsed error of the sender's transport",
    GONE: "is gone",
    LATE: "rehearsed failure after all weights are new",
    "publish": "rehearsed failure after others have published",
    TOO_LATE: "rehearsed failure after the version became active",
    EMPTIED: "is empty",
    MUTE: f"did not answer within {SILENCE_S:g} s",
    SILENT: f"did not answer within {SILENCE_S:g} s",
}

CALL, SENDING, TRANSPORT = (
    "kit.sync.receiver:Call",
    "kit.sync.sender:Sending",
    "kit.labs.sync.ranks.watch:SeenTransport",
)
DESTINATIONS = "kit.labs.sync.ranks.replica:SyncReplica.destinations"
AT_THE_RECEIVER = {
    "missing": {DESTINATIONS: f"{__name__}:without_a_tensor"},
    "unsent": {DESTINATIONS: f"{__name__}:with_a_tensor_that_is_not_sent"},
    "unfit": {DESTINATIONS: f"{__name__}:with_another_dtype_and_another_shape"},
    WRONG_BYTES: {f"{CALL}.look": f"{__name__}:looks_at_other_bytes"},
    MIDDLE: {f"{TRANSPORT}.receive": f"{__name__}:raises_before_a_bucket_in_the_middle"},
    "transport": {f"{TRANSPORT}.receive": f"{__name__}:raises_at_the_last_bucket"},
    "both": {f"{TRANSPORT}.receive": f"{__name__}:raises_at_the_last_bucket"},
    GONE: {f"{TRANSPORT}.receive": f"{__name__}:leaves_before_a_bucket_in_the_middle"},
    STALLED: {f"{TRANSPORT}.receive": f"{__name__}:stalls_before_a_bucket_in_the_middle"},
    LATE: {f"{CALL}.finalize": f"{__name__}:raises_when_all_weights_are_new"},
    "publish": {f"{CALL}.publish": f"{__name__}:raises_after_others_have_published"},
    TOO_LATE: {f"{CALL}.activate": f"{__name__}:raises_after_the_version_became_active"},
    SILENT: {f"{CALL}.finalize": f"{__name__}:says_nothing_until_the_sender_gives_up"},
}
AT_THE_OTHERS = {SILENT: {f"{CALL}.finalize": f"{__name__}:waits_for_the_sender_a_little_longer"}}
AT_THE_SENDER = {
    MUTE: {f"{SENDING}.run": f"{__name__}:runs_with_a_short_limit"},
    SILENT: {f"{SENDING}.finalize": f"{__name__}:finalizes_with_a_short_limit"},
    STALLED: {f"{SENDING}.open": f"{__name__}:opens_with_a_short_limit"},
    "both": {f"{SENDING}.open": f"{__name__}:opens_what_raises_in_flush"},
    ALONE: {f"{TRANSPORT}.send": f"{__name__}:raises_at_the_second_bucket"},
    PACKED: {
        f"{TRANSPORT}.send": f"{__name__}:flips_a_packed_bit",
        f"{TRANSPORT}.close": f"{__name__}:flips_the_bit_back",
    },
}
look, destinations = Call.look, SyncReplica.destinations
run, open_all, finalize_all = Sending.run, Sending.open, Sending.finalize
send, receive, flush, close = SeenTransport.send, SeenTransport.receive, SeenTransport.flush, SeenTransport.close


def rehearsed_scenes(config: SyncConfig, *, expansion: bool = False) -> tuple[str, ...]:
    wrong_bytes = (WRONG_BYTES,) * (config.verify != "none" and config.verify_share >= SURE)
    wrong_bytes += (PACKED,) * (config.verify != "none" and config.verify_share == 1)
    if expansion:
        return ("missing", *wrong_bytes, LATE, "publish")
    at_the_receiver = ("missing", "unsent", "unfit", MIDDLE, *wrong_bytes, "transport", "both", GONE, STALLED)
    # Memory of a version that could not be packed is closed: the next scene makes it again, and the lab sees it as bytes move.
    return (*at_the_receiver, EMPTIED, UNLIKE, ALONE, LATE, "publish", SILENT, MUTE)


def in_fullest_bucket(layout: Layout) -> tuple[int, list[str]]:
    """The bucket with the most whole tensors, and their names."""
    whole = [
        [layout.specs[piece.spec].name for piece in bucket if piece.size == layout.specs[piece.spec].size]
        for bucket in layout.buckets
    ]
    index = max(range(len(whole)), key=lambda bucket: len(whole[bucket]))
    return index, whole[index]


# -- code that fails on purpose --------------------------------------------------------------------------------------------


Destinations = Mapping[str, Sequence[Destination]]
Tensors = dict[Key, torch.Tensor]


def without_memory(tensors: Tensors, layout: Layout) -> Tensors:  # noqa: ARG001 - as below
    emptied = {key: tensor.clone() for key, tensor in tensors.items()}
    for tensor in emptied.values():
        tensor.untyped_storage().resize_(0)
    return emptied


def with_another_dtype_and_one_too_few(tensors: Tensors, layout: Layout) -> Tensors:
    *others, last = in_fullest_bucket(layout)[1]
    unlike = {key: tensor.double() if key[0] in others else tensor for key, tensor in tensors.items()}
    del unlike[last, 0]
    return unlike


AT_THE_TRAINER: dict[str, Callable[[Tensors, Layout], Tensors]] = {
    EMPTIED: without_memory,
    UNLIKE: with_another_dtype_and_one_too_few,
}


def without_a_tensor(replica: SyncReplica) -> Destinations:
    places = dict(destinations(replica))
    del places[max(replica.truth)]
    return places


def with_a_tensor_that_is_not_sent(replica: SyncReplica) -> Destinations:
    places = destinations(replica)
    return {**places, EXTRA: places[max(replica.truth)]}


def with_another_dtype_and_another_shape(replica: SyncReplica) -> Destinations:
    """Of one tensor each; a plain copy would silently convert the first and broadcast the second."""
    places = dict(destinations(replica))
    first, last = min(places), max(replica.truth)
    places[last] = [(into.to(torch.float64), take) for into, take in places[last]]
    places[first] = [(into.new_empty(2, *into.shape), take) for into, take in places[first]]
    return places


def looks_at_other_bytes(call: Call, index: int, buffer: torch.Tensor) -> None:
    """Every piece of the bucket is changed: two words are swapped, or one bit of the first or last byte is flipped."""
    buffer = buffer.clone()
    for number, _, size, offset in call.layout.buckets[index]:
        piece = buffer[offset : offset + size]
        words = piece[: size // 8 * 8].view(-1, 8)
        if number % 3 == 0 and len(words) > 1 and not torch.equal(words[0], words[-1]):
            words[[0, -1]] = words[[-1, 0]]
        else:
            piece[-1 if number % 3 == 1 else 0] ^= 1
    look(call, index, buffer)


def raises_when_all_weights_are_new(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - a step of the receiver
    raise RehearsedError(WHY[LATE])


def raises_after_others_have_published(call: Call, message: dict[str, Any]) -> None:
    call.receiver.version = message["version"]
    raise RehearsedError(WHY["publish"])


def raises_after_the_version_became_active(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - as above
    raise RehearsedError(WHY[TOO_LATE])


def says_nothing_until_the_sender_gives_up(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - as above
    call.link.wait_at_most(3 * SILENCE_S)
    with contextlib.suppress(KitError):
        call.link.receive("the end of the sync")
    raise RehearsedError("the silence is over")


def waits_for_the_sender_a_little_longer(call: Call, message: dict[str, Any]) -> None:  # noqa: ARG001 - as above
    """In the proportion in which the ends wait: this one must hear whom the sender names. It derives nothing, which may take longer."""
    call.link.wait_at_most(call.link.timeout_s * LONGER * SILENCE_S / call.receiver.timeout_s)
    call.link.send({"kind": "finalized"})


class GateOfHastyReaders(Gate):
    """Its readers wait shorter than a writer is inside, again and again."""

    def _wait(self, waiting: str, free: Callable[[], bool]) -> None:
        if waiting == "reader" and not self._changed.wait_for(free, SILENCE_S / 2):
            raise GateTimeout(waiting, (), SILENCE_S / 2)
        super()._wait(waiting, free)


@contextlib.contextmanager
def short_limit(sender: Sender) -> Iterator[None]:
    before, sender.timeout_s = sender.timeout_s, SILENCE_S
    try:
        yield
    finally:
        sender.timeout_s = before


def runs_with_a_short_limit(sending: Sending, gather: Callable[[], Gathered] | None) -> None:
    """It counts from when all others have called, so that only the mute one is late."""
    sender, others = sending.sender, [target.name for target in sending.targets[:-1]]
    sender.listener.await_calls(others, sender.timeout_s)
    with short_limit(sender):
        run(sending, gather)


def finalizes_with_a_short_limit(sending: Sending) -> None:
    with short_limit(sending.sender):
        finalize_all(sending)


def raises_before_a_bucket_in_the_middle(transport: SeenTransport, index: int, into: torch.Tensor) -> torch.Tensor:
    """The bucket is sent and never read, and the next sync has the same bytes: a sender that notes what it sent must not take it for
    received."""
    if index == transport.buckets // 2:
        raise RehearsedError(WHY[MIDDLE])
    return receive(transport, index, into)


def leaves_before_a_bucket_in_the_middle(transport: SeenTransport, index: int, into: torch.Tensor) -> torch.Tensor:
    """Like a process that was killed: its connection closes, and nothing was said before."""
    if index == transport.buckets // 2:
        for link in transport.links.values():
            link.close()
        raise RehearsedError("the receiver has left")
    return receive(transport, index, into)


def opens_with_a_short_limit(sending: Sending) -> None:
    """From here to the end of this sync: whatever waits for the receivers first, the transport or the sender. A transport that needs
    longer to open fails here; whom its error names is not judged."""
    sending.sender = copy.copy(sending.sender)
    sending.sender.timeout_s = SILENCE_S
    for link in sending.links.values():
        link.wait_at_most(SILENCE_S)
    open_all(sending)


def stalls_before_a_bucket_in_the_middle(transport: SeenTransport, index: int, into: torch.Tensor) -> torch.Tensor:
    """It reads nothing more and keeps its end open until the sender has left, which must not wait for that."""
    if index == transport.buckets // 2:
        left = all(link.ends(max(4 * SILENCE_S, link.timeout_s / 2)) for link in transport.links.values())
        raise RehearsedError("the stall is over" if left else STUCK)
    return receive(transport, index, into)


def raises_at_the_last_bucket(transport: SeenTransport, index: int, into: torch.Tensor) -> torch.Tensor:
    got = receive(transport, index, into)
    if index == transport.buckets - 1:
        raise OSError(WHY["transport"])
    return got


def raises_at_the_second_bucket(transport: SeenTransport, index: int, buffer: torch.Tensor) -> None:
    if index == min(1, transport.buckets - 1):
        raise OSError(WHY[ALONE])
    send(transport, index, buffer)


def opens_what_raises_in_flush(sending: Sending) -> None:
    """Only of the transport to the receiver that fails: another one would wait in vain for word of a failure, for as long as a deadline."""
    open_all(sending)
    for transport in sending.transports:
        if isinstance(transport, SeenTransport) and sending.targets[-1].name in transport.links:
            transport.flush = functools.partial(raises_in_flush, transport)  # type: ignore[method-assign]


def raises_in_flush(transport: SeenTransport) -> None:
    """The transport's own error, once the receiver has failed. A transport may have read the receiver's reason; one that does not listen
    has left it on the link."""
    reason: Exception | None = None
    try:
        flush(transport)
    except Exception as error:  # noqa: BLE001 - a transport may raise anything
        reason = error
    links = [*transport.links.values()]
    for link in ready(links, links[0].timeout_s) if reason is None else ():
        reason = reason or link.last_words("the receiver's failure", patience_s=link.timeout_s)
    raise OSError(WHY[ALONE]) from reason


flipped: dict[int, torch.Tensor] = {}  # packed buffers, by address: a second transport must not flip the bit back


def flips_a_packed_bit(transport: SeenTransport, index: int, buffer: torch.Tensor) -> None:
    if index == 0 and buffer.data_ptr() not in flipped:
        buffer[0] ^= 1
        flipped[buffer.data_ptr()] = buffer
    send(transport, index, buffer)


def flips_the_bit_back(transport: SeenTransport) -> None:
    """The packed bytes may be the only copy of the active version."""
    while flipped:
        flipped.popitem()[1][0] ^= 1
    close(transport)
