"""A releaser that finds by the garbage collector who holds a group, and hands a placeholder to each of them. It runs on ranks."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


class Released:
    """Stands where a group stood; every use raises."""

    def __init__(self, description: str) -> None:
        self.__dict__["description"] = description

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"process group {self.__dict__['description']} is released ({name} was used)")


@dataclass
class Made:
    """A call of new_group, and what it gave: a group, its placeholder, or None for a group that this rank is not in."""

    again: Callable[[], Any]
    given: Any


def exchange(old: Any, new: Any) -> None:
    for holder in gc.get_referrers(old):
        if isinstance(holder, types.CellType):
            holder.cell_contents = new
        elif isinstance(holder, (dict, list)):
            for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                if value is old:
                    holder[key] = new
        elif not isinstance(holder, (types.FrameType, type)):
            for key, value in list(getattr(holder, "__dict__", {}).items()):
                if value is old:
                    holder.__dict__[key] = new


class Referred:
    """Right, as long as a walk over all objects finds the globals of Megatron too."""

    def __init__(self, ctx: Any) -> None:
        self.made: list[Made] = ctx.around

    @staticmethod
    @contextlib.contextmanager
    def around(ctx: Any) -> Iterator[list[Made]]:
        plain, made = dist.new_group, []

        def recording(*args: Any, **kwargs: Any) -> Any:
            group = plain(*args, **kwargs)
            here = group if isinstance(group, dist.ProcessGroup) else None
            made.append(Made(lambda: plain(*args, **kwargs), here))
            return group

        dist.new_group = recording
        try:
            yield made
        finally:
            dist.new_group = plain

    def destroy(self) -> dict[str, Any]:
        errors = []
        for call in reversed(self.made):
            if (group := call.given) is None:
                continue
            description = f"{group.group_desc} {dist.get_process_group_ranks(group)}"
            try:
                dist.destroy_process_group(group)
            except RuntimeError as error:
                errors.append(f"{description}: {error}")
            else:
                call.given = Released(description)
                exchange(group, call.given)
        held = {name: value for name, value in vars(parallel_state).items() if name[0] == "_" and name[1] != "_"}
        parallel_state.destroy_model_parallel()
        for name, value in held.items():
            if isinstance(value, Released):
                setattr(parallel_state, name, None)
        if errors:
            raise RuntimeError("not destroyed: " + "; ".join(errors))
        return held

    def reload(self, held: dict[str, Any]) -> None:
        vars(parallel_state).update(held)
        for call in self.made:
            group = call.again()
            if call.given is not None:
                placeholder, call.given = call.given, group
                exchange(placeholder, group)
