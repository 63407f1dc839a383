"""How many ranks a machine can carry: what each needs against what the machine (or its cgroup) has left."""

from __future__ import annotations

import os
from pathlib import Path

from kit.errors import BadInput

RANK_BYTES = (
    300 * 2**20
)  # a rank with torch loaded and one group: about 250 MiB resident, of which the fork shares part
RANK_TASKS = 24  # threads of a rank over gloo
MOST_PER_CORE = 16
# Any of them: NVIDIA's, also where a container hides /proc or Windows lends the card, and AMD's.
GPU_DRIVERS = tuple(map(Path, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def available_bytes() -> int:
    """Free memory: the machine's, or what the cgroup still allows when that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and (text := Path(limit).read_text().strip()) != "max":
            free = min(free, int(text) - int(Path(used).read_text()))
    return free


def check_ranks(count: int) -> None:
    """Refuse what cannot work, with the arithmetic."""
    free, cores = available_bytes(), len(os.sched_getaffinity(0))
    if count > MOST_PER_CORE * cores:
        raise BadInput(
            f"{count} ranks on this machine's {cores} cores: at most {MOST_PER_CORE * cores} ({MOST_PER_CORE} a core)"
        )
    if count * RANK_BYTES > free:
        raise BadInput(
            f"{count} ranks need about {count * RANK_BYTES / 2**30:.1f} GiB ({RANK_BYTES >> 20} MiB each) and "
            f"{free / 2**30:.1f} GiB are free; at most {max(0, free // RANK_BYTES)} fit"
        )
    pids = Path("/sys/fs/cgroup/pids.max")
    if pids.exists() and (text := pids.read_text().strip()) != "max" and count * RANK_TASKS > int(text):
        raise BadInput(f"{count} ranks make about {count * RANK_TASKS} tasks and this container allows {text}")
