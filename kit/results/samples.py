"""Samples: what a bench measures again and again. Each is a record: its metric is the rule that judges it, or says what kind of number it
is; the ids `what` and `who` name the row that it belongs to. A row has the median and the spread of its samples.

The rows of a run have the keys of `data/reference`, so that results of named machines and of this one read alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.results.comparison import Recorded, machine
from kit.results.frames import read_ids, with_ids
from kit.results.records import NOTEBOOK
from kit.results.rules import Measure, Measured, Rule, measure_checks, select
from kit.results.units import amount, columns, counted

if TYPE_CHECKING:
    import pandas as pd

    from kit.results.run import Run

SEAT = "seat"  # the ranks of a World of the bench, with their devices
OTHERS = "others_used"  # how many cores other processes of the machine used while a part was measured
NOTED = 0.1  # from this share of a machine's cores on a result says that others used them
CEILING = "_ceiling"  # ends the metric of the best that the machine allows, beside the samples


def medians(metric: str, *, worst: bool = False) -> Measure:
    """The median over a row's samples, or the largest of them; an answer for each row."""

    def measure(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured | list[Measured]:
        rows = with_ids(select(frame, metric=metric), "what")
        answers = []
        for subject, samples in rows.groupby("what", sort=False):
            values, notes = samples["value"].dropna(), samples["text"].iloc[-1]
            if values.empty:
                answers.append(Measured(None, notes, of=str(subject)))
                continue
            low, high = (amount(number, samples["unit"].iloc[0]) for number in (values.min(), values.max()))
            spread = f"{'largest' if worst else 'median'} of {counted(len(values), 'sample')}, {low} to {high}"
            value = float(values.max() if worst else values.median())
            answers.append(Measured(value, f"{spread}; {notes}" if notes else spread, of=str(subject)))
        return answers

    return measure


def median_rule(name: str, question: str, limit: float, unit: str = "x", *, worst: bool = False) -> Rule:
    """A rule about the samples of its own name."""
    return Rule(name, question, medians(name, worst=worst), limit=limit, unit=unit)


def sample_rows(frame: pd.DataFrame, rules: Sequence[Rule], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each thing that was measured, in the order of the bench."""
    by_name = {rule.name: rule for rule in rules}
    # What the rules themselves judge: a row is met exactly if its check passes.
    judged = {
        (rule.name, answer.of): answer.value
        for rule, finding in measure_checks(frame, config, rules)
        for answer in ([finding] if isinstance(finding, Measured) else finding)
    }
    samples = with_ids(frame, "what", "who")
    ceilings = samples[samples["metric"].str.endswith(CEILING)].groupby(["what", "who"])["value"].median()
    rows = []
    samples = samples[~samples["metric"].str.endswith(CEILING)]
    for (metric, subject, who), group in samples.groupby(["metric", "what", "who"], sort=False):
        values, rule = group["value"].dropna(), by_name.get(str(metric))
        value = judged.get((str(metric), str(subject)))
        limit = rule.limit_for(config) if rule else None
        ids = read_ids(group["ids"].iloc[-1])
        rows.append(
            {
                "what": subject,
                "who": who,
                "unit": group["unit"].iloc[0],
                "median": None if values.empty else float(values.median()),
                "low": None if values.empty else float(values.min()),
                "high": None if values.empty else float(values.max()),
                "n": len(values),
                "limit": limit,
                "ceiling": ceilings.get((subject, who)),
                "note": group["text"].iloc[-1],
                "ids": {name: value for name, value in ids.items() if name not in {"what", "who"}},
                "met": None if rule is None or value is None or limit is None else rule.holds(value, limit),
            }
        )
    return rows


def reported_rows(run: Run, rules: Sequence[Rule]) -> dict[str, Any]:
    """The rows of a bench's run, complete or not, with where they are from."""
    frame, provenance = run.frame(), run.provenance
    parts = frame[(frame["metric"] == "seconds") & (frame["rank"] == NOTEBOOK)]
    places = with_ids(frame[frame["metric"] == SEAT], "devices").drop_duplicates(["value", "devices", "text"])
    others = with_ids(frame[frame["metric"] == OTHERS], "of")
    seats = zip(places["value"].astype(int), places["devices"], places["text"], strict=True)
    return {
        "bench": run.lab.removeprefix("bench-"),
        "rows": sample_rows(frame, rules, run.config),
        "provenance": provenance.get("rank0", provenance),
        "seats": [{"ranks": ranks, "devices": devices.split(","), "why": why} for ranks, devices, why in seats],
        "parts": dict(zip(parts["phase"], parts["value"].round(3), strict=True)),
        "others": [
            {"part": part, "used": round(used, 2), "cores": int(cores)}
            for part, used, cores in zip(others["phase"], others["value"], others["of"], strict=True)
        ],
        "ended": run.status,
    }


def rows_text(data: Mapping[str, Any]) -> str:
    """The rows as a table, the notes, a line about the machine, and the device of each rank."""
    head, cells = Recorded("", data["provenance"], data["rows"]).table
    notes = [f"{row['who']}, {row['what']}: {row['note']}" for row in data["rows"] if row["note"]]
    seats = [f"seats: {seated(seat)}" for seat in data["seats"]]
    busy = [shared for other in data["others"] if (shared := others_text(other))]
    return "\n".join([columns([[*head], *cells]), "", *notes, "", machine(data["provenance"]), *seats, *busy])


def others_text(others: Mapping[str, Any]) -> str:
    """What other processes used while a part was measured; empty where that is little."""
    if others["used"] < NOTED * others["cores"]:
        return ""
    used = f"{others['used']:g} of {counted(others['cores'], 'core')}"
    return f"others: while {others['part']} was measured, other processes of this machine used {used}: its times are not a quiet machine's"


def seated(seat: Mapping[str, Any]) -> str:
    """The ranks and their devices, in one line."""
    return f"{counted(seat['ranks'], 'rank')} on {', '.join(dict.fromkeys(seat['devices']))} ({seat['why']})"


def seat_of(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The devices of the ranks of a lab's run, from its provenance."""
    return {name: provenance["world"][name] for name in ("ranks", "devices", "why")}
