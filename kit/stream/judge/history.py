"""Reads a ledger back for the judge's rules. Everything is counted from rows; counts that the rows state are not used."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.errors import BadInput
from kit.results.ledger import Ledger, by_cores
from kit.results.records import Id, Row, value_in_words
from kit.results.rules import Missing

ENDS = ("cleared", "evicted", "aborted", "failed", "dropped", "replaced")
PERMITTED = ("place", "place_back", "slot", "slot_back")
LIFE = {*ENDS, *PERMITTED, "reserved", "sent", "tokens", "completed", "ready", "selected", "trained", "filtered"}
ANSWERS = ("completed", "cancelled", "failed", "error")  # to a request
STEP = ("selected", "begin", "microbatch", "finish", "trained", "bumped")


def ends_group(row: Row) -> bool:
    """Whether a row ends a group. `failed` with a sample ends only a request."""
    return row.event in ENDS and "group" in row.ids and "sample" not in row.ids


def ends_sync(row: Row) -> bool:
    return row.event == "synced" or (row.event == "error" and row.get("of") == "sync")


def open_sync(rows: Iterable[Row]) -> Row | None:
    """The `sync_begin` row of a sync that neither ended nor failed."""
    begun: Row | None = None
    for row in rows:
        if row.event == "sync_begin":
            begun = row
        elif ends_sync(row):
            begun = None
    return begun


@dataclass(slots=True)
class Sample:
    """What was generated for one sample. `spans` belong to the attempt that completed, or to the last one."""

    sent: list[Row] = field(default_factory=list)
    spans: list[Row] = field(default_factory=list)
    completed: list[Row] = field(default_factory=list)
    waiting: bool = False  # its last request has no answer
    fresh: bool = False  # no first token since a request was sent, started or ended

    def take(self, row: Row) -> None:
        asked = self.sent[-1].get("replica") if self.sent else None
        if row.event == "sent":
            self.sent.append(row)
            self.fresh = self.waiting = True
        elif asked is not None and row.get("replica", asked) != asked:
            pass  # from a replica that the sample has left: ignored
        elif row.event == "tokens":
            # Late tokens of an earlier request may come first. If another system writes no `sent`, any first token may be a new request's.
            begins_again = (self.fresh or not self.sent) and not row.number("first", 0)
            self.spans = [row] if begins_again else [*self.spans, row]
            self.fresh = self.fresh and not begins_again
        elif row.event == "started":
            self.fresh = True
        else:
            self.waiting = False
            self.fresh = self.fresh or row.event in ("cancelled", "failed")
            self.completed += [row] if row.event == "completed" else []

    @property
    def tokens(self) -> int:
        return sum(row.number("count") for row in self.spans)

    @property
    def is_empty(self) -> bool:
        """Whether the sample was completed without a token, so that it has no version."""
        return bool(self.completed) and not self.completed[-1].number("length", 1)

    @property
    def repeated(self) -> bool:
        return len(self.completed) > max(1, len(self.sent))


@dataclass(slots=True)
class StepRows:
    """The rows of a step up to its `abort`. If the id appears again after an abort, it is another step."""

    id: Id
    rows: list[Row] = field(default_factory=list)
    abort: Row | None = None
    errors: list[Row] = field(default_factory=list)
    finished: dict[int, list[Row]] = field(default_factory=dict)  # by update: finishes that the trainer executed
    earlier: list[Row] = field(
        default_factory=list
    )  # `trained` rows of updates that earlier tries of the step finished

    def of(self, *events: str) -> list[Row]:
        return [row for row in self.rows if row.event in events]

    @property
    def trained(self) -> list[Row]:
        """The `trained` rows of groups in the weights. An abort undoes an update without a finish."""
        rows = self.of("trained")
        return rows if self.abort is None else [row for row in rows if row.number("update", 0) in self.finished]

    @property
    def kept(self) -> list[Row]:
        """What earlier tries trained, if this try goes on after their updates."""
        first = next(iter(self.of("begin")), None)
        return self.earlier if first is not None and first.number("update", 0) else []

    @property
    def bumped(self) -> Row | None:
        return next(iter(self.of("bumped")), None)

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and has neither finish nor abort."""
        return self.abort is None and len({row.number("update", 0) for row in self.of("begin")}) > len(self.finished)


class LoopLedger(Ledger):
    """The ledger of one pipeline's loop, with its samples and steps."""

    def __init__(self, rows: Iterable[Row | Mapping[str, Any]]) -> None:
        rows = list(rows)
        if len(names := pipeline_names(rows)) > 1:
            raise BadInput(
                f"the rows belong to the pipelines {', '.join(sorted(names))}; judge each separately: pipelines(rows)"
            )
        self.pipeline = names[0] if names else ""
        super().__init__(rows, drop="pipeline")
        self.life: defaultdict[Id, list[Row]] = defaultdict(list)
        self.samples: defaultdict[Id, dict[Id, Sample]] = defaultdict(dict)
        for row in self.rows:
            if row.event in LIFE and "group" in row.ids:
                self.life[row["group"]].append(row)
                if "sample" in row.ids:
                    self.samples[row["group"]].setdefault(row["sample"], Sample())
            if (
                row.event in ("sent", "started", "tokens", *ANSWERS)
                and row.get("sample") in self.samples[row.get("group", "")]
            ):
                self.samples[row["group"]][row["sample"]].take(row)
        self.foreign = not by_cores(self.rows)
        self.ended = next(iter(self.by_event["ended"]), None)
        self.error = self.ended is not None and self.ended.get("why") == "error"
        self.resumed = next(iter(self.by_event["resumed"]), None)
        self.start = self.resumed.number("version") if self.resumed else 0
        self.steps = self._steps()
        self._step_of = {row.at: step for step in self.steps for row in step.rows}
        self._bumps = [row.at for row in self.by_event["bumped"]]

    def leaves_out(self, event: str, *ids: str) -> bool:
        """Whether another system never writes this event with these ids. In a run of the kit the ports' rows show what there must be."""
        return self.foreign and not any(row.ids.keys() >= {*ids} for row in self.by_event[event])

    @property
    def leaves_out_ends(self) -> bool:
        """Whether another system never writes that a group ended."""
        return self.foreign and not any(ends_group(row) for name in ENDS for row in self.by_event[name])

    # -- settings ---------------------------------------------------------------------------------------------------------

    def stated(self, name: str) -> Any:
        """What a sampler's author states of it, in its settings or its answers."""
        rows = (row for event in ("capacity", "chosen") for row in self.by_event[event] if name in row.ids)
        return next((row[name] for row in rows), None)

    def setting(self, name: str) -> Any:
        """A setting from the row `capacity`."""
        return next((row.get(name) for row in self.by_event["capacity"]), None)

    def limit(self, name: str) -> int | None:
        return None if self.setting(name) is None else self.by_event["capacity"][0].number(name)

    def size(self, name: str) -> int:
        if (size := self.limit(name)) is None:
            raise Missing(f"the ledger has no `capacity` event with `{name}`")
        return size

    # -- versions ---------------------------------------------------------------------------------------------------------

    def version_at(self, row: Row) -> int:
        """The current version when a row was written: the start version plus one for each `bumped` before the row."""
        return self.start + bisect_left(self._bumps, row.at)

    def version_logged(self, metrics: Row) -> int:
        """The version that a row of metrics may state: the current one, or that of a finished step, which may be announced afterwards."""
        now = self.version_at(metrics)
        if metrics.get("version") != now + 1:
            return now
        later = (row.event for row in self.rows[metrics.at + 1 :] if row.event in ("bumped", "finish", "begin"))
        return now + 1 if next(later, "") == "bumped" else now

    def version_during(self, trained: Row) -> int:
        """The version while a group trained: at the first row of its step except `selected`, which may be written while the step before
        trains. Also of a row `selected`: if its step never began, at the abort or at the end of the ledger. A row without a step may be
        written before or after the version rises. Without `bumped`: as the row states it."""
        if not self._bumps:
            return trained.number("version")
        if (step := self._step_of.get(trained.at)) is not None:
            began = next((row for row in step.rows if row.event != "selected"), step.abort)
            return self.start + len(self._bumps) if began is None else self.version_at(began)
        now = self.version_at(trained)
        return now - 1 if trained.get("version") == now - 1 else now

    def oldest(self, group: Id) -> dict[Id, int]:
        """For each sample with tokens, its oldest version according to its spans and to `completed`."""
        rows = {
            name: [*sample.spans, *sample.completed[-1:]]
            for name, sample in self.samples[group].items()
            if not sample.is_empty
        }
        return {name: min(row.number("version") for row in spans) for name, spans in rows.items() if spans}

    def is_empty(self, group: Id) -> bool:
        samples = self.samples[group].values()
        return bool(samples) and all(sample.is_empty for sample in samples)

    # -- groups and samples -----------------------------------------------------------------------------------------------

    def ends(self, group: Id) -> list[Row]:
        """Return the rows that end a group. `filtered` is an end if there is no other."""
        rows = self.life.get(group, [])
        return [row for row in rows if ends_group(row)] or [row for row in rows if row.event == "filtered"][:1]

    def is_end(self, row: Row) -> bool:
        """Whether a row ends its group, as `ends` has it."""
        return ends_group(row) or (row.event == "filtered" and any(end.at == row.at for end in self.ends(row["group"])))

    def waits_from(self, row: Row) -> bool:
        """Whether a complete group waits for its step from this row on. `place`: it is back after its step was aborted."""
        if row.event not in ("ready", "place"):
            return False
        return any(other.event == "ready" for other in self.life[row["group"]] if other.at <= row.at)

    def completed(self) -> Iterator[tuple[Id, Id, Sample]]:
        for group, samples in self.samples.items():
            yield from ((group, name, sample) for name, sample in samples.items() if sample.completed)

    def on_replica(self, gone: Row) -> Iterator[tuple[Id, Id, Sample]]:
        """Yield the samples that were on a replica when it died or left: last sent there, not complete, in a group that had not ended."""
        for group, samples in self.samples.items():
            for name, sample in samples.items():
                before = [row for row in sample.sent if row.at < gone.at]
                done = any(row.at < gone.at for row in (*sample.completed, *self.ends(group)))
                if before and before[-1].get("replica") == gone.get("replica") and not done:
                    yield group, name, sample

    def trained(self) -> list[Row]:
        rows = [row for row in self.by_event["trained"] if "step" not in row.ids]
        return sorted([*rows, *(row for step in self.steps for row in step.trained)], key=lambda row: row.at)

    def tokens(self, groups: Iterable[Id]) -> int:
        return sum(sample.tokens for group in groups for sample in self.samples[group].values() if sample.completed)

    # -- steps ------------------------------------------------------------------------------------------------------------

    def finishes(self) -> list[Row]:
        return sorted(
            (row for step in self.steps for rows in step.finished.values() for row in rows), key=lambda row: row.at
        )

    def _steps(self) -> list[StepRows]:
        """Return the steps by first row. Finishes are the `done` rows of `finish`; without any, the `finish` rows without an `error`."""
        latest: dict[Id, StepRows] = {}
        steps: list[StepRows] = []
        answered = any(row.get("of") == "finish" and "step" in row.ids for row in self.by_event["done"])
        for row in self.rows:
            if "step" not in row.ids:
                continue
            step, of, update = latest.get(row["step"]), row.get("of"), row.number("update", 0)
            if row.event in STEP and (step is None or step.abort is not None):
                earlier = [] if step is None else [*step.earlier, *step.trained]
                step = latest[row["step"]] = StepRows(row["step"], earlier=earlier)
                steps.append(step)
            if step is None:
                continue
            if row.event in STEP:
                step.rows.append(row)
            if row.event == "abort":
                step.abort = step.abort or row
            elif row.event == "error" and of in ("begin", "microbatch", "finish", "logprobs"):
                step.errors.append(row)
                if of == "finish" and not answered:
                    step.finished.pop(update, None)
            elif row.event == "finish" if not answered else row.event == "done" and of == "finish":
                step.finished.setdefault(update, []).append(row)
        return steps


def pipeline_names(rows: Iterable[Row | Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(row["pipeline"]) for row in rows if row.get("pipeline")))


def pipelines(rows: Sequence[Row | Mapping[str, Any]]) -> dict[str, LoopLedger]:
    """Return a ledger for each pipeline that the rows name, or a single unnamed one."""
    names = pipeline_names(rows)
    if len(names) < 2:
        return {name: LoopLedger(rows) for name in names or [""]}
    # What names no pipeline, such as common limits, holds for each.
    return {name: LoopLedger([row for row in rows if row.get("pipeline", name) in (name, "")]) for name in names}


# What each sampler of the kit may do, as the checks know it. Not read from `settings.SAMPLERS`, since that is judged.
BY_TARGET = ("strict", "in-order")  # drop groups of an earlier batch
BY_START = ("weight-fifo", "windowed")  # drop groups that started before the window
ABORTING = ("windowed",)  # also end unfinished groups
NO_AGE_LIMIT = ("ready-first", "capacity")  # drop no group: they limit admission only
GATED = (*BY_TARGET, "weight-fifo", *NO_AGE_LIMIT)  # start at most (window + version + 1) batches
REACTION = 0.005  # seconds that a controller may take to react


def by(rows: Iterable[Row], name: str) -> dict[Id, list[Row]]:
    groups: defaultdict[Id, list[Row]] = defaultdict(list)
    for row in rows:
        if name in row.ids:
            groups[row[name]].append(row)
    return groups


def listed(row: Row, name: str = "groups") -> Sequence[str]:
    """What a row lists, such as its groups, as texts: a group may have a name."""
    return [text for text in value_in_words(row[name]).split(",") if text]


def kept_steps(ledger: LoopLedger) -> list[StepRows]:
    """The step that a loop which ended by an error trained last: it need not clear it."""
    return [step for step in ledger.steps if step.of("trained")][-1:] if ledger.error else []


def kept_groups(ledger: LoopLedger) -> set[Id]:
    return {row["group"] for step in kept_steps(ledger) for row in step.of("trained")}


def limits_age(ledger: LoopLedger) -> bool:
    return ledger.setting("sampler") not in NO_AGE_LIMIT and ledger.stated("limits") != "start"
