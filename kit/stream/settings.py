"""What a controller is set to, and which settings cannot work together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from kit.stream.samplers import SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AtSync = Literal["keep", "recompute", "abort", "drain"]
OnFailed = Literal["stop", "replace", "shrink"]
OnDead = Literal["stop", "go-on"]
Advantage = Literal["grpo", "leave-one-out"]
Logprobs = Literal["recomputed", "recorded", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`sampler` is one of ours by name; another name (`module:Class`) is asked through the port "sampler".

    `places` are groups that may be in the buffer, unfinished ones included; `slots` groups that may be in flight. `train_global_batch_size`
    counts samples. `floor` is the smallest step that `on_failed="shrink"` may leave. `step_retries` steps may fail and be given up before
    the run ends; each is counted.
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
    on_failed: OnFailed = "stop"
    floor: int = 1
    on_dead_replica: OnDead = "stop"
    step_retries: int = 0
    filter: bool = False
    advantage: Advantage = "grpo"
    previous: Logprobs = "recomputed"
    reference: Logprobs = "off"
    correction: bool = True

    @property
    def minibatch(self) -> int:
        """Groups of one optimizer step."""
        return self.train_global_batch_size // self.group

    @property
    def logprobs(self) -> tuple[str, ...]:
        """The log-probabilities that the trainer recomputes before it trains a chunk."""
        flags = {"previous": self.previous, "reference": self.reference}
        return tuple(name for name, how in flags.items() if how == "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run goes on, after any step. `open` are groups that were given prompts and did not end: the data gives them again."""

    version: int
    updates: int
    steps: int
    next: int
    open: tuple[int, ...] = ()


def opening(settings: Settings, start: Resume | None = None) -> Iterator[tuple[str, dict[str, int | str]]]:
    """The rows with which a ledger begins, by who starts a controller: checks compare the controller with them."""
    found = {one.name: getattr(settings, one.name) for one in fields(Settings)}
    yield (
        "capacity",
        {
            "groups_per_step" if name == "groups" else name: value if isinstance(value, str) else int(value)
            for name, value in found.items()
        },
    )
    if start is not None:
        yield "resumed", {"step": start.steps, "version": start.version}


def read_settings(ids: Mapping[str, int | str]) -> Settings:
    """The settings of a row `capacity`. What it lacks is a default."""
    given: dict[str, Any] = {**ids, **({"groups": ids["groups_per_step"]} if "groups_per_step" in ids else {})}
    defaults = Settings()
    return Settings(
        **{
            one.name: type(getattr(defaults, one.name))(given[one.name])
            for one in fields(Settings)
            if one.name in given
        }
    )


AT_LEAST_ONE = (
    "groups",
    "min_groups",
    "group",
    "train_global_batch_size",
    "places",
    "slots",
    "steps",
    "replicas",
    "floor",
)


def refusals(settings: Settings) -> tuple[str, ...]:
    """One sentence for each thing that cannot work, before anything starts. Empty: they can."""
    low = tuple(
        f"{name}={getattr(settings, name)} must be at least 1" for name in AT_LEAST_ONE if getattr(settings, name) < 1
    )
    negative = ("window", "step_retries")
    low += tuple(
        f"{name}={getattr(settings, name)} must be at least 0" for name in negative if getattr(settings, name) < 0
    )
    return low or (*_counts(settings), *_staleness(settings))


def _counts(settings: Settings) -> list[str]:
    found = []
    samples, batch = settings.groups * settings.group, settings.train_global_batch_size
    if batch % settings.group:
        found.append(
            f"train_global_batch_size={batch} is not a multiple of group={settings.group}; a group is never cut"
        )
    elif samples % batch:
        found.append(
            f"a step has {settings.groups} x {settings.group} = {samples} samples, "
            f"which train_global_batch_size={batch} does not divide"
        )
    if settings.min_groups > settings.groups:
        found.append(f"min_groups={settings.min_groups} exceeds the {settings.groups} groups of a step")
    if settings.floor > settings.groups:
        found.append(f"floor={settings.floor} exceeds the {settings.groups} groups of a step")
    if settings.group == 1:
        found.append("group=1 gives every sample the advantage 0; use at least 2 samples a group")
    return found


def _staleness(settings: Settings) -> list[str]:
    found = []
    sampler = SAMPLERS.get(settings.sampler)
    if sampler is None and ":" not in settings.sampler:
        found.append(f"sampler={settings.sampler!r} is neither one of {', '.join(SAMPLERS)} nor a module:Class")
    needed = 0 if sampler is None else sampler.places(settings.groups, settings.window)
    if settings.places < needed:
        found.append(
            f"places={settings.places} is fewer than the {needed} that the sampler {settings.sampler} needs for "
            f"groups={settings.groups} and window={settings.window}"
        )
    elif settings.places < settings.min_groups:
        found.append(f"places={settings.places} cannot hold the min_groups={settings.min_groups} that start a step")
    if settings.sampler == "strict" and settings.window:
        found.append(f"the sampler strict has no window; use window=0 instead of window={settings.window}")
    if settings.window and not settings.correction and settings.previous != "recorded":
        found.append(
            f"window={settings.window} trains on stale samples with neither correction nor recorded log-probabilities; "
            "use correction=true or previous=recorded"
        )
    return found
