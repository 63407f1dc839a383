"""The contract of destroy and reload, what they refuse, and two common alternatives with their leaks."""

import datetime as dt
import json
from typing import Any

import torch.distributed as dist
from common import attempt, census, collect, exercise, write

dist.init_process_group("gloo")
early_world = dist.group.WORLD

from holders import holders as holders_of  # noqa: E402

from kit.megatron import groups, model  # noqa: E402 - groups that exist before the kit loads are part of the test
from kit.megatron.config import ModelConfig  # noqa: E402
from kit.megatron.handles import maker, megatron_groups, parallel_state  # noqa: E402

TP2 = ModelConfig(tp=2)


def uninitialised() -> dict[str, Any]:
    return {
        "snapshot": groups.snapshot(),
        "destroy": groups.destroy(),
        "empty": attempt(lambda: groups.reload({})),
        "mode": attempt(lambda: groups.destroy("hard")),
        "world": attempt(lambda: groups.destroy("manual", include_world=True)),
        "errors_are_value_errors": issubclass(__import__("kit.errors").errors.BadInput, ValueError),
    }


def options() -> dict[str, Any]:
    job = model.build(ModelConfig(tp=2, timeout_minutes=120, order="tp-cp-ep-pp-dp"))
    tp = parallel_state().get_tensor_model_parallel_group()
    dist.distributed_c10d._set_pg_timeout(dt.timedelta(minutes=7), tp)
    before = groups.snapshot()
    stats = groups.destroy()
    groups.reload(json.loads(json.dumps(stats["snapshot"])))
    after = groups.snapshot()
    backend = tp._get_backend(__import__("torch").device("cpu"))
    result = {"before": before, "after": after, "tp_minutes": backend.options._timeout.total_seconds() / 60}
    job.mover.close()
    groups.destroy()
    return result


def failure(mode: str) -> dict[str, Any]:
    """One group cannot be shut down or aborted: all others are destroyed, and the error names that group."""

    class Stuck:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def shutdown(self) -> None:
            raise OSError("shutdown: the wire is cut")

        def abort(self) -> None:
            raise OSError("abort: the wire is cut")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    job = model.build(TP2)
    handle = parallel_state().get_tensor_model_parallel_group()
    handle.kit_inner = Stuck(handle.kit_inner)
    try:
        groups.destroy(mode)
    except groups.DestroyFailed as error:
        result = {"error": str(error), "held": error.held, "destroyed": error.stats["destroyed"]}
    collect()
    result["census"] = census()
    job.mover.close()
    return result


def missing_rank() -> str:
    job = model.build(TP2)
    error = ""
    if dist.get_rank() == 0:
        error = attempt(lambda: groups.destroy(timeout_s=2.0))
    dist.barrier()
    # The rank that waited withdrew its request, so both can try again.
    again = groups.destroy()
    job.mover.close()
    return error if again["destroyed"] else "nothing was destroyed the second time"


def common_modes() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for mode in ("manual", "official"):
        job = model.build(TP2)
        counts = [census()["groups"]]
        stats = {}
        for _ in range(3):
            stats = groups.destroy(mode)
            groups.reload(stats["snapshot"])
            counts.append(census()["groups"])
        holders = holders_of(job=job)
        result[mode] = {
            "counts": counts,
            "destroyed": stats["destroyed"],
            "dead": sum(not h.alive for h in holders),
            "stale": sum(not h.current for h in holders),
            "holders": len(holders),
            "talk": all(each["exact"] for each in groups.talk()),
        }
        job.mover.close()
        del job, holders
        groups.destroy()
        collect()
        result[mode]["leaked"] = [g.group_desc for g in megatron_groups()]
        left = [g for g in dist.distributed_c10d._world.pg_map if maker(g).startswith("megatron.")]
        for group in left:
            dist.destroy_process_group(group)
    return result


def late_install() -> str:
    """Groups that Megatron made before the handles were installed cannot be released exactly; the error names them."""
    groups.uninstall()
    plain = parallel_state()
    plain.initialize_model_parallel(tensor_model_parallel_size=2)
    error = attempt(groups.destroy)
    plain.destroy_model_parallel()
    return error


def main() -> None:
    bystander = dist.new_group([0, 1], group_desc="BYSTANDER")
    result: dict[str, Any] = {"uninitialised": uninitialised()}
    groups.install()
    groups.install()
    result["options"] = options()
    result["failure"] = {"shutdown": failure("exact"), "abort": failure("abort")}
    result["missing"] = missing_rank()
    result["common"] = common_modes()
    result["bystander"] = attempt(lambda: exercise(bystander))
    result["late"] = late_install()
    result["world_is_plain_again"] = dist.group.WORLD is early_world
    result["early_world"] = attempt(lambda: exercise(early_world))
    write(result)


main()
