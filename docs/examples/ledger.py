"""An asynchronous RL loop that records its ledger: python docs/examples/ledger.py [FOLDER], then kit check FOLDER --lab stream."""

import asyncio
import random
import sys

from kit.measure import Recorder

STEPS, GROUPS, GROUP, WINDOW = 4, 2, 2, 1
serves = [0, 0]  # the version of each replica's weights


async def generate(rec: Recorder, group: int, sample: int) -> None:
    replica, length = sample % len(serves), 8 + random.getrandbits(5)
    ids = {"group": group, "sample": sample, "replica": replica}
    rec.event("sent", **ids)
    versions = []
    for first in range(0, length, 4):
        await asyncio.sleep(0.002)
        versions.append(serves[replica])  # read when the tokens are generated, not when the answer arrives
        rec.event("tokens", **ids, version=versions[-1], first=first, count=min(4, length - first))
    rec.event("completed", **ids, version=versions[0], newest=versions[-1], length=length)


async def rollout(rec: Recorder, group: int, version: int) -> int:
    rec.event("reserved", group=group, version=version, target=group // GROUPS)
    await asyncio.gather(*(generate(rec, group, sample) for sample in range(GROUP)))
    return group


async def main(rec: Recorder) -> None:
    rec.event("capacity", window=WINDOW, groups_per_step=GROUPS, group=GROUP, sampler="in-order")
    tasks: list[asyncio.Task[int]] = []
    for step in range(STEPS):
        last = min(step + WINDOW + 1, STEPS) * GROUPS  # dispatch no step beyond version + window
        tasks += [asyncio.create_task(rollout(rec, group, step)) for group in range(len(tasks), last)]
        rec.event("begin", step=step, update=0)
        for group in asyncio.as_completed(tasks[step * GROUPS : (step + 1) * GROUPS]):
            rec.event("trained", group=await group, step=step, update=0, version=step)
        rec.event("finish", step=step, update=0)
        rec.event("bumped", version=step + 1, updates=step + 1, step=step)
        for replica in range(len(serves)):
            serves[replica] = step + 1  # the new weights arrive
            rec.event("published", version=step + 1, replica=replica)
        for number in range(step * GROUPS, (step + 1) * GROUPS):
            rec.event("cleared", group=number, step=step)
    rec.event("ended", why="done")


with Recorder(sys.argv[1] if len(sys.argv) > 1 else "runs/ledger") as recorder:
    asyncio.run(main(recorder))
