"""The charts of a stream run: versions by replica, where the time went, lag of trained tokens, ends of groups, and the recomputation.

Colour is the weight version in the first chart, and a part of the time or an end of a group in the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from kit.draw.album import Charts, Table, WhatIf
from kit.draw.chart import Mark, Plot
from kit.draw.data import RunData, with_attrs
from kit.draw.lanes import Lanes
from kit.draw.levels import Levels
from kit.draw.lines import Lines
from kit.draw.matrix import Matrix
from kit.draw.style import COLOURS, Look
from kit.labs.stream import tables
from kit.results import NotMeasured, Row, Run
from kit.results.units import ROW, amount, counted
from kit.stream.judge.history import BY_START, BY_TARGET
from kit.stream.ports import PARTS, TrainerCall, calls, sync_spans
from kit.stream.ports import TRAINER as TRAINING
from kit.stream.settings import SAMPLERS
from kit.stream.simulated import forecast, pace

REPLICAS = 8  # as many have lanes, the first ones
LANE = (0.022, 0.11)  # inches for a request of a replica
LANES = 3.0  # inches for all of them
SHOWN_STEPS = 16  # steps drawn as separate bars, the last ones
LOOP = {
    "plain": "plain: generate, then train",
    "lockstep": "lockstep: staleness 0",
    "stream": "stream: this config",
    "bound": "bound: simulated",
}
PART_LOOKS = {
    "training": Look(0),
    "logprobs": Look(3, "log-probabilities"),
    "sync": Look(2),
    "exposed_generation": Look(1, "waiting for samples (exposed generation)"),
}
END_LOOKS = {
    "cleared": Look(2, "trained"),
    "evicted": Look(1, "evicted: too old"),
    "aborted": Look(4),
    "failed": Look(3),
    "dropped": Look(5, "dropped: equal rewards"),
    "replaced": Look(0),
}


def shown_loop(data: RunData) -> tuple[str, list[Row]]:
    """The loop that is drawn, and its ledger."""
    phase = tables.shown(data.records)
    if not phase or not data.order:
        raise NotMeasured("no loop of this run has a complete sample yet")
    return phase, tables.ledger(data.records, phase)


# -- versions over time --------------------------------------------------------------------------------------------------


def versions_over_time(data: RunData) -> pd.DataFrame:
    """The requests of each replica one below the other, in as few lanes as possible; above them the trainer's steps."""
    phase, rows = shown_loop(data)
    began = rows[0].time
    by_replica: dict[int, list[tables.Attempt]] = defaultdict(list)
    for sample in tables.samples(rows):
        by_replica[sample.replica].append(sample)
    packed = {replica: lanes_of(by_replica[replica]) for replica in sorted(by_replica)[:REPLICAS]}
    high = min(max(LANES / sum(max(places) + 1 for places in packed.values()), LANE[0]), LANE[1])
    made = {row.number("step"): row.number("version") for row in rows if row.event == "bumped"}
    versions = {part.version for mine in by_replica.values() for sample in mine for part in sample.parts}
    names = version_names({*versions, *made.values()})

    boxes = [{"lane": "trainer", "tall": 0.36, **box} for box in trainer_steps(rows, made, names)]
    for replica, places in packed.items():
        count = max(places) + 1
        lane = {"lane": f"replica {replica}", "tall": count * high, "gap": 0.16}
        for sample, place in zip(by_replica[replica], places, strict=True):
            at = {**lane, "low": place / count, "high": (place + 0.86) / count}
            middle = {**lane, "low": (place + 0.36) / count, "high": (place + 0.5) / count}
            for part, after in zip(sample.parts, [*sample.parts[1:], None], strict=True):
                boxes.append({**at, "kind": names[part.version], "left": part.left, "right": part.right})
                if after is not None:
                    boxes.append({**middle, "kind": "joint", "left": part.right, "right": after.left})
            if sample.end in ("failed", "cancelled"):
                end = sample.parts[-1].right
                boxes.append({**middle, "kind": "given up", "left": end, "right": end})
    table = pd.DataFrame(boxes)
    kinds = dict.fromkeys([*names.values(), *table["kind"]])
    table = table.assign(
        left=table["left"] - began,
        right=table["right"] - began,
        kind=table["kind"].astype(pd.CategoricalDtype(list(kinds))),
    )
    many = len(by_replica)
    shown = f", the first {REPLICAS} of {many} replicas" if many > REPLICAS else ""
    return with_attrs(table, phase=phase, shown=shown, **time_axis(rows))


def time_axis(rows: Sequence[Row]) -> dict[str, Any]:
    """A sync is a band: it begins when the version is made, and waits for calls in flight."""
    began = rows[0].time
    return {
        "ended": rows[-1].time - began,
        "bands": [(left - began, right - began) for left, right in sync_spans(rows)],
    }


def trainer_steps(rows: Sequence[Row], made: dict[int, int], names: dict[int, str]) -> list[dict[str, Any]]:
    """A step from its first call to its last, in the colour of the version that it makes; a thin line while it waits for groups."""
    by_step: dict[int, list[TrainerCall]] = defaultdict(list)
    for call in calls(rows):
        if call.row.event in TRAINING:
            by_step[call.row.number("step")].append(call)
    boxes: list[dict[str, Any]] = []
    for step, mine in by_step.items():
        kind = names[made[step]] if step in made else "given up step"
        whole = f"step {step}, version {made[step]}" if step in made else f"step {step} given up"
        span = {"left": mine[0].left, "right": mine[-1].right, "low": 0.45, "high": 0.55}
        boxes.append({"kind": kind, "words": f"{whole}|step {step}|{step}", **span})
        for call in mine:
            state = "log-probabilities" if TRAINING[call.row.event] == "logprobs" else ""
            boxes.append({"kind": kind, "state": state, "left": call.left, "right": call.right})
    return boxes


def version_names(versions: set[int]) -> dict[int, str]:
    """The name of each version in the legend, where versions that share a colour are named together."""
    names: dict[int, str] = {}
    for first in range(COLOURS):
        same = sorted(version for version in versions if version % COLOURS == first)
        words = ", ".join(map(str, same)) if len(same) < 4 else f"{same[0]}, {same[1]} ... {same[-1]}"
        names |= dict.fromkeys(same, words if names else f"version {words}")
    return dict(sorted(names.items()))


def lanes_of(samples: Sequence[tables.Attempt]) -> list[int]:
    """The lane of each sample: the first that is free when it begins."""
    free: list[float] = []
    places = []
    for sample in samples:
        left, right = sample.parts[0].left, sample.parts[-1].right
        place = next((place for place, until in enumerate(free) if until <= left), len(free))
        free[place : place + 1] = [right]
        places.append(place)
    return places


def buffer_over_time(data: RunData) -> pd.DataFrame:
    _, rows = shown_loop(data)
    table, limits, axis = tables.buffer(rows), tables.capacity(rows), time_axis(rows)
    table = table.assign(x=table["time"] - rows[0].time)
    # From the loop's first moment to its last.
    empty = pd.DataFrame([{"x": 0.0, "unfinished": 0, "complete": 0}])
    table = pd.concat([empty, table, table.iloc[-1:].assign(x=axis["ended"])])
    lines = table.melt("x", ["complete", "unfinished"], var_name="kind")
    places = [Mark(limits["places"], f"limit, {limits['places']} places", "bad")] if "places" in limits else []
    return with_attrs(lines, marks=places, **axis)


# -- steps and loops -----------------------------------------------------------------------------------------------------


def last_steps(data: RunData) -> pd.DataFrame:
    """Time of each step by part, with the share of waiting."""
    table = tables.steps(data.records, shown_loop(data)[0]).iloc[-SHOWN_STEPS:]
    share = (table["exposed_generation"] / table["total"].where(table["total"] > 0)).fillna(0.0)
    return table.assign(place=table["step"], words=[f"{part:.0%}" for part in share])


def every_loop(data: RunData) -> pd.DataFrame:
    table = tables.loops(data.records)
    return table.assign(place=table["loop"].map(LOOP), words=[amount(total, "s") for total in table["total"]])


# -- learning ------------------------------------------------------------------------------------------------------------


def rewards(data: RunData) -> pd.DataFrame:
    """The mean reward of the samples of each update, with their range."""
    table = tables.updates(data.records, shown_loop(data)[0])
    names = {"update": "x", "rollout/reward": "value", "rollout/reward_min": "low", "rollout/reward_max": "high"}
    if not names.keys() <= {*table}:
        raise NotMeasured("the ledger has no rewards")
    return table.rename(columns=names)[[*names.values()]].dropna()


def losses(data: RunData) -> pd.DataFrame:
    return results_by_update(data, {"train/global_loss": ""})


def divergences(data: RunData) -> pd.DataFrame:
    names = {"train/gen_kl_error": "of the policies that generated", "train/kl_penalty": "of the reference policy"}
    return results_by_update(data, names)


def results_by_update(data: RunData, names: dict[str, str]) -> pd.DataFrame:
    """Results of the trainer: a line for each of these names that it gave."""
    table = tables.updates(data.records, shown_loop(data)[0])
    given = [name for name in names if name in table]
    if not given:
        raise NotMeasured("the trainer recorded no such results")
    lines = table.melt("update", given, var_name="kind").dropna()
    return lines.assign(x=lines["update"], kind=lines["kind"].map(names))


# -- groups and tokens ---------------------------------------------------------------------------------------------------


def tokens_by_lag(data: RunData) -> pd.DataFrame:
    """How many trained tokens have each lag; beyond the window of a sampler that bounds it they are wrong."""
    phase, rows = shown_loop(data)
    lags = tables.lags(data.records, phase)
    table = lags.groupby("lag")["tokens"].sum().reset_index()
    total, window = int(table["tokens"].sum()), tables.capacity(rows).get("window")
    bound = window if window is not None and data.config.get("sampler") in (*BY_TARGET, *BY_START) else None
    table = table.assign(
        place=table["lag"],
        value=table["tokens"],
        words=[f"{tokens}\n{tokens / total:.0%}" for tokens in table["tokens"]],
        tone=["bad" if bound is not None and lag > bound else "" for lag in table["lag"]],
    )
    edge = {} if bound is None else {"edge": (bound + 0.5, f"limit: {counted(bound, 'version')}")}
    return with_attrs(table, total=total, mean=tables.lag_columns(lags)["mean lag"], **edge)


def ends_of_groups(data: RunData) -> pd.DataFrame:
    table = tables.ends(data.records, shown_loop(data)[0])
    totals = table.groupby("end")["groups"].sum()
    words = {f"n_{end}": count for end, count in totals.items()}
    table = table.rename(columns={"version": "place", "end": "kind", "groups": "value"})
    return with_attrs(table, count=counted(int(totals.sum()), "group"), **words)


def drift_by_position(data: RunData) -> pd.DataFrame:
    """A line for each lag; its name has the means over its tokens."""
    table = tables.drift(data.records, data.run.dir)
    weighted = table[["KL", "ratio"]].mul(table["tokens"], axis=0).groupby(table["lag"]).sum()
    means = weighted.div(table.groupby("lag")["tokens"].sum(), axis=0)
    names = {lag: f"lag {lag}: KL {row['KL']:.2g} per token, ratio {row['ratio']:.4g}" for lag, row in means.iterrows()}
    return table.assign(x=table["position"], value=table["mismatch"], kind=table["lag"].map(names))


def recomputed_tokens(data: RunData) -> pd.DataFrame:
    shown_loop(data)
    rows = data.records[data.records["phase"] == "verify"]
    counts = {str(name): float(value) for name, value in zip(rows["metric"], rows["value"], strict=True)}
    sentence, tone = "Recomputation: the run ended before this phase.", "faint"
    if "wrong_stamps" in counts:
        tokens, decidable, wrong = (int(counts[name]) for name in ("tokens", "decidable", "wrong_stamps"))
        share = counts["samples_over_syncs"] / counts["samples"] if counts["samples"] else 0.0
        tone = "bad" if wrong else "good"
        sentence = (
            f"Recomputation: {tokens:,} tokens under the weights of every version; {decidable:,} of them are decidable, "
            f"{wrong:,} have a wrong version. {share:.0%} of the samples span a sync."
        )
    return pd.DataFrame([{"row": 0, "column": "", "start": 0.0, "words": sentence, "tone": tone}])


# -- a forecast ----------------------------------------------------------------------------------------------------------

WIDEST = 8  # versions


def prepare(run: Run) -> Callable[..., pd.DataFrame]:
    frame = run.frame()
    phase = tables.shown(frame)
    if not phase:
        raise NotMeasured("no loop of this run has a complete sample yet")
    rows = tables.ledger(frame, phase)
    done = line(rows)

    def table(**changes: Any) -> pd.DataFrame:
        words = ", ".join(f"{name} {value}" for name, value in changes.items())
        possible = forecast(rows, **changes).rows
        return pd.DataFrame([{"loop": f"measured: {phase}", **done}, {"loop": f"forecast: {words}", **line(possible)}])

    return table


def line(rows: Sequence[Row]) -> dict[str, float]:
    reached, lags = pace(rows), tables.lags_of(rows)
    wasted = next((row.number("wasted", 0) for row in rows if row.event == "ended"), 0)
    return {
        "seconds": rows[-1].time - rows[0].time,
        "steps per second": reached["steps_per_second"],
        "exposed generation": reached["exposed_generation"],
        **tables.lag_columns(lags),
        "tokens trained": int(lags["tokens"].sum()),
        "tokens wasted": wasted,
    }


WHAT_IF = WhatIf(title="What if", names={"sampler": (*SAMPLERS,)}, numbers={"window": (0, WIDEST)}, prepare=prepare)


def heading(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp") if config[name] > 1]
    served = counted(config["replicas"], "replica") + (f" of {config['infer_tp']}" if config["infer_tp"] > 1 else "")
    return [
        ", ".join([config["size"], *sizes]), served, f"{config['sampler']}, window {config['window']}",
        f"at a sync: {config['at_sync']}", counted(config["steps"], "step"),
    ]  # fmt: skip


SECONDS = dict.fromkeys(("total", *PARTS), "s")
VERSIONS = Lanes(
    rows=versions_over_time,
    heading="Phase {phase}: a bar is a sample, its colour the weight version of its tokens{shown}",
    looks={
        "joint": Look("ink", "sample that spans a sync"),
        "given up": Look("ink", shape="cross"),
        "given up step": Look("faint", listed=False),
        "log-probabilities": Look("faint", hatch="////"),
    },
)
BUFFER = Lines(
    rows=buffer_over_time,
    heading="Groups in the buffer (grey bands: syncs, from request to publication)",
    looks={"complete": Look("ink"), "unfinished": Look("faint")},
    label="groups",
    about="time since the loop began",
    x_unit="s",
    stacked=True,
    height=2.0,
)
STEPS = Levels(
    rows=last_steps,
    heading="Time of each step, and the share of waiting",
    looks=PART_LOOKS,
    label="time",
    about="step (n = 1 each)",
    unit="s",
    height=3.4,
    share=6,
)
EVERY_LOOP = Levels(
    rows=every_loop,
    heading="Time of each loop over the same groups",
    looks=PART_LOOKS,
    legend=False,
    across=True,
    label="time (n = 1 each)",
    unit="s",
    share=5,
)
LAGS = Levels(
    rows=tokens_by_lag,
    heading="Lag of {total:,} trained tokens, mean {mean:.2f} versions",
    label="trained tokens",
    about="lag: version during training minus version of the token",
    height=3.1,
    share=6,
)
ENDS = Levels(
    rows=ends_of_groups,
    heading="How {count} ended",
    looks={end: replace(look, word=f"{look.word or end} ({{n_{end}}})") for end, look in END_LOOKS.items()},
    label="groups",
    about="version when the group ended",
    share=5,
)
DRIFT = Lines(
    rows=drift_by_position,
    title="Drift by lag and position",
    heading="Drift of the policy: trainer's minus recorded log-probability",
    label="mean |difference|",
    about="position in the answer",
    height=2.8,
    zero=True,
)
UPDATE = "optimizer update"
REWARDS = Lines(
    rows=rewards, heading="Reward of the samples: mean and range", label="reward", about=UPDATE, height=2.6, zero=True
)
LOSSES = Lines(rows=losses, heading="Loss", label="loss", about=UPDATE, height=2.6)
DIVERGENCES = Lines(
    rows=divergences,
    heading="KL divergence of the trained policy",
    label="KL per token",
    about=UPDATE,
    height=2.6,
    zero=True,
)
CHARTS = Charts(
    plots={
        "versions": Plot("Versions over time, by replica", [VERSIONS, BUFFER], below=True),
        "steps": Plot("Where the time went", [STEPS, EVERY_LOOP]),
        "groups": Plot("Lag of tokens, ends of groups", [LAGS, ENDS]),
        "learning": Plot("Reward, loss and KL by update", [REWARDS, LOSSES, DIVERGENCES]),
        "drift": DRIFT,
        "recomputed": Matrix(rows=recomputed_tokens, title="Recomputation", heading=" ", heads=False),
    },
    what_if=WHAT_IF,
    overview=(("versions",), ("steps",), ("groups",), ("learning",), ("drift",), ("recomputed",), ("verdict",)),
    words=heading,
    ready=lambda data: bool(data.order) and tables.shown(data.records) != "",
    tables={
        "steps": Table("Every step", lambda data: tables.steps(data.records), units={**SECONDS, "replicas_idle": "s"}),
        "replicas": Table("Every replica", lambda data: tables.replicas(data.records), units={"generating": "s"}),
        "loops": Table("Loop by loop", lambda data: tables.loops(data.records), units=SECONDS),
        "bound": Table(
            "Measured against bound", lambda data: tables.bound(data.records), units={"measured": ROW, "bound": ROW}
        ),
        "updates": Table("Every update", lambda data: tables.updates(data.records)),
        "drift": Table("Drift by lag and position", lambda data: tables.drift(data.records, data.run.dir), "mismatch"),
        "lags": Table("Lag of trained tokens", lambda data: tables.lags(data.records), "lag"),
        "ends": Table("How groups ended", lambda data: tables.ends(data.records)),
    },
)
