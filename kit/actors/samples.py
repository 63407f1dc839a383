"""Samples on their way from a replica to its trainer, and their advantages.

A replica sends each complete sample over its own connection, without the controller. The trainer's rank 0 stores it until its group is
cleared. A sample that is sent again (its replica died, its group was aborted) replaces the earlier one. Limits: all stored samples are in
the host memory of that rank; a message is JSON, a few kB per sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kit.errors import KitError
from kit.sync.link import Link, Listener, PeerGone, call

TRAINER = "the trainer"


class Key(NamedTuple):
    group: int
    sample: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One sample: prompt and answer, and for each token of the answer its log-probability and the weight version that generated it."""

    group: int
    sample: int
    attempt: int
    replica: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    minimum: int  # tokens of the answer before which it could not end
    reward: float

    @property
    def key(self) -> Key:
        return Key(self.group, self.sample)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    @property
    def digest(self) -> str:
        """SHA-256 of all fields above, computed where the sample is generated and wherever it arrives."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        fields = ((field.name, message[field.name]) for field in dataclasses.fields(cls))
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields}
        return cls(**values)


class Outbox:
    def __init__(self, address: dict[str, Any], replica: str, timeout_s: float) -> None:
        self._link = call(address, replica, peer=TRAINER, timeout_s=timeout_s)

    def send(self, row: SampleRow) -> None:
        self._link.send({"kind": "row", **dataclasses.asdict(row)})

    def close(self) -> None:
        self._link.close()


class Inbox:
    """The trainer's end, on its rank 0. One thread per replica reads until that replica leaves, so none waits for a training step."""

    def __init__(self, listener: Listener, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._listener = listener
        self._changed = threading.Condition()
        self._rows: dict[Key, SampleRow] = {}
        self._links: dict[str, Link] = {}
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None

    def accept(self, replicas: Sequence[str]) -> None:
        for name, link in self._listener.accept([*replicas], self.timeout_s).items():
            self._links[name] = link
            thread = threading.Thread(target=self._read, args=(link,), daemon=True, name=f"rows of {name}")
            self._threads.append(thread)
            thread.start()

    def put(self, row: SampleRow) -> None:
        """Store a sample, in place of an earlier one."""
        with self._changed:
            self._rows[row.key] = row
            self._changed.notify_all()

    def take(self, keys: Iterable[Key]) -> list[SampleRow]:
        """Return these samples in this order. An error names a sample that does not arrive."""
        wanted, end = [*keys], time.monotonic() + self.timeout_s
        with self._changed:
            while missing := [key for key in wanted if key not in self._rows]:
                if self._error is not None:
                    raise KitError(f"a sample could not be read: {self._error}") from self._error
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    first = missing[0]
                    raise KitError(
                        f"sample {first.sample} of group {first.group} did not arrive within {self.timeout_s:g} s "
                        f"({len(missing)} of {len(wanted)} missing)"
                    )
            return [self._rows[key] for key in wanted]

    def clear(self, groups: Iterable[int]) -> int:
        """Drop all samples of these groups; returns how many were dropped."""
        gone = set(groups)
        with self._changed:
            before = len(self._rows)
            self._rows = {key: row for key, row in self._rows.items() if key.group not in gone}
            return before - len(self._rows)

    @property
    def stored(self) -> list[Key]:
        with self._changed:
            return sorted(self._rows)

    def close(self) -> None:
        """Stop listening. Replicas close first; a reader ends with its replica's connection."""
        self._listener.close()
        end = time.monotonic() + self.timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for link in self._links.values():
            link.close()

    def _read(self, link: Link) -> None:
        link.wait_at_most(threading.TIMEOUT_MAX)  # until the next sample, however long a replica has none
        with contextlib.suppress(PeerGone):
            try:
                while True:
                    message, _ = link.expect("row")
                    self.put(SampleRow.from_message(message))
            except PeerGone:
                raise
            except Exception as error:  # noqa: BLE001 - raised where the sample is taken
                with self._changed:
                    self._error = error
                    self._changed.notify_all()


TINY = 1e-6


def advantages(rewards: Mapping[Key, float]) -> dict[Key, float]:
    """GRPO's: (reward - mean of the group) / deviation of the group."""
    groups: defaultdict[int, dict[Key, float]] = defaultdict(dict)
    for key, reward in rewards.items():
        groups[key.group][key] = reward
    table: dict[Key, float] = {}
    for group in groups.values():
        mean = statistics.fmean(group.values())
        deviation = statistics.pstdev(group.values())
        table |= {key: (reward - mean) / (deviation + TINY) for key, reward in group.items()}
    return table
