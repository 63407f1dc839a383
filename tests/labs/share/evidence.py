"""The records of a right run on ranks, made from a simulated ledger: leases, observations, digests, losses. Tests change one thing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from kit.labs.definition import as_settings
from kit.labs.share.drive import simulate_pipelines
from kit.labs.share.lab import LAB, ShareConfig
from kit.labs.share.ledgers import devices_of
from kit.labs.share.simulated import SCENES
from kit.megatron.config import model_bytes
from kit.results import Row, Verdict
from kit.results.records import NOTEBOOK
from kit.results.rules import judge
from kit.results.run import to_frame
from tests.labs.share.conftest import share

MIB = 2**20
CONFIG = share(layers=200, steps=2, release_groups=True)  # large enough for the weights to show in resident memory
COUNTS = ("fds", "sockets", "threads", "children", "memfds", "shared_maps", "shm_files", "temp_files")
OWNERS = [f"{name}.{role}" for name in "ab" for role in ("trainer", "replica 0", "replica 1")]
Facts = dict[str, Any]


def rank_of(owner: str) -> int:
    return OWNERS.index(owner)


def records(config: ShareConfig = CONFIG) -> list[Facts]:
    """Every row of a right run, with its phase and rank."""
    found = Found()
    done = simulate_pipelines(dataclasses.replace(config, simulated=True, ranks=0)).rows
    died = simulate_pipelines(dataclasses.replace(config, simulated=True, ranks=0), SCENES[1]).rows
    for phase, rows in (("shared", done), ("rehearse", died)):
        for row in rows:
            found.add(phase, row.event, None, row.time, ids=row.ids)
    add_devices(found, config, done)
    for row in done:
        name = str(row.ids.get("who", row.ids.get("pipeline", "")))
        if row.event in ("shrunk", "published"):
            rank, ids = (
                rank_of(f"{name}.replica {row.ids['replica']}"),
                {"replica": row.ids["replica"], "pipeline": name},
            )
        if row.event == "shrunk":
            found.add("shared", "in_flight", 0.0, row.time, rank, unit="1", ids={**ids, "aborted": 3})
        elif row.event == "published":
            version = row.ids["version"]
            found.add(
                "shared", "served", None, row.time, rank, text=f"{name} {version}", ids={**ids, "version": version}
            )
    for name in config.names:
        for phase in (f"alone_{name}", "shared", *(["rehearse"] if name == "b" else [])):
            for metric, value, text, ids in numbers_of(config, name):
                found.add(
                    phase, metric, value, 100.0, rank_of(f"{name}.trainer"), text=text, ids={**ids, "pipeline": name}
                )
    every = itertools.product(("prepare", "alone_a", "alone_b", "shared", "end"), range(6), ("groups", *COUNTS))
    for phase, rank, metric in every:
        found.add(phase, metric, 5.0, 200.0, rank, unit="1")
    return found


class Found(list[Facts]):
    """Rows as they are recorded."""

    def add(self, phase: str, metric: str, value: float | None, when: float, rank: int = NOTEBOOK, **more: Any) -> None:
        self.append({"phase": phase, "rank": rank, **fact(metric, when, value=value, **more)})


def fact(metric: str, when: float, **more: Any) -> Facts:
    return Row(metric=metric, time=when, **more).facts()


def add_devices(found: Found, config: ShareConfig, rows: Any) -> None:
    """Add the leases, and what observers saw of them."""
    found.add("shared", "seen_samples", 100.0, 0.0, unit="1", ids={"two_owners": 0, "blind": 0})
    for owner in OWNERS:
        found.add("shared", "seen_resident", 300.0 * MIB, -1.0, unit="B", ids={"who": owner})
    for owner, when, event in sorted(lease_events(rows), key=lambda one: (one[1], one[2] == "taken")):
        seen = owner if event == "taken" else ""
        for device in devices_of(config, owner):
            ids = {"device": device, "event": event, "pipeline": owner[0]}
            found.add("shared", "lease", None, when, rank_of(owner), text=owner, ids=ids)
            if event == "freed" and owner.endswith("trainer"):
                found.add("shared", "groups_asleep", 0.0, when, rank_of(owner), unit="1", ids={"who": owner})
            found.add("shared", "seen_owner", float(bool(seen)), when, text=seen, unit="1", ids={"device": device})
        size = model_bytes(config.loops[owner[0]].replica_model, ranks=1)["params"] * bool(seen)
        found.add("shared", "seen_resident", 300.0 * MIB + size, when, unit="B", ids={"who": owner})


def lease_events(rows: Any) -> Iterator[tuple[str, float, str]]:
    """Yield the leases: replicas from the order to wake until they sleep, trainers from the grant until the release."""
    for row in rows:
        ids, name = row.ids, str(row.ids.get("who", row.ids.get("pipeline", "")))
        if row.event == "expand":
            yield f"{name}.replica {ids['replica']}", row.time, "taken"
        elif row.event == "shrunk":
            yield f"{name}.replica {ids['replica']}", row.time, "freed"
        elif row.event == "granted" and ids["kind"] == "training" and ids.get("to") == name:
            yield f"{name}.trainer", row.time, "taken"
        elif row.event == "release" and ids["kind"] == "training" and ids.get("to") == "desk":
            yield f"{name}.trainer", row.time, "freed"


def numbers_of(config: ShareConfig, name: str) -> Iterator[tuple[str, float | None, str, dict[str, int]]]:
    """Yield the numbers that a pipeline computes."""
    one = config.loops[name]
    for version in range(one.steps + 1):
        yield "digest", None, f"{name} {version}", {"version": version}
    for step in range(one.steps):
        yield "global_loss", 1 / (step + 3), "", {"step": step, "update": 0}
        yield "grad_norm", 1 / (step + 7), "", {"step": step, "update": 0}
    for group in range(one.steps * one.groups):
        for sample in range(one.group):
            yield "tokens_digest", None, f"{name} {group} {sample}", {"group": group, "sample": sample}


def verdict_of(rows: list[Row], config: ShareConfig = CONFIG) -> Verdict:
    cycles = {"prepare": 0, "end": 0}
    frame = to_frame(Row(run="test", lab="share", cycle=cycles.get(row["phase"], 1), **row) for row in rows)
    return judge(frame, as_settings(config), LAB.load_rules())
