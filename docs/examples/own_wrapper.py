"""A patched new_group returns wrappers of groups.
kit run offload --set implementation=docs.examples.own_wrapper:Wrapping"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d


class Wrapper(dist.ProcessGroup):
    """Layers keep this object. The group inside is destroyed and rebuilt; in between, every use raises an error."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.__dict__["title"] = f"{group.group_desc} {dist.get_process_group_ranks(group)}"
        self.fill(group)

    def fill(self, group: Any) -> None:
        """Hold this group and replace it in torch's registry."""
        world = c10d._world
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
            table[self] = table.pop(group)
        for tagged in world.tags_to_pg.values():
            tagged[:] = [self if each is group else each for each in tagged]
        self.__dict__["inside"] = group

    def __repr__(self) -> str:
        return f"<wrapper of {self.__dict__['title']}>"  # for torch's error messages

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__", "fill"):
            return object.__getattribute__(self, name)
        own = self.__dict__
        if name in own:
            return own[name]
        if own["inside"] is None:
            raise RuntimeError(f"group {own['title']} is destroyed, but {name} was used")
        return getattr(own["inside"], name)


class Wrapping:
    def __init__(self, ctx: Any) -> None:
        self.calls = ctx.around
        self.globals: dict[str, Any] = {}

    @staticmethod
    @contextlib.contextmanager
    def around(ctx: Any) -> Iterator[list[Any]]:
        """Entered on every rank before Megatron creates its groups, and left after the job. The yielded list becomes `ctx.around`."""
        print(f"rank {ctx.rank}: new_group is patched")
        plain = dist.new_group
        calls = []  # one per new_group: function, arguments, wrapper (None on a rank outside the group)

        def new_group(*args: Any, **kwargs: Any) -> Any:
            group = plain(*args, **kwargs)
            wrapper = Wrapper(group) if isinstance(group, dist.ProcessGroup) else None
            calls.append((plain, args, kwargs, wrapper))
            return wrapper or group

        dist.new_group = new_group
        try:
            yield calls
        finally:
            dist.new_group = plain
            calls.clear()

    def destroy(self) -> None:
        self.globals = dict(vars(parallel_state))
        failed = []
        for *_, wrapper in reversed(self.calls):
            if wrapper is not None:
                try:
                    dist.destroy_process_group(wrapper)
                    wrapper.__dict__["inside"] = None
                except RuntimeError as error:
                    failed.append(f"{wrapper.title}: {error}")
        parallel_state.destroy_model_parallel()
        if failed:
            raise RuntimeError("not destroyed: " + "; ".join(failed))

    def reload(self, _: None) -> None:
        for plain, args, kwargs, wrapper in self.calls:
            group = plain(*args, **kwargs)  # on every rank, also those outside the group
            if wrapper is not None:
                wrapper.fill(group)
        vars(parallel_state).update(self.globals)
