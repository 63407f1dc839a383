"""The least time that paced pipelines need on their devices, computed from their settings alone, before any run.

Only generating and training count: a schedule, switches, syncs and the kit's own time do not. So no run can be faster.
"""

from __future__ import annotations

from typing import NamedTuple

from kit.errors import BadInput
from kit.labs.share.lab import PipelineConfig, ShareConfig
from kit.train.draws import answer_length, reward_wait_s, tool_stalls


class PlannedWork(NamedTuple):
    """By pipeline: `work`, its device-seconds of generating and training; `path`, the least seconds of its loop with all of its devices.

    `bound` is the larger of all work divided by the number of devices, and the longest path.
    """

    work: dict[str, float]
    path: dict[str, float]
    bound: float


def planned_work(config: ShareConfig) -> PlannedWork:
    work: dict[str, float] = {}
    path: dict[str, float] = {}
    for name, loop in config.loops.items():
        refuse_unknown_lengths(name, loop)
        steps = [planned_step(loop, step) for step in range(loop.steps)]
        work[name] = sum(seconds for seconds, _ in steps)
        path[name] = sum(seconds for _, seconds in steps)
    return PlannedWork(work, path, max(sum(work.values()) / config.devices, *path.values()))


def refuse_unknown_lengths(name: str, loop: PipelineConfig) -> None:
    low, high = loop.answer
    if not loop.pace_ms or not loop.train_pace_ms or not (loop.tail or low == high) or loop.window:
        raise BadInput(
            f"the work of pipeline {name} is not known before a run; give it pace_ms, train_pace_ms, window=0, and tail=true or answers of "
            "one length"
        )


def planned_step(loop: PipelineConfig, step: int) -> tuple[float, float]:
    """The device-seconds of a step, and the least seconds that it takes.

    A replica gives one token after the other. So all tokens divided by the number of replicas take that long, and the slowest answer with
    its tool calls does. Then come the rewards, and the trainer.
    """
    token_s = loop.pace_ms / 1000
    samples = [
        (group, sample) for group in range(step * loop.groups, (step + 1) * loop.groups) for sample in range(loop.group)
    ]
    lengths = [answer_length(loop, *key) if loop.tail else loop.answer[0] for key in samples]
    answers = [
        length * token_s + sum(tool_stalls(loop, *key).values()) for key, length in zip(samples, lengths, strict=True)
    ]
    generating = sum(lengths) * token_s
    training = len(samples) * loop.train_pace_ms / 1000
    least = max(generating / loop.replicas, *answers)
    waits = reward_wait_s(loop.seed, loop.reward_ms, step)
    return generating * loop.infer_tp + training * loop.trainer_ranks, least + waits + training
