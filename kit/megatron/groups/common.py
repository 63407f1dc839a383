"""The two ways in common use to give Megatron's groups back, kept faithful so that they can be compared.

`manual` destroys by hand what the `*_GROUP*` globals hold, except gloo groups, forgets all of them, and calls Megatron's
reset: the gloo groups are lost. `official` is Megatron's own reset alone: it forgets the device groups without
destroying them. Both rebuild through `initialize_model_parallel`; handles that layers keep go stale.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.megatron.groups.handle import state
from kit.megatron.groups.snapshot import groups_in, initialised, megatron_groups, parallel_state


def manual() -> tuple[int, list[str], list[str]]:
    """Destroy each device group by hand, null every name, reset. Gives the number destroyed, failures and reasons."""
    module = parallel_state()
    names = [n for n, v in vars(module).items() if n.startswith("_") and "_GROUP" in n and not isinstance(v, dict)]
    seen: list[Any] = []
    failed: list[str] = []
    reasons: list[str] = []
    for name in names:
        for group in groups_in(getattr(module, name)):
            if "_GLOO" in name or any(group is each for each in seen):
                continue
            seen.append(group)
            try:
                dist.destroy_process_group(group)
            except Exception as error:  # noqa: BLE001 - collected, and raised by the caller after the rest was tried
                failed.append(name)
                reasons.append(f"{name}: {error}")
    for name in names:
        setattr(module, name, None)
    module.destroy_model_parallel()
    return len(seen) - len(failed), failed, reasons


def official() -> None:
    """Megatron's own reset."""
    parallel_state().destroy_model_parallel()


def reload(snapshot: dict[str, Any]) -> None:
    """Initialise Megatron again with the arguments it was initialised with."""
    if not snapshot["init_arguments"]:
        raise KitError(
            "how Megatron was initialised is not known: call kit.megatron.groups.install() before it initialises"
        )
    functions = {k: v for k, v in (state.init_arguments or {}).items() if callable(v)}
    parallel_state().initialize_model_parallel(**functions, **snapshot["init_arguments"])


def talk(over: list[Any] | None = None) -> list[dict[str, Any]]:
    """All-reduce over every group of Megatron's (or over these) with values that depend on the rank; `exact` says whether the
    sum is right."""
    if not initialised():
        return []
    results = []
    for group in megatron_groups() if over is None else over:
        ranks = dist.get_process_group_ranks(group)
        on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
        value = torch.tensor([(dist.get_rank() + 1) ** 2], dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(value, group=group)
        expected = float(sum((rank + 1) ** 2 for rank in ranks))
        results.append(
            {"group": group.group_desc, "ranks": ranks, "sum": float(value.item()), "exact": value.item() == expected}
        )
    return results
