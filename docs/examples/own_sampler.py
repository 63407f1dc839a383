"""A sampler with NeMo-RL's protocol.
In milliseconds, without ranks: kit run stream --set simulated=true --set places=16 --set sampler=docs.examples.own_sampler:InOrder"""

import asyncio
from collections.abc import Callable
from typing import Any


class InOrder:
    """A gate: each group is generated for one step, at most `max_lookahead_versions` steps ahead of the trainer."""

    is_on_policy = False

    def __init__(self, buffer: Any, *, max_lookahead_versions: int) -> None:
        self.buffer = buffer
        self.window = max_lookahead_versions
        self.index = -1

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """Where a resumed run begins."""
        self.index = resume_from_step - 1

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        return groups_per_step * (self.window + 1)

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Wait until another batch may start; return the step for which its groups are generated."""
        while self.index >= trainer_version_fn() + self.window:
            await asyncio.sleep(0.005)
        self.index += 1
        return self.index

    async def select(self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int) -> Any:
        """Take the groups of the next step out of the buffer; None, 0 if there are too few."""
        there = zip(self.buffer.target_step_list, self.buffer.ready_list, strict=True)
        found = [at for at, (target, ready) in enumerate(there) if ready and target == current_train_weight]
        return await self.take(found, min_prompt_groups, max_prompt_groups)

    async def take(self, found: list[int], least: int, most: int) -> Any:
        if len(found) < least:
            return None, 0
        metas = [self.buffer.meta_list[at] for at in found[:most]]
        await self.buffer.remove(found[:most], remove_in_dp=False)
        return metas[0].concat(*metas[1:]), len(metas)

    async def evict(self, *, current_train_weight: int) -> int:
        """Drop the groups whose step is over; return their number."""
        there = zip(self.buffer.target_step_list, self.buffer.ready_list, strict=True)
        old = [at for at, (target, ready) in enumerate(there) if ready and (target or 0) < current_train_weight]
        return await self.buffer.remove(old, remove_in_dp=True) if old else 0

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:  # noqa: ARG002
        return False


# -- with one bug each ---------------------------------------------------------------------------------------------------


class InOrderFromZero(InOrder):
    """Ignores where a resumed run begins: its first groups are for steps that are over."""

    def set_dispatch_index(self, resume_from_step: int) -> None:
        pass
