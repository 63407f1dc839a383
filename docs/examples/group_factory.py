"""A factory of process groups.
kit run smoke --set implementation=docs.examples.group_factory:Factory"""

import datetime as dt
from typing import Any

import torch.distributed as dist


class Factory:
    """Makes groups with their own timeout and name. Each is used once."""

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
    """Destroys only the newest group."""

    def destroy(self, group: Any) -> None:
        if group.group_desc == f"factory-{self.made}":
            super().destroy(group)


class FactoryThatKeepsHandles(Factory):
    """Keeps destroyed groups in a list for its log. Over gloo they keep their threads and sockets as long as an object holds them."""

    def destroy(self, group: Any) -> None:
        super().destroy(group)
        self.kept.append(group)


class FactoryOfRawGroups(Factory):
    """Makes gloo groups outside torch's registry and keeps all of them."""

    def make(self, ranks: range) -> Any:
        self.made += 1
        store = dist.PrefixStore(f"factory-{self.made}", dist.distributed_c10d._get_default_store())
        self.kept.append(dist.ProcessGroupGloo(store, dist.get_rank(), len(ranks), dt.timedelta(minutes=5)))
        return self.kept[-1]

    def destroy(self, group: Any) -> None: ...


class FactoryOfOneGroup(Factory):
    """Returns WORLD, which has the same ranks. Two owners of one group receive each other's messages."""

    def make(self, ranks: range) -> Any:  # noqa: ARG002 - not used
        return dist.group.WORLD

    def destroy(self, group: Any) -> None: ...
