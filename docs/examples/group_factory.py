"""A factory of process groups.
kit run smoke --set implementation=docs.examples.group_factory:Factory"""

import datetime as dt
from typing import Any

import torch.distributed as dist


class Factory:
    """Groups with a timeout and a name of their own, each for one use."""

    def __init__(self, ctx: Any) -> None:  # noqa: ARG002 - the lab passes it
        self.made = 0
        self.kept: list[Any] = []  # for the bugs below

    def make(self, ranks: range) -> Any:
        self.made += 1
        return dist.new_group(list(ranks), timeout=dt.timedelta(minutes=5), group_desc=f"factory-{self.made}")

    def destroy(self, group: Any) -> None:
        dist.destroy_process_group(group)


# -- with one bug each ---------------------------------------------------------------------------------------------------


class FactoryThatForgetsAGroup(Factory):
    """Destroys the group that it made last, and forgets all others."""

    def destroy(self, group: Any) -> None:
        if group.group_desc == f"factory-{self.made}":
            super().destroy(group)


class FactoryThatKeepsHandles(Factory):
    """Keeps a list for its log. Over gloo a destroyed group keeps its threads and sockets while anybody holds it."""

    def destroy(self, group: Any) -> None:
        super().destroy(group)
        self.kept.append(group)


class FactoryOfRawGroups(Factory):
    """Makes gloo groups that no table of torch lists, and lets none of them go."""

    def make(self, ranks: range) -> Any:
        self.made += 1
        store = dist.PrefixStore(f"factory-{self.made}", dist.distributed_c10d._get_default_store())
        self.kept.append(dist.ProcessGroupGloo(store, dist.get_rank(), len(ranks), dt.timedelta(minutes=5)))
        return self.kept[-1]

    def destroy(self, group: Any) -> None: ...


class FactoryOfOneGroup(Factory):
    """Hands out WORLD, which has the same ranks: two owners of a group receive each other's messages."""

    def make(self, ranks: range) -> Any:  # noqa: ARG002 - it never asks
        return dist.group.WORLD

    def destroy(self, group: Any) -> None: ...
