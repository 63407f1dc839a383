"""Right designs in other styles, which `kit explore` must pass. `python -m tests.loop.right_cores --seeds 1000` runs all of them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import kit
from kit.loop.messages import Command, Event
from kit.share.planner import View
from kit.stream.core import Controller

# -- planners ---------------------------------------------------------------------------------------------------------------


def most_work_first(view: View) -> None:
    """Whoever has most work left gets all that is idle; nobody gives anything up."""
    for share in sorted(view.shares.values(), key=lambda share: (share.completed - share.target, share.name)):
        for replica in [*share.free] if share.since >= 0 else ():
            if share.bundles[replica] <= view.idle:
                view.expand(share.name, replica)


def a_replica_each(view: View) -> None:
    for share in view.shares.values():
        fits = [replica for replica in share.free if share.bundles[replica] <= view.idle]
        if share.since >= 0 and not share.active and fits:
            view.expand(share.name, fits[0])


# -- controllers ------------------------------------------------------------------------------------------------------------


class Styled(Controller):
    """Decides as the kit's does, in another place."""

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        return self.elsewhere(state, event)

    def elsewhere(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        raise NotImplementedError

    def decide(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        return super().step(state, event)


class InTask(Styled):
    loop = asyncio.new_event_loop()

    def elsewhere(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        async def decided() -> tuple[Any, tuple[Command, ...]]:
            await asyncio.sleep(0)
            return self.decide(state, event)

        return self.loop.run_until_complete(decided())


class OnThread(Styled):
    pool = ThreadPoolExecutor(1)

    def elsewhere(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        return self.pool.submit(self.decide, state, event).result()


class WholeSteps(Controller):
    """Synchronous: a step begins when all its groups are complete."""

    def __init__(self, plan: Any, start: Any = None) -> None:
        super().__init__(replace(plan, min_groups=plan.groups), pipeline="a", resume=start)


def in_task(plan: Any, start: Any = None) -> Controller:
    return InTask(plan, pipeline="a", resume=start)


def on_thread(plan: Any, start: Any = None) -> Controller:
    return OnThread(plan, pipeline="a", resume=start)


# -- all of them --------------------------------------------------------------------------------------------------------------

OWN, HERE = "tests.labs.share.test_own", "tests.loop.right_cores"
DESIGNS: dict[str, tuple[str, dict[str, str]]] = {
    "planner by demand": ("share", {"planner": "gap-ratio"}),
    "planner by demand, near home": ("share", {"planner": "home"}),
    "planner by arrival": ("share", {"planner": "fifo"}),
    "planner that takes turns": ("share", {"planner": f"{OWN}:takes_turns"}),
    "planner by work left": ("share", {"planner": f"{HERE}:most_work_first"}),
    "planner with a quota": ("share", {"planner": f"{HERE}:a_replica_each"}),
    "own desk": ("share", {"planner": f"{OWN}:takes_turns", "scheduler": f"{OWN}:own_desk"}),
    "own side of the desk": ("share", {"pipeline": f"{OWN}:Right"}),
    "synchronous": ("stream", {"sampler": "strict"}),
    "steps in order, some off": ("stream", {"sampler": "in-order"}),
    "windowed": ("stream", {"sampler": "windowed"}),
    "streaming": ("stream", {"sampler": "capacity"}),
    "sampler that polls": ("stream", {"sampler": "tests.stream.test_foreign:InOrder"}),
    "asyncio": ("stream", {"implementation": f"{HERE}:in_task"}),
    "whole steps": ("stream", {"implementation": f"{HERE}:WholeSteps"}),
    "own desk that shares as it likes": ("share", {"scheduler": f"{OWN}:own_desk"}),
    "threads": ("stream", {"implementation": f"{HERE}:on_thread"}),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    asked, alarms = parser.parse_args(), 0
    for style, (lab, settings) in DESIGNS.items():
        done = kit.explore(lab, seeds=asked.seeds, first=asked.first, every=True, shrinks=False, **settings)
        alarms += not done.passed
        print(f"{style}: {done.sentence()}", flush=True)
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
