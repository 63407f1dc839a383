"""A replica of the lab `stream`: that of a loop. It also hashes the weights that it serves, where tokens are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.actors.common import DIGEST
from kit.actors.replica import ReplicaActor
from kit.labs import rankside


class Replica(ReplicaActor):
    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        answer = super().sync(version, at_sync, replicas)
        if self.config.runs("verify"):
            table = self.digests(DIGEST)
            if self.first:
                self.ctx.record("served", None, text=rankside.digest_of_hashes(table), version=version)
        return answer
