"""Samplers: which batch may start, which groups are trained, which are too old. Pure functions of a view.

A gate counts batches: its index starts at -1 (a resumed run: version - 1), it blocks while index >= version + window, and a batch that
passes raises it by one. The index is the batch's target. The gate is asked for every group, last of all; it opens or blocks at a batch's
first one.

| sampler | may start | trains | drops complete groups | aborts unfinished ones | largest lag |
|---|---|---|---|---|---|
| strict | gate, window 0 | target == version | target < version | none | 0 |
| in-order | gate | target == version | target < version | none | window |
| weight-fifo | gate | the oldest start in the window, complete or not; waits for it | start < version - window | none | window |
| windowed | always | any start in the window | start < version - window | the same | window |
| ready-first | gate | any complete group | none | none | no limit |
| capacity | accepted + running < (window + version + 1) x groups | as they complete | none | none | no limit (bounds the sum) |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

NO_TARGET = -1


class Slot(Protocol):
    """A group in the buffer. `version` is the current one when it was reserved; `order` counts completions, -1 while unfinished."""

    @property
    def id(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def order(self) -> int: ...


@dataclass(frozen=True, slots=True)
class View:
    """What a sampler sees. `position`: groups of the current batch that were dispatched already; `buffer`: its groups in order of id.

    `accepted` counts complete groups since the beginning, `running` those in flight; the run ends with the version `last`.
    """

    version: int
    window: int
    groups: int
    last: int
    index: int
    position: int
    accepted: int
    running: int
    buffer: Mapping[int, Slot]

    @property
    def oldest(self) -> int:
        """The oldest start in the window."""
        return max(0, self.version - self.window)

    def ready(self) -> Iterable[Slot]:
        return (slot for slot in self.buffer.values() if slot.order >= 0)


Groups = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampler:
    """`selects` gives every group that may be trained now, best first; the controller takes at least min or none, and at most max.

    `places` is how many the buffer needs at least. With `stamps` a batch's index is its groups' target. With `refills` a group that is
    dropped as too old is made up for without a passage of the gate, which would not let through more than the steps take.
    """

    admits: Callable[[View], bool]
    selects: Callable[[View], Groups]
    evicts: Callable[[View], Groups]
    aborts: Callable[[View], Groups]
    places: Callable[[int, int], int]
    stamps: bool = False
    refills: bool = False


def batch_may_start(view: View) -> bool:
    return view.position > 0 or (view.index < view.version + view.window and view.index + 1 < view.last)


def always(_: View) -> bool:
    return True


def within_capacity(view: View) -> bool:
    return view.accepted + view.running < (view.window + view.version + 1) * view.groups


def of_this_step(view: View) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.target == view.version)


def oldest_start_first(view: View) -> Groups:
    """From the oldest start in the window on, up to the first with an unfinished group, which is waited for.

    Without the later ones a batch that was dispatched across a sync could leave fewer groups of a start than a selection takes at least.
    """
    inside = sorted(
        (slot.version, slot.order < 0, slot.id) for slot in view.buffer.values() if slot.version >= view.oldest
    )
    awaited = next((start for start, unfinished, _ in inside if unfinished), view.version)
    return tuple(group for start, unfinished, group in inside if start <= awaited and not unfinished)


def inside_the_window(view: View) -> Groups:
    return tuple(slot.id for slot in view.ready() if view.oldest <= slot.version <= view.version)


def any_complete(view: View) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.version <= view.version)


def as_completed(view: View) -> Groups:
    return tuple(slot.id for slot in sorted(view.ready(), key=lambda slot: slot.order))


def nothing(_: View) -> Groups:
    return ()


def target_passed(view: View) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.target < view.version)


def start_too_old(view: View) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.version < view.oldest)


def unfinished_too_old(view: View) -> Groups:
    return tuple(slot.id for slot in view.buffer.values() if slot.order < 0 and slot.version < view.oldest)


def a_batch_per_version(groups: int, window: int) -> int:
    return groups * (window + 1)


def any_number(_: int, __: int) -> int:
    return 0


_IN_ORDER = Sampler(batch_may_start, of_this_step, target_passed, nothing, a_batch_per_version, stamps=True)
SAMPLERS = {
    "strict": _IN_ORDER,  # its window is 0
    "in-order": _IN_ORDER,
    "weight-fifo": Sampler(
        batch_may_start, oldest_start_first, start_too_old, nothing, a_batch_per_version, refills=True
    ),
    "windowed": Sampler(always, inside_the_window, start_too_old, unfinished_too_old, any_number),
    "ready-first": Sampler(batch_may_start, any_complete, nothing, nothing, a_batch_per_version),
    "capacity": Sampler(within_capacity, as_completed, nothing, nothing, any_number),
}

# What a class with NeMo-RL's protocol has.
METHODS = (
    "admit",
    "select",
    "evict",
    "should_abort_inflight",
    "is_on_policy",
    "required_buffer_capacity",
    "set_dispatch_index",
)


def refuse_lacking(kind: Any, name: str) -> None:
    if lacking := [method for method in METHODS if not hasattr(kind, method)]:
        raise BadInput(f"the sampler {name} has no {', '.join(lacking)}; it needs {', '.join(METHODS)}")
