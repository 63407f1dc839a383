"""Logged numbers against those counted from the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.results.verdict import Missing
from kit.stream.history import ENDS
from kit.stream.judge.rules import counted, many

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.stream.history import Id, Ledger, Row
    from kit.stream.judge.rules import Finding

EXACT = 1e-9
MILLISECOND = 1e-3


@counted
def metrics_true(ledger: Ledger) -> Finding:
    """Do the logged numbers equal those counted from the ledger?"""
    rows, compared = ledger.need("metrics", "version"), 0
    for counts, slack in ((_counts(ledger, rows[0]), EXACT), (_seconds(ledger), MILLISECOND)):
        for row, true in counts:
            for name in true.keys() & row.ids.keys():
                compared += name != "version"
                if abs(float(row[name]) - true[name]) > slack * max(1.0, abs(true[name])):
                    yield f"{row} states {name} {row[name]}; {true[name]:g} by the rows"
    if not compared:
        raise Missing(f"no `metrics` event has one of groups, tokens, lag_max, lag_mean, queue, {', '.join(TOTALS)}")
    return f"{many(compared, 'number')} in {many(len(rows), 'row')}"


def _counts(ledger: Ledger, first: Row) -> Iterator[tuple[Row, dict[str, float]]]:
    """What each row of metrics should state: of its update, and totals."""
    in_weights = {row.at for row in ledger.trained()}
    totals: dict[str, float] = dict.fromkeys(TOTALS, 0)
    ready: set[Id] = set()
    for row in ledger.rows:
        if row.event == "metrics":
            if ledger.resumed and row is first:  # totals may go on from those of the run before
                totals |= {name: float(row[name]) for name in totals.keys() & row.ids.keys()}
            version = {"version": ledger.version_at(row)} if ledger.by_event["bumped"] else {}
            yield row, {**totals, **version, "queue": len(ready), **_of_update(ledger, row)}
        if f"total_{row.event}" in totals and row.event != "trained" and "sample" not in row.ids:
            totals[f"total_{row.event}"] += 1
        totals["total_generated"] += row.number("count", 0) if row.event == "tokens" else 0
        totals["total_trained"] += ledger.tokens([row["group"]]) if row.at in in_weights else 0
        if row.event in ("ready", "place") and any(
            one.event == "ready" for one in ledger.life[row["group"]] if one.at <= row.at
        ):
            ready.add(row["group"])  # `place`: again, after its step was aborted
        elif row.event == "selected" or row.ends_group:
            ready.discard(row["group"])


TOTALS = [f"total_{name}" for name in ("reserved", *ENDS, "generated", "trained")]  # the last two are tokens


def _seconds(ledger: Ledger) -> Iterator[tuple[Row, dict[str, float]]]:
    """What the time between two rows of metrics went to, as the row `logged` should state it.

    It is what the trainer was asked first and has not answered, else a sync, else waiting for generation.
    """
    logged = {(row.get("step"), row.get("update")): row for row in ledger.by_event["logged"]}
    spent: dict[str, float] = dict.fromkeys(SECONDS, 0.0)
    asked: list[str] = []
    syncing, last = False, ledger.rows[0].time
    for row in ledger.rows:
        doing = f"s_{DOING[asked[0]]}" if asked else "s_sync" if syncing else "s_exposed_generation"
        spent[doing] += row.time - last
        last, of = row.time, str(row.get("of"))
        if row.event in DOING:
            asked.append(row.event)
        elif row.event in ("done", "error") and of in asked:
            asked.remove(of)
        elif row.event in ("sync_begin", "synced") or of == "sync":
            syncing = row.event == "sync_begin"
        elif row.event == "metrics":
            if told := logged.get((row.get("step"), row.get("update"))):
                yield told, {**spent, "s_total": sum(spent.values())}
            spent = dict.fromkeys(SECONDS, 0.0)


DOING = {"begin": "training", "microbatch": "training", "finish": "training", "logprobs": "logprobs"}
SECONDS = ("s_training", "s_logprobs", "s_sync", "s_exposed_generation")


def _of_update(ledger: Ledger, metrics: Row) -> dict[str, float]:
    """The groups of its update, by the rows before it."""
    same = [name for name in ("step", "update") if name in metrics.ids]
    mine = [
        row
        for row in ledger.by_event["trained"]
        if row.at < metrics.at and all(row.get(name) == metrics[name] for name in same)
    ]
    with_tokens = [row for row in mine if not ledger.is_empty(row["group"])]
    lags = [
        ledger.version_during(row) - min(ages) for row in with_tokens if (ages := ledger.oldest(row["group"]).values())
    ]
    if not same or not lags or len(lags) < len(with_tokens):
        return {}
    tokens = ledger.tokens({row["group"] for row in mine})
    return {"groups": len(mine), "tokens": tokens, "lag_max": max(lags), "lag_mean": sum(lags) / len(lags)}
