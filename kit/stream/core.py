"""The controller's core: an event changes the state by one rule, then the rules that follow from the state are applied in one order.

State and commands come from the event alone, so that a run can be replayed from its ledger. The rules lie in `generation` (dispatch,
replicas, syncs), `training` (selection, steps) and `groups` (ends); here is when each applies, and how a run ends.

| port | commands (ids) | events (ids) |
|---|---|---|
| data | next_prompt | prompt (group) or exhausted |
| replica | generate (group, sample, replica, attempt) | started, tokens (.., version, first, count), then a last answer |
| | | the last answer: completed (.., version, newest, length, reward), failed (.., why) or cancelled |
| replica | cancel (group, sample, replica) | cancelled, where no last answer was given before |
| replica | | joined, left, died (replica) |
| trainer | begin, finish (step, update), microbatch, clear (.., groups) | done (of, the same ids) or error (.., why) |
| trainer | logprobs (step, groups, which), abort (step) | the same |
| trainer | discard (group) | none: the rows of a group that is not trained |
| sync | sync (version, at_sync, replicas) | published (version, replica) for each, then synced (version), or error |
| desk | acquire (kind) | granted (kind) |
| desk | release (kind), progress (completed, target) | none; a release of what was not granted yet withdraws the request |
| log | metrics (step, update, version, numbers) | logged or logger_failed |
| sampler | admit (version), select (version, least, most) | admitted (target, -1: none), chosen (groups, evicted, aborted) |
| any | answer | to the event ask (of, question, asker) |

A port that raises is an `error` with the command's ids. Events about a sample have group, sample and replica; lists are texts ("3,4").
"""

from __future__ import annotations

from collections.abc import Callable

from kit.errors import BadInput
from kit.loop.messages import Command, Event, Map, listed
from kit.stream import generation, training
from kit.stream.generation import doom, end, fail, put_back
from kit.stream.settings import SAMPLERS, Resume, Settings, refusals
from kit.stream.state import Fields, Replica, State, Turn

Handler = Callable[[Turn, Event], None]
TRAINERS = ("begin", "microbatch", "finish", "abort", "clear", "logprobs")  # commands


def resume_from(state: State) -> Resume:
    """What to keep of a state between two steps. What is in flight or in the buffer is generated again."""
    held = {*state.buffer, *(one.replaces.id for one in state.owed if one.replaces is not None)}
    if state.step is not None:
        raise BadInput(f"step {state.step.id} is open; a run is resumed after a step, not inside one")
    if state.prompt >= 0:
        held.add(state.prompt)
    given = int(state.counts.get("reserved", 0)) + (state.prompt >= 0)
    return Resume(version=state.version, updates=state.updates, steps=state.steps, next=given, open=tuple(sorted(held)))


class Controller:
    """One pipeline's controller: `begin()`, then `step(state, event)` for every event. Refuses settings that cannot work (`BadInput`).

    Limits: a sample has one terminal answer (completed, failed or cancelled) for each time it was sent; the trainer answers in order.
    """

    def __init__(self, settings: Settings, *, pipeline: str = "", resume: Resume | None = None) -> None:
        if found := refusals(settings):
            raise BadInput("; ".join(found))
        self.settings = settings
        self.sampler = SAMPLERS.get(settings.sampler)
        self.pipeline = pipeline
        self.resume = resume

    def begin(self) -> tuple[State, tuple[Command, ...]]:
        """Ask for the generation's devices; dispatch starts when the first version is published."""
        settings, start = self.settings, self.resume
        fields = Fields(last=settings.steps, replicas=Map({one: Replica() for one in range(settings.replicas)}))
        if start is not None:
            fields.version, fields.updates, fields.steps = start.version, start.updates, start.steps
            fields.index, fields.accepted = start.version - 1, start.version * settings.groups
            fields.updates_at = Map({start.version: start.updates})
            fields.counts = Map({"reserved": start.next - len(start.open)})
        t = Turn(fields, settings, self.sampler, self.pipeline)
        for replica in t.replicas:
            t.note("joined", replica=replica)
        t.note("hold", version=t.version)
        report_progress(t)
        training.has(t, "generation")
        return State(t), tuple(t.commands)

    def step(self, state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        t = Turn(state, self.settings, self.sampler, self.pipeline)
        handler = HANDLERS.get(event.name)
        if handler is None:
            raise BadInput(f"the controller knows no event {event.name!r}; it knows {', '.join(HANDLERS)}")
        if not t.closed:
            handler(t, event)
            settle(t)
        return State(t), tuple(t.commands)


def settle(t: Turn) -> None:
    """What follows from the state, in this order: places that a selection gives back are there for the dispatch after it."""
    if not t.ending:
        if t.version >= t.last:
            abort_the_rest(t, "the run is over")
        training.end_shrunk_step(t)
        generation.sync_if_due(t)
        training.choose(t)
        training.train(t)
        generation.send(t)
        if t.version < t.last:
            generation.dispatch(t)
        report_progress(t)
        if is_done(t):
            t.ending = "done"
        elif is_stuck(t):
            end_of_data(t)
    if t.ending:
        wind_down(t)


# -- ends of a run --------------------------------------------------------------------------------------------------------


def is_done(t: Turn) -> bool:
    return t.version >= t.last and not t.held


def is_stuck(t: Turn) -> bool:
    """No prompt is left, and nothing is under way: what could follow from the state has been ordered already."""
    step = t.step
    trainer = step is not None and (step.unanswered or step.scoring or step.finishing or step.aborting)
    replicas = t.in_flight or t.waiting or t.held
    return t.exhausted and t.prompt < 0 and not (trainer or replicas or t.clearing or t.asked - {"admit"})


def end_of_data(t: Turn) -> None:
    """A clean end only if no group was taken for a step and none is left over; a partial step is never trained."""
    if t.step is None and not t.buffer:
        t.ending = "exhausted"
    else:
        taken = 0 if t.step is None else len(t.step.groups)
        fail(t, f"the data ended with {taken} of {t.need} groups of a step taken and {len(t.buffer)} in the buffer")


def wind_down(t: Turn) -> None:
    """End a run: first the trainer's step, then every group, then the devices. After an error nobody waits for the replicas."""
    step = t.step
    if step is not None and step.finishing:
        return  # the weights may move: whether they did is counted
    if step is not None and step.on_the_trainer:
        if not step.aborting:
            training.abort(t, step)
        return
    if step is not None:
        put_back(t)
    if t.clearing:
        return
    abort_the_rest(t, t.error or "the run is over")
    if not t.in_flight or t.error:
        close(t)


def abort_the_rest(t: Turn, why: str) -> None:
    for group in list(t.buffer.values()):
        if group.order < 0:
            doom(t, group, "aborted", why)


def close(t: Turn) -> None:
    for group in list(t.buffer.values()):
        how, why = group.ends or ("aborted", t.error or "the run is over")
        end(t, group, "failed" if how == "replaced" else how, why)
    for owed in t.owed:
        if owed.replaces is not None and owed.replaces.ends is not None:  # no prompt came to replace it
            end(t, owed.replaces, "failed", owed.replaces.ends[1])
    t.owed = ()
    for kind in sorted(t.granted | (t.asked & {"generation", "logprobs", "training"})):
        t.do("release", "desk", kind=kind)
    t.in_flight, t.replicas = 0, Map()  # after an error some may be in flight: their answers have no reader
    t.closed = True
    error = {"error": t.error} if t.error else {}
    t.do("ended", "runner", why=t.ending, version=t.version, updates=t.updates, **error, **t.counts)


# -- events that concern nobody else --------------------------------------------------------------------------------------


def report_progress(t: Turn) -> None:
    """Tell the desk how much of the awaited step is there, each 2 %: prefetched groups count, what is beyond the step does not."""
    need = t.need
    there = min(need, (0 if t.step is None else len(t.step.groups)) + len(t.buffer) - t.unfinished)
    if need > 0 and (part := 50 * there // need) != t.progress:
        t.progress = part
        t.do("progress", "desk", completed=there, target=need)


def on_granted(t: Turn, event: Event) -> None:
    if event.kind in t.asked:
        t.asked -= {event.kind}
        t.granted |= {event.kind}


def on_error(t: Turn, event: Event) -> None:
    """A command failed. What the loop does not need to be right is counted and goes on; everything else ends the run or the step."""
    of, why = event.of, event.why
    if of in TRAINERS:
        training.on_trainer(t, event)
    elif of == "generate":
        generation.on_failed(t, event)
    elif of == "sync":
        generation.on_sync_error(t, why)
    elif of == "metrics":
        on_logger_failed(t, event)
    elif of in ("progress", "answer", "release", "discard"):
        t.count("ignored_errors")
    else:
        fail(t, f"{of} failed: {why}")


def on_logger_failed(t: Turn, event: Event) -> None:
    t.count("logger_failed")
    t.note("logger_error", why=event.get("why", ""))


def on_ask(t: Turn, event: Event) -> None:
    """Answer a question from outside, whatever else is under way."""
    step = "" if t.step is None else f"step {t.step.id}: {t.step.finished} of {t.need} groups finished"
    t.do(
        "answer",
        event.get("asker", "asker"),
        of=event.of,
        question=event.get("question", 0),
        version=t.version,
        updates=t.updates,
        buffer=len(t.buffer),
        unfinished=t.unfinished,
        in_flight=t.in_flight,
        held=int(t.held),
        replicas=listed(t.replicas),
        step=step,
    )


def ignore(_: Turn, __: Event) -> None:
    """An event that is there for the ledger."""


HANDLERS: dict[str, Handler] = {
    "prompt": generation.on_prompt,
    "exhausted": generation.on_exhausted,
    "started": ignore,
    "tokens": generation.on_tokens,
    "completed": generation.on_completed,
    "failed": generation.on_failed,
    "cancelled": generation.on_cancelled,
    "joined": generation.on_joined,
    "left": generation.on_left,
    "died": generation.on_died,
    "published": generation.on_published,
    "synced": generation.on_synced,
    "granted": on_granted,
    "done": training.on_trainer,
    "error": on_error,
    "admitted": training.on_admitted,
    "chosen": training.on_chosen,
    "logger_failed": on_logger_failed,
    "logged": ignore,
    "ask": on_ask,
}
