"""How many ranks a machine can carry: what each needs against what the machine (or its cgroup) has left."""

from __future__ import annotations

import os

from kit import machine
from kit.errors import BadInput
from kit.world.crew import CREWS

RANK_BYTES = (
    300 * 2**20
)  # a rank with torch loaded and one group: about 250 MiB resident, of which the fork shares part
RANK_TASKS = 24  # threads of a rank over gloo
MOST_PER_CORE = 16


def check_ranks(count: int) -> None:
    """Refuse what cannot work, with the arithmetic."""
    free, cores = machine.free_memory(), len(os.sched_getaffinity(0))
    live = sum(len(crew.members) for crew in CREWS if crew.agents and not crew.inherited)
    if live + count > MOST_PER_CORE * cores:
        beside = f" beside {live} in other Worlds" if live else ""
        raise BadInput(
            f"{count} ranks{beside} on this machine's {cores} cores: at most {MOST_PER_CORE * cores} ({MOST_PER_CORE} a core)"
        )
    if count * RANK_BYTES > free:
        raise BadInput(
            f"{count} ranks need about {count * RANK_BYTES / 2**30:.1f} GiB ({RANK_BYTES >> 20} MiB each) and "
            f"{free / 2**30:.1f} GiB are free; at most {max(0, free // RANK_BYTES)} fit"
        )
    for who, tasks in (("container", machine.cgroup_limit("pids")), ("user (ulimit -u)", machine.user_limit())):
        if tasks.maximum is not None and count * RANK_TASKS > (left := tasks.maximum - (tasks.used or 0)):
            raise BadInput(
                f"{count} ranks need about {count * RANK_TASKS} processes and threads and this {who} may start {left} more "
                f"({tasks.used} of {tasks.maximum} are in use)"
            )
