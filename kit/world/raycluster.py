"""The Ray cluster in which ranks of engine='ray' are actors: one for all Worlds of this process, held by a process of its own.

The notebook never becomes a Ray driver. A cluster that was there stays; one that was started here ends with the last World.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import threading
from typing import Any, NamedTuple

from kit.errors import KitError, how_ended
from kit.world import leftovers
from kit.world.launch import RAYLAUNCH

ENDS_S = 10.0
# Most of Ray's import, where it compiles a grammar. Ray itself is imported once the cluster is there, because it reads then how to
# authenticate.
SLOWEST = "jsonschema"


class ClusterFacts(NamedTuple):
    """`joined`: it was there. `gpus`: of this machine. `auth`: how its drivers prove who they are; empty: as Ray finds out."""

    address: str
    joined: bool
    gpus: float
    auth: str


class HeldCluster:
    def __init__(self, python: str) -> None:
        self.python = python
        self.owner = os.getpid()
        self.users = 0
        self.namespace = f"kit-{secrets.token_hex(4)}"
        self._folder = leftovers.base() / leftovers.mark(secrets.token_hex(3))
        self._folder.mkdir(mode=0o700)
        self._log = self._folder / "log"
        try:
            with self._log.open("wb") as log:
                self.process = subprocess.Popen(
                    [python, "-P", RAYLAUNCH, "--notebook", str(os.getpid()), "--hold"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise KitError(f"the Ray cluster's process cannot start with {python}: {error.strerror}") from error

    def facts(self) -> ClusterFacts | None:
        """None while it is on its way."""
        last = self.last_words()
        if last.startswith("{"):
            return ClusterFacts(**json.loads(last))
        if (status := self.process.poll()) is not None:
            raise KitError(f"the process that holds the Ray cluster {how_ended(status)}: {last}")
        return None

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def is_usable(self, python: str) -> bool:
        return self.python == python and self.owner == os.getpid() and self.process.poll() is None

    def end(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.communicate(b"end\n", timeout=ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # what Ray runs for it ends with it
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


_held: HeldCluster | None = None
_holding = threading.Lock()


def hold(python: str) -> HeldCluster:
    """The cluster of this process, for one more World."""
    global _held  # noqa: PLW0603 - a process has one
    with _holding:
        if _held is None or not _held.is_usable(python):
            _held = HeldCluster(python)
        _held.users += 1
        return _held


def release(cluster: HeldCluster) -> None:
    """A World has ended; the last one ends the cluster."""
    global _held  # noqa: PLW0603 - as above
    with _holding:
        cluster.users -= 1
        if cluster.users == 0:
            if _held is cluster:
                _held = None
            cluster.end()


def order_of(facts: ClusterFacts, *, ranks: int, neighbours: int, device: str) -> dict[str, Any]:
    """Where an agent finds the cluster, and what each actor needs there: a CPU and, unless it is on the CPU, its part of this machine's
    GPUs. In a cluster that was started here nothing is counted."""
    needs: dict[str, float] = {}
    if facts.joined:
        needs["CPU"] = 1.0
        part = facts.gpus / neighbours
        if device != "cpu" and facts.gpus:  # Ray gives parts of one GPU, or whole ones
            needs["GPU"] = float(int(part)) if part >= 1 else int(part * 1000) / 1000
    return {"address": facts.address, "auth": facts.auth, "joined": facts.joined, "ranks": ranks, "needs": needs}
