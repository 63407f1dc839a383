"""What a sync promises when it fails: nobody has the version, weights are as before, the error names who and what, the next one works.

Everything is counted; right is 0. The last serving rank fails on purpose, each time in another way, while the others do their part.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput, KitError
from kit.sync.cache import BASE
from kit.sync.memory import segments
from kit.sync.sender import SyncFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from kit.labs.sync.inference import Inference
    from kit.labs.sync.trainer import Trainer
    from kit.sync.receiver import Receiver

HASH = "mix128"


class RehearsedError(KitError):
    """An error that a rehearsal wants."""


def scenes(config: Any) -> tuple[str, ...]:
    """How a sync fails: a receiver lacks a tensor; gets other bytes than were sent; or fails when all have their new weights."""
    return ("missing", *(("wrong-bytes",) if config.verify != "none" and config.verify_share == 1 else ()), "late")


def trainer(side: Trainer) -> None:
    with side.as_job():
        side.job.step()
    if not side.sends:
        for _ in [*scenes(side.config), "the next"]:
            side.gather()
        return
    sender, targets = side.sender, side.targets(sleeping=False)
    found = {"accepted": accepted(side), "unnamed": 0, "kept_version": 0, "left_segments": 0, "left_groups": 0}
    groups, held = len(pg_map()), segments() - side.cache.blocks
    for scene in scenes(side.config):
        version = sender.version
        error = failed(functools.partial(sender.sync, version + 1, targets, side.gather))
        named = error is not None and error.peer == targets[-1].name and f"version {version} stays" in str(error)
        if scene != "late":
            named = named and error is not None and bool(error.tensors) and error.tensors[0] in str(error)
        if not named:
            print(f"rehearse: the error of '{scene}' names too little: {error}")
        found["unnamed"] += not named
        found["kept_version"] += sender.version != version
        found["left_segments"] += max(0, segments() - side.cache.blocks - held)
        found["left_groups"] += max(0, len(pg_map()) - groups)
    version = sender.version
    report = sender.sync(version + 1, targets, side.gather)
    found["next_failed"] = int(sender.version != version + 1 or report.answered != len(targets))
    tell(side, found)


def accepted(side: Trainer) -> int:
    """Calls that must be refused before any receiver is asked."""
    sender, targets = side.sender, side.targets(sleeping=False)
    asleep = side.targets(sleeping=True)
    version = sender.version
    wrong: list[Callable[[], object]] = [
        lambda: sender.sync(version, targets, dict),
        lambda: sender.sync(BASE, targets, dict),
        lambda: sender.sync(version + 1, []),
        lambda: sender.sync(version + 1, targets),
    ]
    if asleep:
        wrong += [lambda: sender.sync(version + 1, asleep), lambda: sender.sync(version, [*asleep, *targets], dict)]
    return sum(not refused(each) for each in wrong)


def inference(side: Inference) -> None:
    if side.sleeper:
        return
    found = {"kept_wrong": 0, "left_segments": 0, "left_groups": 0, "silent": 0}
    receiver = side.receiver
    staged = side.config.refresh == "staged"
    groups, held = len(pg_map()), segments()
    for scene in scenes(side.config):
        before = side.digests(HASH), receiver.version, receiver.routed
        with failing(receiver, scene) if side.sweeps else contextlib.nullcontext():
            found["silent"] += raised(receiver.join) is None
        after = side.digests(HASH), receiver.version, receiver.routed
        # A replica that pauses is not routed to after a failure; what is in its weights then is nobody's business.
        kept = after == before if staged else (after[1], receiver.routed) == (before[1], False)
        if not kept:
            print(f"rehearse: after '{scene}' version {after[1]} (was {before[1]}), routed {after[2]}, weights changed")
        found["kept_wrong"] += not kept
        found["left_segments"] += max(0, segments() - held)
        found["left_groups"] += max(0, len(pg_map()) - groups)
    before_last = receiver.version
    receiver.join()
    found["next_failed"] = int(receiver.version != before_last + 1 or not receiver.routed)
    tell(side, found)


@contextlib.contextmanager
def failing(receiver: Receiver, scene: str) -> Iterator[None]:
    """The receiver fails in the next sync, in this way."""
    plain: Any = receiver.calls

    class Failing(plain):  # type: ignore[misc]
        def begin(self, said: dict[str, Any]) -> None:
            if scene == "missing":
                _, known = receiver.layout
                assert known is not None  # versions came before
                name = known.specs[-1].name
                receiver_weights = receiver.weights
                receiver.weights = lambda: without(receiver_weights(), name)
                try:
                    super().begin(said)
                finally:
                    receiver.weights = receiver_weights
            else:
                super().begin(said)

        def look(self, index: int, buffer: torch.Tensor) -> None:
            if scene == "wrong-bytes" and index == 0:
                buffer = buffer.clone()
                buffer[0] ^= 1
            super().look(index, buffer)

        def finalize(self, said: dict[str, Any]) -> None:
            if scene == "late":
                raise RehearsedError("the rehearsed failure after all weights were new")
            super().finalize(said)

    receiver.calls = Failing
    try:
        yield
    finally:
        receiver.calls = plain


def without(weights: Any, name: str) -> Any:
    """The same weights, which do not know one tensor."""
    return type(weights)({key: place for key, place in weights.destinations.items() if key != name}, weights.own())


def failed(call: Callable[[], object]) -> SyncFailed | None:
    error = raised(call)
    return error if isinstance(error, SyncFailed) else None


def refused(call: Callable[[], object]) -> bool:
    return isinstance(raised(call), BadInput)


def raised(call: Callable[[], object]) -> KitError | None:
    try:
        call()
    except KitError as error:
        return error
    return None


def pg_map() -> dict[Any, Any]:
    found: dict[Any, Any] = c10d._world.pg_map
    return found


def tell(side: Trainer | Inference, found: dict[str, int]) -> None:
    for name, number in found.items():
        side.ctx.record(name, number)
        if number:
            print(f"rehearse: {name} is {number}")
