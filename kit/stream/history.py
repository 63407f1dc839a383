"""A ledger, read again: its rows by event, group, sample and step. Everything here is counted from the rows; no count that they state is used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.results.verdict import Missing, Unjudged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Id = int | str

ENDS = ("cleared", "evicted", "aborted", "failed", "dropped", "replaced")
LIFE = frozenset(
    {
        *("reserved", "sent", "tokens", "completed", "ready", "selected", "trained", "filtered", *ENDS),
        *("place", "place_back", "slot", "slot_back"),
    }
)
STEPS = ("selected", "begin", "microbatch", "finish", "trained", "bumped")  # of a step; `abort` closes it


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `at` is its position in the ledger, `since` the seconds from the first row."""

    at: int
    event: str
    time: float
    since: float
    ids: Mapping[str, Id]

    def get(self, name: str, default: Any = None) -> Any:
        return self.ids.get(name, default)

    def __getitem__(self, name: str) -> Id:
        if name not in self.ids:
            raise Unjudged(f"{self} has no id `{name}`, which other `{self.event}` events have")
        return self.ids[name]

    def number(self, name: str) -> int:
        try:
            return int(self[name])
        except ValueError:
            raise Unjudged(f"{self} has {name}={self[name]!r}, which is not a whole number") from None

    def __str__(self) -> str:
        about = [
            f"{name} {self.ids[name]}" for name in ("group", "sample", "step", "update", "replica") if name in self.ids
        ]
        return f"`{self.event}`{' of ' if about else ''}{', '.join(about)} (row {self.at}, {self.since:.3f} s)"

    @property
    def ends_group(self) -> bool:
        """A sample that failed or was aborted does not end its group."""
        return self.event in ENDS and "sample" not in self.ids


@dataclass(slots=True)
class Sample:
    """What was generated for one sample. `spans` are those of the attempt that was completed, or of the last one."""

    sent: list[Row] = field(default_factory=list)
    spans: list[Row] = field(default_factory=list)
    completed: list[Row] = field(default_factory=list)
    answers: int = 0  # to requests: completed, cancelled, failed
    repeated: bool = False  # completed again although it was not sent again
    fresh: bool = False  # nothing has come since it was sent

    def take(self, row: Row) -> None:
        if row.event == "sent":
            self.sent.append(row)
            self.fresh = True
            return
        asked = self.sent[-1].get("replica") if self.sent else None
        if asked is not None and row.get("replica", asked) != asked:
            return  # of a replica that the sample has left: nobody uses it
        if row.event == "tokens":
            if self.fresh and self.spans and not row.number("first"):
                self.spans = []  # begun again
            self.spans.append(row)
            self.fresh = False
        else:
            self.answers += 1
            if row.event == "completed":
                self.repeated |= bool(self.completed) and len(self.completed) >= max(1, len(self.sent))
                self.completed.append(row)

    @property
    def tokens(self) -> int:
        return sum(row.number("count") for row in self.spans)

    @property
    def oldest(self) -> int | None:
        """The oldest version of any token, by spans and by what `completed` states."""
        known = [row.number("version") for row in (*self.spans, *self.completed[-1:])]
        return min(known, default=None)


@dataclass(slots=True)
class Step:
    """A step between its first row and its `bumped` or `abort`. An id that comes again after an abort is another step."""

    id: Id
    rows: list[Row] = field(default_factory=list)
    abort: Row | None = None
    errors: list[Row] = field(default_factory=list)
    finished: dict[Id, list[Row]] = field(default_factory=dict)  # by update: finishes that were carried out

    def of(self, *events: str) -> list[Row]:
        return [row for row in self.rows if row.event in events]

    @property
    def trained(self) -> list[Row]:
        """Groups that are in the weights: an abort takes back those of an update without a finish."""
        rows = self.of("trained")
        return rows if self.abort is None else [row for row in rows if row.get("update", 0) in self.finished]

    @property
    def bumped(self) -> Row | None:
        return next(iter(self.of("bumped")), None)


class Ledger:
    """The rows of one pipeline, in order. Each is a mapping with `event`, `time` and ids."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = _rows(rows)
        self.by_event: defaultdict[str, list[Row]] = defaultdict(list)
        self.life: defaultdict[Id, list[Row]] = defaultdict(list)
        self.samples: defaultdict[Id, dict[Id, Sample]] = defaultdict(dict)
        for row in self.rows:
            self.by_event[row.event].append(row)
            if row.event in LIFE and "group" in row.ids:
                self.life[row["group"]].append(row)
            if (
                row.event in ("sent", "tokens", "completed", "cancelled", "failed")
                and {"group", "sample"} <= row.ids.keys()
            ):
                self.samples[row["group"]].setdefault(row["sample"], Sample()).take(row)
        self.ended = next(iter(self.by_event["ended"]), None)
        self.resumed = next(iter(self.by_event["resumed"]), None)
        self.start = self.resumed.number("version") if self.resumed else 0
        self.steps = self._steps()
        self._step_of = {row.at: step for step in self.steps for row in step.rows}

    # -- what a check needs ---------------------------------------------------------------------------------------------

    def need(self, event: str, *ids: str) -> list[Row]:
        """The rows of an event. A ledger without the event or without an id is not judged; one that has the id now and then fails."""
        rows = self.by_event.get(event, [])
        if not rows:
            raise Missing(f"the ledger has no `{event}` event")
        for name in ids:
            having = [row for row in rows if name in row.ids]
            if not having:
                raise Missing(f"no `{event}` event of the ledger has the id `{name}`")
            if len(having) < len(rows):
                first = next(row for row in rows if name not in row.ids)
                raise Unjudged(f"{first} has no id `{name}`, which {len(having)} of {len(rows)} `{event}` events have")
        return rows

    def setting(self, name: str) -> Id | None:
        """Of the row `capacity`."""
        return next((row.get(name) for row in self.by_event.get("capacity", [])), None)

    def size(self, name: str) -> int:
        if self.setting(name) is None:
            raise Missing(f"the ledger has no `capacity` event with `{name}`")
        return self.by_event["capacity"][0].number(name)

    def version_at(self, row: Row) -> int:
        """The current version when a row was written: that of the start, plus one for each `bumped` before the row."""
        return self.start + sum(bump.at < row.at for bump in self.by_event["bumped"])

    def version_during(self, trained: Row) -> int:
        """The version while a group trained: at the first row of its step. Without steps or `bumped` it is what `trained` states."""
        step = self._step_of.get(trained.at)
        return (
            trained.number("version") if step is None or not self.by_event["bumped"] else self.version_at(step.rows[0])
        )

    def finishes(self) -> list[Row]:
        """The optimizer steps that were carried out, in order."""
        rows = [row for step in self.steps for found in step.finished.values() for row in found]
        return sorted(rows, key=lambda row: row.at)

    def trained(self) -> list[Row]:
        """Every time that a group went into the weights."""
        of_steps = [row for step in self.steps for row in step.trained]
        return sorted(
            [*of_steps, *(row for row in self.by_event["trained"] if "step" not in row.ids)], key=lambda row: row.at
        )

    # -- steps ----------------------------------------------------------------------------------------------------------

    def _steps(self) -> list[Step]:
        """Steps in the order of their first row. Where `done` rows answer `finish`, they are the finishes; an `error` row takes one back."""
        latest: dict[Id, Step] = {}
        steps: list[Step] = []
        answered = any(row.get("of") == "finish" for row in self.by_event["done"])
        for row in self.rows:
            if "step" not in row.ids:
                continue
            step = latest.get(row["step"])
            if row.event in STEPS or (row.event == "abort" and step is None):
                if step is None or step.abort is not None:
                    step = latest[row["step"]] = Step(row["step"])
                    steps.append(step)
                step.rows.append(row)
            if step is None:
                continue
            if row.event == "abort" and step.abort is None:
                step.abort = row
            elif row.event == "error" and row.get("of") in ("begin", "microbatch", "finish", "logprobs"):
                step.errors.append(row)
                if row.get("of") == "finish" and not answered:
                    step.finished.pop(row.get("update", 0), None)
            elif (row.event == "done" and row.get("of") == "finish") if answered else row.event == "finish":
                step.finished.setdefault(row.get("update", 0), []).append(row)
        return steps


def _rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    found: list[Row] = []
    pipelines: set[Id] = set()
    for at, row in enumerate(rows):
        ids = {name: value for name, value in row.items() if name not in ("event", "time", "pipeline")}
        try:
            when = float(row["time"])
            found.append(Row(at, str(row["event"]), when, when - (found[0].time if found else when), ids))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"row {at} of the ledger is {dict(row)!r}; each row needs an `event` and a `time` in seconds"
            ) from error
        if row.get("pipeline"):
            pipelines.add(row["pipeline"])
    if len(pipelines) > 1:
        raise BadInput(
            f"the rows belong to the pipelines {', '.join(sorted(map(str, pipelines)))}; judge each by itself: pipelines(rows)"
        )
    return found


def pipelines(rows: Sequence[Mapping[str, Any]]) -> dict[Id, Ledger]:
    """A ledger for each pipeline that the rows name; one without a name where none is named."""
    names = list(dict.fromkeys(row["pipeline"] for row in rows if row.get("pipeline")))
    if len(names) < 2:
        return {name: Ledger(rows) for name in names or [""]}
    return {name: Ledger([row for row in rows if row.get("pipeline") == name]) for name in names}
