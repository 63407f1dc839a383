"""Suspend and resume groups. NCCL's part is a stand-in, since only a GPU has it; the groups, handles and meetings are real."""

from typing import Any

import torch.distributed as dist
from common import attempt, write

dist.init_process_group("gloo")

from kit.megatron import groups, model  # noqa: E402
from kit.megatron.config import ModelConfig  # noqa: E402
from kit.megatron.handles import megatron_groups  # noqa: E402

ORDER: list[tuple[str, str]] = []


class StandIn:
    """What torch shows of NCCL's suspend for a group, which may never have been used."""

    def __init__(self, name: str, *, used: bool = True, refuses: bool = False) -> None:
        self.name, self.used, self.refuses = name, used, refuses
        self.stats = {"suspend": 64 * 2**20, "suspended": 0, "persist": 2**20, "total": 65 * 2**20}

    def memory_stats(self) -> dict[str, int]:
        if not self.used:
            raise RuntimeError("NCCL communicator is not initialized")
        return dict(self.stats)

    def suspend(self) -> None:
        if self.refuses:
            raise RuntimeError("ncclInvalidUsage: its memory is shared with another communicator\nmore")
        ORDER.append(("suspend", self.name))
        self.stats |= {"suspended": 1}  # the sums stay: NCCL still counts suspended memory

    def resume(self) -> None:
        if self.refuses:
            raise RuntimeError("ncclInvalidUsage: cannot resume")
        ORDER.append(("resume", self.name))
        self.stats |= {"suspended": 0}


def stand_ins(refusing: str = "") -> dict[int, Any]:
    """Make a stand-in for every group except each fifth, which stays a gloo group; the second was never used."""
    made: dict[int, Any] = {}
    for number, handle in enumerate(megatron_groups()):
        name = f"{handle.group_desc}/{handle.group_name}"
        refuses = bool(refusing) and refusing in handle.group_desc
        made[id(handle)] = None if number % 5 == 4 else StandIn(name, used=number != 1, refuses=refuses)
    groups.nccl_backend = lambda handle: made[id(handle)]
    return made


def there_and_back() -> dict[str, Any]:
    job = model.build(ModelConfig(tp=2))
    job.step(1)
    made = stand_ins()
    living = list(megatron_groups())
    stats = groups.destroy("suspend")
    kept = stats["snapshot"]["suspended"]
    asleep = [handle for handle in living if handle.kit_inner is None]
    used = [attempt(lambda handle=handle: dist.barrier(group=handle)) for handle in asleep]
    named = [
        str(handle.group_desc) in message and "released" in message
        for handle, message in zip(asleep, used, strict=True)
    ]
    result = {
        "counted": stats["destroyed"],
        "suspended": len(kept["suspended"]),
        "first": kept["suspended"][0],
        "gloo": [why for _, why in kept["skipped"]].count("over gloo"),
        "expected_gloo": sum(one is None for one in made.values()),
        "unused": [why for _, why in kept["skipped"]].count(groups.NEVER_USED),
        "asleep": len(asleep),
        "all_raise_by_name": all(named),
        "initialised": groups.initialised(),
    }
    result["resumed"] = groups.reload(stats["snapshot"])["reloaded"]
    result["same"] = list(megatron_groups()) == living and all(h.kit_inner is not None for h in living)
    result["exact"] = all(row["exact"] for row in groups.talk())
    result["order"] = list(ORDER)
    result["again"] = groups.reload(stats["snapshot"])["reloaded"]
    job.step(1)
    job.mover.close()
    groups.destroy()
    return result


def refused() -> dict[str, Any]:
    """One communicator shares its memory and cannot be suspended: the others are suspended, the error names it, and all resume."""
    job = model.build(ModelConfig(tp=2))
    stand_ins(refusing="TENSOR_MODEL_PARALLEL_GROUP")
    result: dict[str, Any] = {"error": ""}
    try:
        groups.destroy("suspend")
    except groups.DestroyFailed as error:
        result = {"error": str(error), "held": error.held, "suspended": error.stats["destroyed"]}
        result["resumed"] = groups.reload(error.stats["snapshot"])["reloaded"]
    result["exact"] = all(row["exact"] for row in groups.talk())
    job.mover.close()
    groups.destroy()
    return result


def stuck() -> dict[str, Any]:
    """A group that cannot resume stays empty: using it must not reach the GPU."""
    job = model.build(ModelConfig(tp=2))
    made = stand_ins()
    stats = groups.destroy("suspend")
    handle = next(h for h in megatron_groups() if h.kit_inner is None)
    made[id(handle)].refuses = True
    result = {"error": attempt(lambda: groups.reload(stats["snapshot"]))}
    result["use"] = attempt(lambda: dist.barrier(group=handle))
    made[id(handle)].refuses = False
    result["resumed"] = groups.reload(stats["snapshot"])["reloaded"]
    result["exact"] = all(row["exact"] for row in groups.talk())
    job.mover.close()
    groups.destroy()
    return result


plain = attempt(groups.refuse_keeping)  # before the library is replaced by a stand-in
groups.refuse_keeping = lambda: None  # type: ignore[assignment]
write({"plain": plain, "there_and_back": there_and_back(), "refused": refused(), "stuck": stuck()})
