"""Checks the controller's own notes and logged numbers against the events and commands that the runner recorded at its ports.

An event's row has the id `core`, a command's row the id `to`; a note has neither. A note without its event and an event without its
note are violations, so a controller cannot pass the other checks by writing false notes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from kit.results.ledger import is_note
from kit.results.progress import GroupTally
from kit.results.records import Id, Row, numbers
from kit.results.rules import Missing, Violations
from kit.results.units import counted
from kit.stream.judge.history import ANSWERS, ENDS, LoopLedger, ends_group, ends_sync

EVENTS = {"prompt", "exhausted", "started", "tokens", "completed", "cancelled", "left", "died", "published", "synced"}
EVENTS |= {"granted", "done", "error", "logged", "logger_failed", "chosen"}
TO = {
    **dict.fromkeys(("begin", "microbatch", "finish", "abort", "clear", "logprobs", "discard"), "trainer"),
    **dict.fromkeys(("generate", "cancel"), "replica"),
    **dict.fromkeys(("acquire", "release"), "desk"),
    "sync": "sync",
    "metrics": "log",
    "next_prompt": "data",
    "ended": "runner",
}
# Opening notes, before the first event; the controller's caller writes the first two.


def notes_backed(ledger: LoopLedger) -> Violations:
    """Does every note of the controller match an event or command at its ports, and vice versa?"""
    if ledger.foreign:
        raise Missing("no row has the id `core`, which marks the events of ports")
    for rule in (_genuine, _prompts, _requests, _syncs, _trained, _selected, _recomputed, _cleared, _gone, _filtered):
        yield from rule(ledger)
    notes = sum(is_note(row) for row in ledger.rows)
    return f"{counted(notes, 'note')} checked against {counted(len(ledger.rows) - notes, 'event')} and commands at the ports"


def _genuine(ledger: LoopLedger) -> Iterator[str]:
    """No note may have the name of an event or a command, and replicas join before the first event."""
    begun = False
    for row in ledger.rows:
        begun = begun or ("core" in row.ids and row.event != "begins")
        if "core" not in row.ids and (row.event in EVENTS or (row.event == "failed" and "sample" in row.ids)):
            yield f"{row}: no port reported it"
        elif row.event in TO and "core" not in row.ids and row.get("to") != TO[row.event]:
            yield f"{row}: sent to {row.get('to', 'no port')}, not to the port {TO[row.event]}"
        elif row.event == "joined" and begun and is_note(row):
            yield f"{row}: written after the loop began"


def _prompts(ledger: LoopLedger) -> Iterator[str]:
    """Each group comes from a prompt that the data gave. One prompt may be left over when the loop ends."""
    at_hand: dict[Id, Row] = {}
    for row in ledger.rows:
        if row.event == "prompt":
            at_hand[row["group"]] = row
        elif row.event == "reserved" and at_hand.pop(row["group"], None) is None:
            yield f"{row}: the data gave no prompt for this group"
    last = ledger.by_event["prompt"][-1:]
    yield from (f"{row}: the prompt never became a group" for row in at_hand.values() if row not in last)


def _requests(ledger: LoopLedger) -> Iterator[str]:
    """`sent` and `generate` come in pairs, and groups with unanswered requests never exceed the slots."""
    slots = ledger.limit("slots")
    ordered: dict[tuple[Id, ...], Row] = {}
    open_: dict[tuple[Id, Id], Id] = {}  # the replica of each unanswered request
    for row in ledger.rows:
        about = tuple(row.get(name, "") for name in ("group", "sample", "replica", "attempt"))
        if row.event == "generate":
            ordered[about] = row
            open_[row["group"], row["sample"]] = row["replica"]
            groups = {group for group, _ in open_}
            if slots is not None and len(groups) > slots:
                yield f"{row}: {counted(len(groups), 'group')} have unanswered requests, slots: {slots}"
        elif row.event == "sent" and ordered.pop(about, None) is None:
            yield f"{row}: no such request went to a replica"
        elif row.event in ("left", "died"):
            open_ = {key: replica for key, replica in open_.items() if replica != row.get("replica")}
        elif "sample" in row.ids and (row.event in ("completed", "failed", "cancelled") or row.get("of") == "generate"):
            key = row["group"], row["sample"]
            if open_.get(key) == row.get("replica", open_.get(key)):
                open_.pop(key, None)
    yield from (f"{row}: the request has no note `sent`" for row in ordered.values())


def _syncs(ledger: LoopLedger) -> Iterator[str]:
    """Each note is of a sync that was ordered, and vice versa. A sync may be ordered replica by replica."""
    stated, ordered = (Counter(row["version"] for row in ledger.by_event[name]) for name in ("sync_begin", "sync"))
    for version in stated.keys() | ordered.keys():
        if stated[version] > ordered[version] or not stated[version]:
            yield f"{stated[version]} `sync_begin` notes and {counted(ordered[version], 'sync')} of version {version}"


def _trained(ledger: LoopLedger) -> Iterator[str]:
    """A group is trained if the trainer executed its microbatch and the finish of that update."""
    fed: defaultdict[tuple[Id, int], set[Id]] = defaultdict(set)
    unnoted: dict[tuple[Id, int], dict[Id, Row]] = {}
    finished: set[Id] = set()
    for row in ledger.rows:
        of, update = row.get("of"), row.number("update", 0)
        if row.event == "done" and of == "microbatch":
            fed[row["step"], update] |= {*numbers(row["groups"])}
        elif row.event == "done" and of == "finish":
            finished.add(row["step"])
            unnoted[row["step"], update] = dict.fromkeys(fed.pop((row["step"], update), ()), row)
        elif row.event == "abort":
            fed = defaultdict(set, {key: groups for key, groups in fed.items() if key[0] != row["step"]})
        elif row.event == "trained" and unnoted.get((row["step"], update), {}).pop(row["group"], None) is None:
            yield f"{row}: the trainer executed no update with the group"
        elif row.event == "bumped" and row["step"] not in finished:
            yield f"{row}: the trainer executed no finish of the step"
    for group, row in (pair for groups in unnoted.values() for pair in groups.items()):
        yield f"{row}: group {group} is in the weights but has no note `trained`"


def _selected(ledger: LoopLedger) -> Iterator[str]:
    """The trainer gets only selected groups, one step at a time; every selected group is trained or has another end."""
    chosen: defaultdict[Id, set[Id]] = defaultdict(set)
    current: Id | None = None
    for row in ledger.rows:
        step = row.get("step")
        if row.event == "selected":
            if current not in (None, step):
                yield f"{row}: step {current} is still open"
            current = step
            chosen[row["step"]].add(row["group"])
        elif row.event in ("microbatch", "logprobs") and "to" in row.ids:
            for group in {*numbers(row["groups"])} - chosen[row["step"]]:
                yield f"{row}: group {group} was not selected for the step"
        elif row.event == "bumped":
            trained = {
                row_trained["group"] for row_trained in ledger.by_event["trained"] if row_trained["step"] == step
            }
            left = {group for group in chosen[row["step"]] - trained if not ledger.ends(group)}
            yield from (f"{row}: group {group} was selected but not trained" for group in sorted(left, key=str))
        current = None if row.event in ("abort", "bumped") and current == step else current


def _recomputed(ledger: LoopLedger) -> Iterator[str]:
    """A group is trained after the trainer has recomputed the log-probabilities that the settings name. The trainer answers in order, so
    a controller may send both without waiting."""
    wanted = [name for name in ("previous", "reference") if ledger.setting(name) == "recomputed"]
    there: set[tuple[Id, Id, Id]] = set()
    for row in ledger.rows:
        if row.event == "done" and row.get("of") == "logprobs":
            there |= {(row["step"], row["which"], group) for group in numbers(row["groups"])}
        elif row.event == "done" and row.get("of") == "microbatch":
            needs = [(row["step"], which, group) for which in wanted for group in numbers(row["groups"])]
            for _, which, group in (key for key in needs if key not in there):
                yield f"{row}: the {which} log-probabilities of group {group} were not recomputed"


def _cleared(ledger: LoopLedger) -> Iterator[str]:
    carried: dict[tuple[Id, Id], Row] = {}
    trained = {(row["step"], row["group"]) for row in ledger.by_event["trained"]}
    for row in ledger.rows:
        if row.event == "done" and row.get("of") == "clear":
            pairs = ((row["step"], group) for group in numbers(row["groups"]))
            carried |= {key: row for key in pairs if key in trained}
        elif row.event == "cleared" and carried.pop((row["step"], row["group"]), None) is None:
            yield f"{row}: the trainer cleared no rows of this group"
    for (_, group), row in carried.items():
        yield f"{row}: the rows of group {group} were cleared but it has no note `cleared`"


def _gone(ledger: LoopLedger) -> Iterator[str]:
    """A group that is not trained leaves nothing on the trainer: its complete samples are discarded or cleared."""
    dropped = {row["group"] for row in ledger.by_event["discard"]}
    dropped |= {group for row in ledger.by_event["clear"] for group in numbers(row["groups"])}
    for group, samples in ledger.samples.items():
        for end in ledger.ends(group)[:1]:
            done = [
                row
                for sample in samples.values()
                for row in sample.completed
                if row.at < end.at and row.number("length", 1)
            ]
            if end.event != "cleared" and done and group not in dropped:
                yield f"{end}: {counted(len(done), 'complete sample')} of the group left on the trainer"


def _filtered(ledger: LoopLedger) -> Iterator[str]:
    for row in ledger.by_event["filtered"]:
        rewards = {
            sample.completed[-1].get("reward") for sample in ledger.samples[row["group"]].values() if sample.completed
        }
        if len(rewards) > 1:
            yield f"{row}: filtered although its rewards vary ({', '.join(sorted(map(str, rewards)))})"


EXACT = 1e-9
MILLISECOND = 1e-3


def metrics_true(ledger: LoopLedger) -> Violations:
    """Do the logged numbers, and the progress that the desk is told, match those counted from the ledger?"""
    yield from _reports(ledger)
    rows, compared, lacking = ledger.need("metrics", "version"), 0, _lacking(ledger)
    for counts, slack in ((_counts(ledger, rows[0]), EXACT), (_seconds(ledger), MILLISECOND)):
        for row, true in counts:
            for name in [name for name in true if name in row.ids and name not in lacking]:
                compared += name != "version"
                if abs(float(row[name]) - true[name]) > slack * max(1.0, abs(true[name])):
                    yield f"{row} states {name} {row[name]}; counted from the rows: {true[name]:g}"
    if not compared:
        raise Missing(f"no `metrics` event has one of groups, tokens, lag_max, lag_mean, queue, {', '.join(TOTALS)}")
    return f"{counted(compared, 'number')} compared in {counted(len(rows), 'row')}"


# The events that a number is counted from.
COUNTED_FROM = {
    **{f"total_{name}": (name,) for name in ("reserved", *ENDS)},
    "total_generated": ("tokens",),
    **dict.fromkeys(("tokens", "total_trained"), ("tokens", "completed", "trained")),
    **dict.fromkeys(("groups", "lag_max", "lag_mean"), ("trained",)),
    "queue": ("ready", "selected"),
    "s_sync": ("sync_begin", "synced"),
}


def _lacking(ledger: LoopLedger) -> set[str]:
    """The numbers that another system's ledger does not show, because it leaves out events that they are counted from."""
    if not ledger.foreign:
        return set()
    lacking = {"queue"} if ledger.ended and ledger.leaves_out_ends else set()
    numbers_of = [*ledger.by_event["metrics"], *ledger.by_event["logged"]]
    lacking |= {name for name, events in COUNTED_FROM.items() if any(map(ledger.leaves_out, events))}
    lacking |= {f"total_{name}" for name in ENDS if not any(map(ends_group, ledger.by_event[name]))}
    lacking &= {name for row in numbers_of for name in lacking & row.ids.keys() if row[name] != 0}  # 0 needs no rows
    open_syncs = len(ledger.by_event["sync_begin"]) - sum(map(ends_sync, ledger.rows))
    calls = [str(row["of"]) for row in ledger.of("done", "error") if row.get("of") in DOING]
    if any(map(ledger.leaves_out, calls)) or (ledger.ended and len(calls) < len(ledger.of(*DOING))):
        lacking |= {*SECONDS}
    elif "s_sync" in lacking or (ledger.ended and open_syncs > 0):
        lacking |= {"s_sync", "s_exposed_generation"}
    lost = sum(len([*ledger.on_replica(row)]) for row in ledger.of("died", "left"))
    answers = lost + sum("sample" in row.ids for row in ledger.of(*ANSWERS))
    return lacking | ({"s_replicas_idle"} if ledger.ended and answers < len(ledger.by_event["sent"]) else set())


def _reports(ledger: LoopLedger) -> Iterator[str]:
    size = ledger.limit("groups_per_step")
    if size is None or not ledger.by_event["ready"]:
        return
    progress = GroupTally(size)
    for row in ledger.rows:
        if row.event == "progress" and "stream" not in row.ids:
            yield from progress.wrong(row)
        else:
            progress.take(row)


def _counts(ledger: LoopLedger, first: Row) -> Iterator[tuple[Row, dict[str, float]]]:
    """Yield each `metrics` row with the numbers that it should state: those of its update, and totals."""
    trained = ledger.trained()
    in_weights = {row.at for row in trained}
    totals: dict[str, float] = dict.fromkeys(TOTALS, 0)
    ready: set[Id] = set()
    for row in ledger.rows:
        if row.event == "metrics":
            if ledger.resumed and row is first:  # totals may continue those of the earlier run
                totals |= {name: float(row[name]) for name in totals.keys() & row.ids.keys()}
            version = {"version": ledger.version_logged(row)} if ledger.by_event["bumped"] else {}
            queue = {"queue": len(ready)} if ledger.by_event["selected"] else {}
            yield row, {**totals, **version, **queue, **_of_update(ledger, row, trained)}
        if f"total_{row.event}" in totals and row.event != "trained" and "sample" not in row.ids:
            totals[f"total_{row.event}"] += 1
        totals["total_generated"] += row.number("count", 0) if row.event == "tokens" else 0
        totals["total_trained"] += ledger.tokens([row["group"]]) if row.at in in_weights else 0
        if ledger.waits_from(row):
            ready.add(row["group"])
        elif row.event == "abort":
            ready |= _back_unnoted(ledger, row)
        elif row.event == "selected" or ledger.is_end(row):
            ready.discard(row["group"])


def _back_unnoted(ledger: LoopLedger, abort: Row) -> set[Id]:
    """Groups that wait again after their step was aborted, if another system writes no `place`."""
    steps = [step for step in ledger.steps if step.abort is abort and ledger.leaves_out("place")]
    trained = {row["group"] for step in steps for row in step.trained}
    selected = {row["group"] for step in steps for row in step.of("selected")} - trained
    return {group for group in selected if all(end.at > abort.at for end in ledger.ends(group))}


TOTALS = [f"total_{name}" for name in ("reserved", *ENDS, "generated", "trained")]  # the last two are tokens


def _seconds(ledger: LoopLedger) -> Iterator[tuple[Row, dict[str, float]]]:
    """Yield each `logged` row with the seconds that it should state: how the time between two `metrics` rows was spent.

    The trainer's oldest unanswered command counts first, else a sync, else waiting for generation. Beside it, the mean over replicas of
    the time without a request, if the ledger has these.
    """
    if not ledger.by_event["done"]:
        return
    of_update: defaultdict[tuple[Id | None, ...], list[Row]] = defaultdict(list)
    for metrics in ledger.by_event["metrics"]:
        of_update[metrics.get("step"), metrics.get("update")].append(metrics)
    # By `metrics` row: the nearest one, since an update that is tried again may be logged again.
    logged: dict[int, Row] = {}
    for log in ledger.by_event["logged"]:
        if rows := of_update.get((log.get("step"), log.get("update"))):
            logged[min(rows, key=lambda metrics: abs(metrics.at - log.at)).at] = log
    spent: dict[str, float] = dict.fromkeys(SECONDS, 0.0)
    asked: list[str] = []
    idle, without_request = 0.0, _share_idle(ledger)
    shows_idle = ledger.by_event["joined"] and ledger.by_event["sent"]
    syncing, last = False, ledger.rows[0].time
    for row in ledger.rows:
        idle += (row.time - last) * next(without_request)
        doing = f"s_{DOING[asked[0]]}" if asked else "s_sync" if syncing else "s_exposed_generation"
        spent[doing] += row.time - last
        last, of = row.time, str(row.get("of"))
        if row.event in DOING:
            asked.append(row.event)
        elif row.event in ("done", "error") and of in asked:
            asked.remove(of)
        elif row.event in ("sync_begin", "synced") or of == "sync":
            syncing = row.event == "sync_begin" and not ledger.leaves_out("synced")
        elif row.event == "metrics":
            if stated := logged.get(row.at):
                of_replicas = {"s_replicas_idle": idle} if shows_idle else {}
                yield stated, {**spent, "s_total": sum(spent.values()), **of_replicas}
            spent, idle = dict.fromkeys(SECONDS, 0.0), 0.0


def _share_idle(ledger: LoopLedger) -> Iterator[float]:
    """For each row, the share of the replicas that had no request until then."""
    open_: dict[tuple[Id, Id], Id] = {}
    replicas: set[Id] = set()
    for row in ledger.rows:
        busy = {*open_.values()} & replicas
        yield 1 - len(busy) / len(replicas) if replicas else 0.0
        key, replica = (row.get("group", ""), row.get("sample", "")), row.get("replica")
        if row.event == "joined" and replica is not None:
            replicas.add(replica)
        elif row.event in ("left", "died") and replica is not None:
            replicas.discard(replica)
            open_ = {request: place for request, place in open_.items() if place != replica}
        elif row.event == "sent" and replica is not None:
            open_[key] = replica
        elif (
            "sample" in row.ids
            and row.event in ("completed", "failed", "cancelled")
            and open_.get(key) == row.get("replica", open_.get(key))
        ):
            open_.pop(key, None)


# Not read from the ports, since their rows are judged.
DOING = {"begin": "training", "microbatch": "training", "finish": "training", "logprobs": "logprobs"}
SECONDS = ("s_training", "s_logprobs", "s_sync", "s_exposed_generation")


def _of_update(ledger: LoopLedger, metrics: Row, trained: Sequence[Row]) -> dict[str, float]:
    """Return the numbers of the update of a `metrics` row, counted from the `trained` rows before it that no abort undid."""
    same = [name for name in ("step", "update") if name in metrics.ids]
    own_rows = [row for row in trained if row.at < metrics.at and all(row.get(name) == metrics[name] for name in same)]
    with_tokens = [row for row in own_rows if not ledger.is_empty(row["group"])]
    lags = [
        ledger.version_during(row) - min(ages) for row in with_tokens if (ages := ledger.oldest(row["group"]).values())
    ]
    if not same or (ledger.foreign and "step" not in same) or not lags or len(lags) < len(with_tokens):
        return {}
    tokens = ledger.tokens({row["group"] for row in own_rows})
    return {"groups": len(own_rows), "tokens": tokens, "lag_max": max(lags), "lag_mean": sum(lags) / len(lags)}
