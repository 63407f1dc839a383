"""A small asynchronous loop, tick by tick, that writes right ledgers, and wrong ones with a fault in one rule.

It shares no code with the controller. Each tick: dispatch, decode a few tokens, select, train one group, move weights.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kit.results.rules import Measured, settle
from kit.stream.judge import RULES
from kit.stream.judge.history import LoopLedger

Row = dict[str, Any]
GATED = ("strict", "in-order", "weight-fifo", "ready-first")
RULES_BY_NAME = {rule.__name__: rule for rule in RULES}
SAMPLERS = (*GATED, "windowed", "capacity")
AT_SYNC = ("keep", "recompute", "abort", "drain")


@dataclass
class Sample:
    length: int
    attempt: int = 0
    replica: int | None = None  # None: not sent yet
    done: int = 0
    oldest: int = 0
    complete: bool = False


@dataclass
class Group:
    id: int
    target: int
    start: int
    samples: list[Sample]
    ready: bool = False

    @property
    def tokens(self) -> int:
        return sum(one.done for one in self.samples)


@dataclass(kw_only=True)
class System:
    sampler: str = "in-order"
    at_sync: str = "keep"
    window: int = 1
    groups: int = 2  # per step
    group: int = 2
    min_groups: int = 1
    updates: int = 1  # per step
    steps: int = 4
    replicas: int = 2
    seed: int = 0
    prompts: int = 10_000
    slots: int = 0
    more_places: int = 0
    fails: tuple[int, ...] = ()  # groups with a sample that fails
    on_failed: str = "replace"
    flat: tuple[int, ...] = ()  # groups that are filtered out
    dies: tuple[int, int] | None = None  # tick, replica
    breaks: int | None = None  # a step whose second microbatch fails
    stop_on_error: bool = False
    slow: tuple[int, ...] = ()  # groups with one long sample
    pace: int = 1  # ticks to train a group
    fault: str = ""
    resume: tuple[int, int, int, list[int], int] | None = (
        None  # version, step, updates, groups to do first, first new group
    )
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed} {self.sampler} {self.at_sync} {self.fault}")
        self.window = 0 if self.sampler == "strict" else self.window
        self.places = self.groups * (self.window + 1) + self.more_places
        self.slots = self.slots or self.places
        self.size = self.groups // self.updates
        self.tick = 0
        self.version, self.step, self.done_updates, todo, after = self.resume or (0, 0, 0, [], 0)
        self.first, self.cut = self.version, False
        self.todo = [*todo, *range(after, self.prompts)]
        self.index, self.position, self.accepted = self.version - 1, 0, self.version * self.groups
        if self.fault == "accepted-from-zero":
            self.index, self.accepted = -1, 0
        self.buffer: dict[int, Group] = {}
        self.owed: list[tuple[int, int | None]] = []
        self.taken: list[Group] = []  # groups of the open step
        self.fed = self.update = 0
        self.begun = False
        self.shrunk: Counter[int] = Counter()  # per version
        self.held = True
        self.syncing: int | None = None
        self.serves = dict.fromkeys(range(self.replicas), -1)
        self.dead: set[int] = set()
        self.totals: Counter[str] = Counter()

    @property
    def need(self) -> int:
        return self.groups - self.shrunk[self.version]

    def log(self, event: str, **ids: Any) -> None:
        self.rows.append({"event": event, "time": 1.7e9 + self.tick / 100, **ids})
        if "sample" not in ids:
            self.totals[event] += 1

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def run(self) -> list[Row]:
        self.log(
            "capacity",
            places=self.places,
            slots=self.slots,
            window=self.window,
            groups_per_step=self.groups,
            group=self.group,
            sampler=self.sampler,
            min_groups=self.min_groups,
            at_sync=self.at_sync,
            train_global_batch_size=self.groups * self.group // self.updates,
        )
        if self.resume:
            self.log("resumed", step=self.step, version=self.version)
        for replica in self.serves:
            self.log("joined", replica=replica)
        self.log("hold", version=self.version)
        self.log("acquire", kind="generation")
        self.log("granted", kind="generation")
        while not self.cut and self.tick < 5000:
            self.tick += 1
            if self.dies and self.tick == self.dies[0]:
                self.die(self.dies[1])
            if self.fault != "last-version-unpublished" or self.version - self.first < self.steps:
                self.sync()
            unpublished = self.fault == "last-version-unpublished" and self.version - self.first >= self.steps
            if unpublished or (self.version - self.first >= self.steps and not self.held):
                self.close("done")
                break
            if not self.held:
                self.dispatch()
            if self.syncing is None:
                self.decode()
            self.evict()
            self.choose()
            self.train()
            if not self.todo and not self.buffer and not self.taken and not self.held and not self.owed:
                self.log("exhausted")
                if self.fault == "waits-at-the-end":
                    break
                self.close("exhausted")
                break
            if self.fault == "rollout-dies" and self.dies and self.tick > self.dies[0] + 100:
                self.close("error")
                break
            if not self.todo and not self.buffer and not self.held and not self.owed and self.fed == len(self.taken):
                self.log("exhausted")
                self.close(*("done",) if self.fault == "partial-step" else ("error", "the data ended in a step"))
                break
        return self.rows

    def close(self, why: str, error: str = "") -> None:
        if why == "error" and self.taken:
            self.log("abort", step=self.step)
            for group in self.taken:
                self.log("aborted", group=group.id, why="its step failed", version=self.version)
        for group in list(self.buffer.values()):
            self.end(group, "aborted", "the run is over")
        for _, heir in self.owed:
            if heir is not None:
                self.log("failed", group=heir, why="no other group", version=self.version)
        self.log("release", kind="generation")
        wasted = self.totals["generated"] - self.totals["trained tokens"]
        if self.fault == "uncounted-partial":
            wasted -= 1
        self.log(
            "ended",
            why=why,
            generated=self.totals["generated"],
            trained=self.totals["trained tokens"],
            wasted=wasted,
            **({"error": error} if error else {}),
        )

    # -- generation ---------------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        self.send()
        while self.todo and (self.fault == "unbounded-buffer" or len(self.buffer) < self.places):
            if len(self.buffer) > self.places + 3:
                return
            if self.fault != "unbounded-buffer" and sum(not one.ready for one in self.buffer.values()) >= self.slots:
                return
            if not self.owed and not self.gate():
                return
            self.reserve(self.todo.pop(0))

    def gate(self) -> bool:
        beyond = self.window + (self.fault == "off-by-one-window")
        if self.sampler == "windowed":
            return True
        if self.sampler == "capacity":
            running = sum(not one.ready for one in self.buffer.values())
            return self.accepted + running < (beyond + self.version + 1) * self.groups
        return self.position > 0 or self.index < self.version + beyond

    def reserve(self, number: int) -> None:
        heir = None
        if self.owed:
            target, heir = self.owed.pop(0)
        else:
            self.index += self.position == 0
            self.position = (self.position + 1) % self.groups
            target = self.index
        chance = random.Random(f"{self.seed} {number}")
        lengths = [
            chance.randint(8, 14) + (60 if number in self.slow and not sample else 0) for sample in range(self.group)
        ]
        group = self.buffer[number] = Group(number, target, self.version, [Sample(length) for length in lengths])
        targeted = {"target": target} if self.sampler in ("strict", "in-order") else {}
        reserved = {"group": number, "version": self.version, **targeted}
        if self.fault != "gate-checked-early" or number:
            self.log("place", group=number)
        self.log("reserved", **reserved)
        if heir is not None:
            self.log("replaced", group=heir, by=number)
        self.log("slot", group=number)
        self.send()
        if number == 3 and self.fault == "discard-and-requeue":
            self.discard(group)

    def discard(self, group: Group) -> None:
        self.end(group, "aborted", "too slow")
        self.owed.append((group.target, None))
        self.todo.insert(0, group.id)
        self.fault = "discard-and-requeue, done"

    def send(self) -> None:
        there = [
            replica for replica, version in self.serves.items() if version == self.version and replica not in self.dead
        ]
        if self.fault == "resumes-too-early":
            there = [replica for replica in self.serves if replica not in self.dead]
        for group in self.buffer.values():
            for number, one in enumerate(group.samples):
                if there and one.replica is None and not one.complete:
                    one.replica = self.random.choice(there)
                    self.log("sent", group=group.id, sample=number, replica=one.replica, attempt=one.attempt)

    def decode(self) -> None:
        for group in list(self.buffer.values()):
            for number, one in enumerate(group.samples):
                there = group.id in self.buffer and one.replica is not None and one.replica not in self.dead
                if there and not one.complete and self.random.random() < 0.6:
                    self.decode_one(group, number, one)

    def decode_one(self, group: Group, number: int, one: Sample) -> None:
        if group.id in self.fails and number == self.group - 1 and one.done:
            self.fail(group, number)
            return
        count, version = min(self.random.randint(2, 5), one.length - one.done), self.serves[one.replica or 0]
        if self.fault == "one-stamp-per-group":
            version = group.start
        if self.fault == "stamp-after-reply" and self.version:
            version = self.version + (self.serves[one.replica or 0] == self.version)
        ids = {"group": group.id, "sample": number, "replica": one.replica}
        one.oldest = version if not one.done else min(one.oldest, version)
        first = one.done + (self.fault == "gap" and one.done > 0)
        self.log("tokens", **ids, version=version, first=first, count=count)
        self.totals["generated"] += count
        one.done += count
        if one.done == one.length:
            one.complete = True
            digest = group.id if self.fault == "rng-reset" else f"{group.id}.{number}"
            about = {
                "version": one.oldest,
                "newest": version,
                "length": one.length,
                "reward": repr(number / 3),
                "digest": str(digest),
            }
            self.log("completed", **ids, **about)
            missing = sum(not sample.complete for sample in group.samples)
            if missing == (self.fault == "partial-group" and group.id == 3) and not group.ready:
                self.complete(group)

    def complete(self, group: Group) -> None:
        group.ready = True
        self.accepted += 1
        notes: list[tuple[str, dict[str, Any]]] = [
            ("slot_back", {"group": group.id}),
            ("ready", {"group": group.id, "version": min(one.oldest for one in group.samples), "newest": self.version}),
        ]
        if self.random.random() < 0.5:
            notes.reverse()
        for name, ids in notes:
            if name != "slot_back" or self.fault != "slot-leak" or group.id != 2:
                self.log(name, **ids)
        if self.fault == "slot-twice" and group.id == 2:
            self.log("slot_back", group=group.id)
        if group.id in self.flat:
            self.log("filtered", group=group.id)
            self.accepted -= 1
            if self.fault == "rejected-row-counts":
                self.shrunk[self.version] += 1
            else:
                self.owed.append((group.target, None))
            self.end(group, "dropped", "no variance")
        if group.id == 3 and self.fault in ("lost-group", "drops-oldest"):
            self.log(
                "place_back", group=self.buffer.pop(min(self.buffer) if self.fault == "drops-oldest" else group.id).id
            )

    def fail(self, group: Group, number: int) -> None:
        self.log("failed", group=group.id, sample=number, why="out of memory")
        group.samples[number].replica = None
        self.cancel(group)
        if self.on_failed == "replace":
            self.leave(group)
            self.owed.append((group.target, group.id))
        else:
            self.shrunk[group.target] += 1
            self.end(group, "failed", "sample failed")

    def die(self, replica: int) -> None:
        self.dead.add(replica)
        if self.fault != "rollout-dies":
            self.log("died", replica=replica)
            for group in self.buffer.values():
                for one in group.samples:
                    if one.replica == replica and not one.complete:
                        one.replica, one.attempt, one.done = None, one.attempt + 1, 0

    def leave(self, group: Group) -> None:
        del self.buffer[group.id]
        self.log("place_back", group=group.id)
        if not group.ready:
            self.log("slot_back", group=group.id)

    def cancel(self, group: Group) -> None:
        for number, one in enumerate(group.samples):
            if one.replica is not None and one.replica not in self.dead and not one.complete:
                self.log("cancelled", group=group.id, sample=number)
                one.replica = None

    def end(self, group: Group, how: str, why: str) -> None:
        if group.id in self.buffer:
            self.cancel(group)
            self.leave(group)
        self.log(how, group=group.id, why=why, version=self.version)

    # -- the trainer --------------------------------------------------------------------------------------------------------

    def evict(self) -> None:
        if self.held:
            return
        for group in list(self.buffer.values()):
            late = group.target < self.version if self.sampler in ("strict", "in-order") else False
            old = self.sampler in ("windowed", "weight-fifo") and group.start < max(0, self.version - self.window)
            if group.ready and (late or old):
                self.end(group, "evicted", "too old")
            elif old and self.sampler == "windowed":
                self.end(group, "aborted", "too old")

    def choose(self) -> None:
        rest = self.need - len(self.taken)
        if self.held or not rest:
            return
        fit = [one for one in self.buffer.values() if one.ready and self.fits(one)]
        if self.fault == "freshest-first-starves":
            fit.sort(key=lambda one: -one.id)
        least = rest if self.fault == "waits-for-all" else min(self.min_groups, rest)
        if len(fit) < least:
            return
        for group in fit[:rest]:
            self.log("selected", group=group.id, step=self.step, version=self.version)
            del self.buffer[group.id]
            self.log("place_back", group=group.id)
            self.taken.append(group)

    def fits(self, group: Group) -> bool:
        if self.sampler in ("strict", "in-order"):
            return group.target == self.version
        if self.sampler == "weight-fifo":
            inside = [one.start for one in self.buffer.values() if one.start >= self.version - self.window]
            return bool(inside) and group.start == min(inside)
        return self.sampler != "windowed" or group.start >= self.version - self.window

    def train(self) -> None:
        """Train one group per tick. An update ends with its last group, a step with its last update."""
        if self.held or self.fed == len(self.taken) or self.tick % self.pace:
            return
        group, ids = self.taken[self.fed], {"step": self.step, "update": self.update}
        if not self.begun:
            self.log("begin", **ids)
            self.begun = True
        self.log("microbatch", **ids, groups=str(group.id))
        self.fed += 1
        if self.fault == "cleared-before-finish":
            self.log("trained", group=group.id, **ids, version=self.version)
            self.log("cleared", group=group.id, step=self.step)
        if self.step == self.breaks and self.fed == min(2, self.groups):
            self.give_up(ids)
            return
        last = self.fed == self.need
        if last or self.fed % self.size == 0 or self.fault == "finish-per-chunk":
            self.finish(ids, self.taken[self.fed - 1 - (self.fed - 1) % self.size : self.fed], last)

    def finish(self, ids: dict[str, int], groups: list[Group], last: bool) -> None:
        if self.fault == "finish-per-chunk":
            groups = groups[-1:]
        self.log("finish", **ids)
        self.begun = False
        self.update += 1
        self.done_updates += 1
        for group in groups if self.fault != "cleared-before-finish" else ():
            self.log("trained", group=group.id, **ids, version=self.version)
        self.totals["trained tokens"] += sum(one.done for group in groups for one in group.samples if one.complete)
        if self.fault == "clear-fails-after-finish" and self.version == 1:
            self.log("error", of="clear", step=self.step, why="lost connection")
            for group in groups:
                self.log("aborted", group=group.id, why="not cleared", version=self.version)
            self.taken.clear()
            self.close("error")
            self.cut = True
            return
        during = self.version
        if last:
            self.bump()
        elif self.fault == "bump-per-update":
            self.version += 1
            self.log("bumped", version=self.version, updates=self.done_updates, step=self.step)
        lags = [during - min(one.oldest for one in group.samples) for group in groups]
        self.log(
            "metrics",
            **ids,
            version=self.version - (self.fault == "caught-up-too-late"),
            groups=len(groups),
            tokens=sum(group.tokens for group in groups),
            lag_max=max(lags),
            lag_mean=repr(sum(lags) / len(lags)),
            total_generated=self.totals["generated"],
            total_reserved=self.totals["reserved"],
            **({"queue": sum(one.ready for one in self.buffer.values())} if self.breaks is None else {}),
        )
        for group in groups if self.fault != "cleared-before-finish" else ():
            self.log("cleared", group=group.id, step=ids["step"])

    def bump(self) -> None:
        self.version += 1
        self.log("bumped", version=self.version, updates=self.done_updates, step=self.step)
        if self.fault == "double-bump":
            self.version += 1
            self.log("bumped", version=self.version, updates=self.done_updates, step=self.step)
        self.next_step()
        self.held = self.fault != "resumes-too-early"
        if not self.held:
            self.log("hold", version=self.version)
            self.log("resume", version=self.version)
            self.dispatch()
            self.held = True
        if self.fault != "no-hold":
            self.log("hold", version=self.version)

    def next_step(self) -> None:
        self.step += 1
        self.taken, self.fed, self.update, self.begun = [], 0, 0, False

    def give_up(self, ids: dict[str, int]) -> None:
        self.log("error", of="microbatch", **ids, why="NaN")
        if self.fault != "no-abort":
            self.log("abort", step=self.step)
        if self.fault == "bump-on-abort":
            self.version += 1
            self.log("bumped", version=self.version, updates=self.done_updates, step=self.step)
        back, stop = self.taken[self.update * self.size :], self.stop_on_error or self.update > 0
        for group in back:
            if self.fault == "cleared-before-finish":
                continue
            if len(self.buffer) < self.places and not stop:
                self.log("place", group=group.id)
                self.buffer[group.id] = group
            else:
                self.log("aborted", group=group.id, why="its step failed", version=self.version)
                self.owed.append((group.target, None))
        self.buffer = dict(sorted(self.buffer.items()))
        self.next_step()
        if stop or self.fault in ("no-abort", "cleared-before-finish"):
            self.owed.clear()
            self.close("error", "microbatch failed: NaN")
            self.cut = True
        self.choose()

    def sync(self) -> None:
        """Take two ticks: the sync begins when the samples in flight allow it, and dispatch resumes when it has ended."""
        if not self.held:
            return
        running = [
            (group.id, number, one) for group in self.buffer.values() for number, one in enumerate(group.samples)
        ]
        running = [one for one in running if one[2].replica is not None and not one[2].complete]
        if self.syncing is not None:
            for replica in self.serves:
                if replica not in self.dead:
                    self.serves[replica] = self.version
                    self.log("published", version=self.version, replica=replica)
            self.log("synced", version=self.version)
            self.syncing = None
            if self.fault == "gate-never-opens" and self.version:
                self.cut = True  # the loop hangs
                return
            self.held = False
            self.log("resume", version=self.version)
            return
        if self.at_sync == "abort" and self.fault != "aborts-nothing":
            for number, sample, one in running:
                self.log("cancelled", group=number, sample=sample)
                one.replica, one.attempt, one.done = None, one.attempt + 1, 0
        if self.at_sync != "drain" or not running or self.fault == "does-not-drain":
            self.syncing = self.version
            self.log("sync_begin", version=self.version)


def finding(name: str, ledger: LoopLedger) -> Measured:
    """What a rule of the judge finds in a ledger."""
    return settle(RULES_BY_NAME[name](ledger))
