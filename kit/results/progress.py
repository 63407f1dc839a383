"""What a loop may report of its progress, counted from the rows of its groups: how many are complete, and how many a step needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from kit.results.records import Id, Row

# `failed` with a sample ends only a request: its group ends later, or never.
NOT_TRAINED = ("evicted", "aborted", "dropped", "failed", "replaced", "filtered")
Update = tuple[Id | None, int]  # of a step


def only_training(_: Id) -> Iterable[str]:
    return ("training",)


class GroupTally:
    """The groups of one loop, row by row. A group is there from `ready` until it is in the weights or ends; a step needs `size` groups,
    or fewer if groups were lost. `streams` names the streams that a group counts in."""

    def __init__(self, size: int, streams: Callable[[Id], Iterable[str]] = only_training) -> None:
        self.size = size
        self.streams = streams
        self.there: set[Id] = set()
        self.trained: defaultdict[Update, set[Id]] = defaultdict(set)
        self.finished: set[Update] = set()
        self.lost: set[Id] = set()
        self.complete: Counter[str] = Counter()  # how many groups are there, by stream
        # The most of them in this step: a report may be on its way when groups end.
        self.most: Counter[str] = Counter()

    def take(self, row: Row) -> None:
        update = row.get("step"), row.number("update", 0)
        if row.event == "ready":
            self.arrives(row["group"])
        elif row.event == "trained":
            self.trained[update].add(row["group"])
        elif row.event == "finish":
            self.finished.add(update)
        elif row.event == "error" and row.get("of") == "finish":
            self.finished.discard(update)
        elif row.event == "error" and row.get("of") == "generate":
            # Its group ends once its other requests are cancelled.
            self.lost.add(row.get("group", row.at))
        elif row.event == "abort":  # the groups of a step's unfinished updates may train again
            for other in [key for key in self.trained if key[0] == update[0] and key not in self.finished]:
                del self.trained[other]
        elif row.event == "bumped":
            for group in set[Id]().union(*self.trained.values()):
                self.leaves(group)
            self.trained.clear()
            self.most = self.complete.copy()
        elif row.event in NOT_TRAINED:
            self.lost.add(row.get("group", row.at))
            if "sample" not in row.ids and "group" in row.ids:
                self.leaves(row["group"])

    def arrives(self, group: Id) -> None:
        if group not in self.there:
            self.there.add(group)
            for stream in self.streams(group):
                self.complete[stream] += 1
                self.most[stream] = max(self.most[stream], self.complete[stream])

    def leaves(self, group: Id) -> None:
        if group in self.there:
            self.there.discard(group)
            self.complete.subtract(self.streams(group))

    def wrong(self, report: Row, stream: str = "training") -> Iterator[str]:
        target, completed, most = report.number("target"), report.number("completed"), self.most[stream]
        if not self.size - len(self.lost) <= target <= self.size:
            needs = f"it needs {self.size}" + (f" ({len(self.lost)} were lost so far)" if self.lost else "")
            yield f"{report} reports that a step needs {target} groups; {needs}"
        elif not 0 <= completed <= most:
            yield f"{report} reports {completed} complete groups; there are {most}"
