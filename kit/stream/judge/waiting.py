"""Names what a loop without an end waits for, from the commands that nobody has answered."""

from __future__ import annotations

from collections.abc import Iterator

from kit.results.records import Id, Row
from kit.results.units import counted
from kit.stream.judge.history import LoopLedger, ends_group, open_sync

# Calls to the trainer, which `done` or `error` answers. Not read from the core, since that is judged.
CALLS = ("begin", "microbatch", "finish", "abort", "clear", "logprobs")


def waiting_for(ledger: LoopLedger) -> str:
    """What is unanswered at the end of the ledger; without anything, what is at hand and why nothing is done with it."""
    return "; ".join([*_unanswered(ledger)]) or "; ".join(["no command is unanswered", *_at_hand(ledger)])


def _unanswered(ledger: LoopLedger) -> Iterator[str]:
    requests = [
        (group, name, sample.sent[-1])
        for group, samples in ledger.samples.items()
        for name, sample in samples.items()
        if sample.waiting
    ]
    if requests:
        group, name, row = requests[0]
        replicas = sorted({str(row.get("replica", "?")) for _, _, row in requests})
        yield (
            f"{counted(len(requests), 'request')} on replica {', '.join(replicas)} unanswered, first sample {name} of group {group} "
            f"(sent in row {row.at})"
        )
    if calls := _open_calls(ledger):
        yield f"the trainer has not answered {calls[0].event} of step {calls[0].get('step', '?')} (row {calls[0].at})"
    if sync := open_sync(ledger.rows):
        there = {published["replica"] for published in ledger.by_event["published"] if published.at > sync.at}
        wanted = next((order.numbers("replicas") for order in ledger.by_event["sync"] if order.at >= sync.at), ())
        left = [str(replica) for replica in wanted if replica not in there]
        yield f"the sync of version {sync.get('version', '?')} (row {sync.at}) has not ended" + (
            f", not published on replica {', '.join(left)}" if left else ""
        )
    for kind, row in _open_pairs(ledger, "acquire", "granted", "kind").items():
        yield f"devices for {kind} not granted (requested in row {row.at})"
    for ask, answer in (("next_prompt", ("prompt", "exhausted")), ("admit", ("admitted",)), ("select", ("chosen",))):
        asked = ledger.by_event[ask]
        if len(asked) > sum(len(ledger.by_event[name]) for name in answer):
            yield f"{ask} unanswered (row {asked[-1].at})"


def _open_calls(ledger: LoopLedger) -> list[Row]:
    open_: list[Row] = []
    for row in ledger.rows:
        if row.event in CALLS and row.get("to") == "trainer":
            open_.append(row)
        elif row.event in ("done", "error"):
            answered = next(
                (call for call in open_ if call.event == row.get("of") and call.get("step") == row.get("step")), None
            )
            open_ = [call for call in open_ if call is not answered]
    return open_


def _open_pairs(ledger: LoopLedger, asks: str, answers: str, name: str) -> dict[Id, Row]:
    open_: dict[Id, Row] = {}
    for row in ledger.rows:
        if name in row.ids and row.event == asks:
            open_[row[name]] = row
        elif name in row.ids and row.event in (answers, "release"):
            open_.pop(row[name], None)
    return open_


def _at_hand(ledger: LoopLedger) -> Iterator[str]:
    version, steps = ledger.start + len(ledger.by_event["bumped"]), ledger.limit("steps")
    yield f"the version is {version}{f' of {steps}' if steps else ''}"
    prompts = [row["group"] for row in ledger.by_event["prompt"] if row["group"] not in ledger.life]
    if prompts:
        yield f"the prompt of group {prompts[-1]} has not become a group"
    holds = [row for row in ledger.rows if row.event in ("hold", "resume")]
    if holds and holds[-1].event == "hold":
        yield f"dispatch is held since row {holds[-1].at}"
    step = ledger.steps[-1] if ledger.steps else None
    if step is not None and step.bumped is None and step.abort is None:
        wanted = ledger.limit("groups_per_step")
        yield f"step {step.id} has {counted(len(step.of('selected')), 'group')}{f' of {wanted}' if wanted else ''}"
    there = [
        life
        for life in ledger.life.values()
        if not any(ends_group(row) or row.event in ("selected", "trained") for row in life)
    ]
    ready = sum(any(row.event == "ready" for row in life) for life in there)
    yield f"{counted(len(there), 'group')} in the buffer, {ready} complete"
    if ledger.by_event["exhausted"]:
        yield f"the data ended in row {ledger.by_event['exhausted'][0].at}"
