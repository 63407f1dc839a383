"""A controller's settings, its samplers, and which settings cannot work together. Samplers are pure functions of a view.

A gate counts batches. Its index starts at -1 (a resumed run: version - 1); each batch that passes raises it by one and takes it
as its target. The gate blocks while index >= version + window, and batches that no step of the run will train. It is checked last for each
group, and decides at a batch's first group.

| sampler | may start | trains | drops complete groups | aborts unfinished ones | largest lag |
|---|---|---|---|---|---|
| strict | gate, window 0 | target == version | target < version | none | 0 |
| in-order | gate | target == version | target < version | none | window |
| weight-fifo | gate | the oldest start in the window; waits until it is complete | start < version - window | none | window |
| windowed | always | any start in the window | start < version - window | the same | window |
| ready-first | gate | any complete group | none | none | no limit |
| capacity | accepted + running < (window + version + 1) x groups | as they complete | none | none | no limit (bounds the sum) |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from kit.errors import BadInput
from kit.results.records import Id

NO_TARGET = -1


class Slot(Protocol):
    """A group in the buffer. `version`: the version at which it was reserved; `order`: its rank by completion, -1 while unfinished."""

    @property
    def id(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def order(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SamplerView:
    """What a sampler sees. `position`: groups of the current batch dispatched so far; `buffer`: groups in order of id.

    `accepted` counts complete groups since the start, `running` groups in flight; the run ends at version `last`.
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
        return max(0, self.version - self.window)

    def ready(self) -> Iterable[Slot]:
        return (slot for slot in self.buffer.values() if slot.order >= 0)


Groups = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampler:
    """`selects` returns every group that may be trained now, best first; the controller takes none, or between minimum and maximum.

    `places` is the fewest places that the buffer needs. With `stamps` a batch's index is its groups' target. With `refills` a group that
    is dropped as too old is replaced without asking the gate, which lets through only as many groups as the steps need.
    """

    admits: Callable[[SamplerView], bool]
    selects: Callable[[SamplerView], Groups]
    evicts: Callable[[SamplerView], Groups] = lambda _: ()
    aborts: Callable[[SamplerView], Groups] = lambda _: ()
    places: Callable[[int, int], int] = lambda groups, window: 0  # noqa: ARG005 - of groups a step and the window
    stamps: bool = False
    refills: bool = False


def batch_may_start(view: SamplerView) -> bool:
    return view.position > 0 or (view.index < view.version + view.window and view.index + 1 < view.last)


def within_capacity(view: SamplerView) -> bool:
    return view.accepted + view.running < (view.window + view.version + 1) * view.groups


def of_this_step(view: SamplerView) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.target == view.version)


def oldest_start_first(view: SamplerView) -> Groups:
    """Return complete groups by start version, the oldest in the window first, up to the first version with an unfinished group.

    Stopping after the oldest version would block: a batch dispatched across a sync may have fewer groups of it than a selection must take.
    """
    inside = sorted(
        (slot.version, slot.order < 0, slot.id) for slot in view.buffer.values() if slot.version >= view.oldest
    )
    awaited = next((start for start, unfinished, _ in inside if unfinished), view.version)
    return tuple(group for start, unfinished, group in inside if start <= awaited and not unfinished)


def inside_the_window(view: SamplerView) -> Groups:
    return tuple(slot.id for slot in view.ready() if view.oldest <= slot.version <= view.version)


def any_complete(view: SamplerView) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.version <= view.version)


def as_completed(view: SamplerView) -> Groups:
    return tuple(slot.id for slot in sorted(view.ready(), key=lambda slot: slot.order))


def target_passed(view: SamplerView) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.target < view.version)


def start_too_old(view: SamplerView) -> Groups:
    return tuple(slot.id for slot in view.ready() if slot.version < view.oldest)


def unfinished_too_old(view: SamplerView) -> Groups:
    return tuple(slot.id for slot in view.buffer.values() if slot.order < 0 and slot.version < view.oldest)


def a_batch_per_version(groups: int, window: int) -> int:
    return groups * (window + 1)


_IN_ORDER = Sampler(batch_may_start, of_this_step, target_passed, places=a_batch_per_version, stamps=True)
SAMPLERS = {
    "strict": _IN_ORDER,  # its window is 0
    "in-order": _IN_ORDER,
    "weight-fifo": Sampler(
        batch_may_start, oldest_start_first, start_too_old, places=a_batch_per_version, refills=True
    ),
    "windowed": Sampler(lambda _: True, inside_the_window, start_too_old, unfinished_too_old),
    "ready-first": Sampler(batch_may_start, any_complete, places=a_batch_per_version),
    "capacity": Sampler(within_capacity, as_completed),
}

# The methods of NeMo-RL's sampler protocol.
METHODS = (
    "admit", "select", "evict", "should_abort_inflight", "is_on_policy", "required_buffer_capacity", "set_dispatch_index",
)  # fmt: skip


def refuse_lacking(kind: Any, name: str) -> None:
    if lacking := [method for method in METHODS if not hasattr(kind, method)]:
        raise BadInput(f"the sampler {name} lacks {', '.join(lacking)}; it needs {', '.join(METHODS)}")


AtSync = Literal["keep", "recompute", "abort", "drain"]
Logprobs = Literal["recomputed", "recorded", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """`sampler` is the name of a built-in sampler, or `module:Class`, which is called through the port "sampler".

    `places` is the most groups in the buffer, unfinished ones included; `slots` the most groups in flight. `train_global_batch_size`
    counts samples. `floor` is the smallest step that `on_failed="shrink"` may leave. Up to `step_retries` failed steps are retried;
    each is counted.
    """

    groups: int = 8
    min_groups: int = 1
    group: int = 4
    train_global_batch_size: int = 32
    window: int = 1
    sampler: str = "in-order"
    places: int = 16
    slots: int = 16
    steps: int = 5
    replicas: int = 2
    at_sync: AtSync = "keep"
    on_failed: Literal["stop", "replace", "shrink"] = "stop"
    floor: int = 1
    on_dead_replica: Literal["stop", "go-on"] = "stop"
    step_retries: int = 0
    filter: bool = False
    previous: Logprobs = "recomputed"
    reference: Logprobs = "off"
    correction: bool = True

    @property
    def minibatch(self) -> int:
        return self.train_global_batch_size // self.group

    @property
    def logprobs(self) -> tuple[str, ...]:
        """The log-probabilities that the trainer recomputes before it trains a chunk."""
        flags = {"previous": self.previous, "reference": self.reference}
        return tuple(name for name, how in flags.items() if how == "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run continues, after any step. `open`: groups that got a prompt and did not end; the data gives them again."""

    version: int
    updates: int
    steps: int
    next: int
    open: tuple[int, ...] = ()


def opening(settings: StreamSettings, start: Resume | None = None) -> Iterator[tuple[str, dict[str, Id]]]:
    values = {name: value if isinstance(value, str) else int(value) for name, value in asdict(settings).items()}
    yield "capacity", {"groups_per_step": values.pop("groups"), **values}
    if start is not None:
        yield "resumed", {"step": start.steps, "version": start.version}


def read_settings(ids: Mapping[str, Id]) -> StreamSettings:
    """Return the settings in a row `capacity`, with defaults for those it lacks."""
    settings: dict[str, Any] = {"groups" if name == "groups_per_step" else name: value for name, value in ids.items()}
    kinds = {name: type(value) for name, value in asdict(StreamSettings()).items()}
    return StreamSettings(**{name: kind(settings[name]) for name, kind in kinds.items() if name in settings})


COUNTS = ("groups", "min_groups", "group", "train_global_batch_size", "places", "slots", "steps", "replicas", "floor")
LEAST = {**dict.fromkeys(COUNTS, 1), "window": 0, "step_retries": 0}


def refusals(settings: StreamSettings) -> tuple[str, ...]:
    """Return one sentence for each setting or combination that cannot work."""
    low = (
        f"{name}={getattr(settings, name)} must be at least {least}"
        for name, least in LEAST.items()
        if getattr(settings, name) < least
    )
    return tuple(low) or tuple(_misfits(settings))


def _misfits(settings: StreamSettings) -> Iterator[str]:
    groups, samples, batch = settings.groups, settings.groups * settings.group, settings.train_global_batch_size
    if batch % settings.group:
        yield f"train_global_batch_size={batch} is not a multiple of group={settings.group}; a group is never split"
    elif samples % batch:
        yield (
            f"train_global_batch_size={batch} does not divide the {groups} x {settings.group} = {samples} samples "
            "of a step"
        )
    for name in ("min_groups", "floor"):
        if getattr(settings, name) > groups:
            yield f"{name}={getattr(settings, name)} exceeds the {groups} groups of a step"
    if settings.group == 1:
        yield "group=1 gives every sample the advantage 0; use at least 2 samples per group"
    sampler = SAMPLERS.get(settings.sampler)
    if sampler is None and ":" not in settings.sampler:
        yield f"sampler={settings.sampler!r} is neither one of {', '.join(SAMPLERS)} nor a module:Class"
    needed = sampler.places(groups, settings.window) if sampler else 0
    if settings.places < needed:
        yield (
            f"places={settings.places} is too few: the sampler {settings.sampler} needs {needed} for "
            f"groups={groups} and window={settings.window}"
        )
    elif settings.places < settings.min_groups:
        yield f"places={settings.places} is less than min_groups={settings.min_groups}, so no step can start"
    if settings.sampler == "strict" and settings.window:
        yield f"the sampler strict allows no window; use window=0 instead of window={settings.window}"
    if settings.window and not settings.correction and settings.previous != "recorded":
        yield (
            f"window={settings.window} trains on stale samples with neither correction nor recorded log-probabilities; "
            "use correction=true or previous=recorded"
        )
