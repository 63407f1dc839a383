"""The controller's core: an event changes the state by one rule; then the rules that depend on the state run in a fixed order.

State and commands depend on the events alone, so a run can be replayed from its ledger. `generation` has the state and the rules for
dispatch, samples and replicas. This module has selection, the trainer, the order of the rules, and the end of a run.

selected -> scored (log-probabilities recomputed, if a setting asks for it) -> fed (begin, microbatch) -> finished -> cleared
A step that fails is aborted; its groups that are not in the weights yet become trainable again, or end.

| port | commands (ids) | events (ids) |
|---|---|---|
| data | next_prompt | prompt (group) or exhausted |
| replica | generate (group, sample, replica, attempt) | started, tokens (.., version, first, count), then a last answer |
| | | tool_called (.., ms): no tokens for so long |
| | | the last answer: completed (.., version, newest, length, reward), failed (.., why) or cancelled |
| replica | cancel (group, sample, replica) | cancelled, unless the last answer came first |
| replica | | joined, left, died (replica) |
| trainer | begin, finish (step, update); microbatch, clear (step, update, groups) | done (of, the same ids) or error (.., why) |
| trainer | logprobs (step, groups, which), abort (step) | the same |
| trainer | discard (group) | none: the rows of a group that is not trained |
| sync | sync (version, at_sync, replicas) | published (version, replica) for each, then synced (version), or error |
| desk | acquire (kind) | granted (kind) |
| desk | release (kind), progress (completed, target) | none; a release before the grant withdraws the request |
| log | metrics (step, update, version, others) | logged or logger_failed |
| sampler | admit (version), select (version, least, most) | admitted (target, -1: none), chosen (groups, evicted, aborted) |
| the asker | answer (of, question, ..) | to the event ask (of, question, asker) |
| runner | ended (why) | none: the loop is over |
| ledger | any note | none |

A port that raises is an `error` with the command's ids. Events about a sample have group, sample and replica; lists are texts ("3,4").

What another core must know of these, as only some of it shows in the table:
- A loop begins with a request for the devices and the sync of its version: replicas serve nothing before it.
- The last version is synced, too, before the loop ends.
- `at_sync` asks the core, too: with abort it cancels all requests before a sync, with abort and drain it waits until none is in flight.
- `which` of logprobs is one of `StreamSettings.logprobs`. All settings are fields of `kit.stream.settings.StreamSettings`.
- `step_retries` counts the steps that are tried again in a whole run. A step that is tried again may keep its number.
- The groups of a step that is given up go back to free places; one that finds none ends.
- A `microbatch` has its groups in the order of their numbers: in another one, sums are rounded otherwise than in plain training.
- Data that end within a step end the loop with why=error: no batch is dropped in silence.
- Notes that checks need of every core: place, slot and their returns. The other ids of `metrics` are what is logged, each a
  number; checks need at least one of those in docs/ledger.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kit.errors import BadInput, KitError
from kit.loop.messages import Command, Event, Map
from kit.results.records import numbers
from kit.stream import generation
from kit.stream.generation import (
    Group,
    OpenStep,
    Owed,
    ReplicaState,
    StreamFields,
    StreamState,
    StreamTurn,
    close_group,
    doom,
    end_with_error,
    hold,
    leave,
    put_back,
)
from kit.stream.settings import NO_TARGET, SAMPLERS, Resume, StreamSettings, refusals


class ForeignAnswer(KitError):  # noqa: N818 - it names what the port did
    """An answer that belongs to no step of this run."""


# -- selection ------------------------------------------------------------------------------------------------------------


def choose(t: StreamTurn) -> None:
    """End groups that are too old and take groups from the sampler: none, or at least the minimum and at most what the step needs."""
    if not t.news or not may_choose(t):
        return
    t.news = False
    if t.sampler is None:
        least, most = limits(t)
        t.asked |= {"select"}
        t.do("select", "sampler", version=t.version, least=least, most=most)
        return
    drop_groups(t, t.sampler.evicts(t.view()), t.sampler.aborts(t.view()))
    select_groups(t, t.sampler.selects(t.view()))


def may_choose(t: StreamTurn) -> bool:
    step = t.step
    room = step is None or (len(step.groups) < t.need and not step.aborting)
    return room and not t.held and t.version < t.last and "select" not in t.asked


def limits(t: StreamTurn) -> tuple[int, int]:
    """Return the fewest and the most groups that a selection may take. The last chunk of a step may be smaller than the minimum."""
    most = t.need - (0 if t.step is None else len(t.step.groups))
    return min(t.settings.min_groups, most), most


def drop_groups(t: StreamTurn, old: tuple[int, ...], unfinished: tuple[int, ...]) -> None:
    for number in old:
        close_group(t, t.buffer[number], "evicted", f"too old for version {t.version}")
        if t.sampler is not None and t.sampler.refills:
            t.owed += (Owed(NO_TARGET),)
    for number in unfinished:
        doom(t, t.buffer[number], "aborted", f"unfinished and too old for version {t.version}")


def select_groups(t: StreamTurn, candidates: tuple[int, ...]) -> None:
    """Move groups from the buffer into the open step, or into a new one. This frees their places."""
    least, most = limits(t)
    if len(candidates) < max(1, least):
        return
    if t.step is None:
        t.step = OpenStep(id=t.steps)
        t.steps += 1
    chosen = [t.buffer[number] for number in candidates[:most]]
    for group in chosen:
        leave(t, group)
        t.note("selected", group=group.id, step=t.step.id, version=t.version)
    groups = (*t.step.groups, *chosen)
    t.step = replace(t.step, groups=groups, chunks=(*t.step.chunks, len(groups)))


def on_admitted(t: StreamTurn, event: Event) -> None:
    t.asked -= {"admit"}
    t.admitted = (event.target,)


def on_chosen(t: StreamTurn, event: Event) -> None:
    """Handle a foreign sampler's answer. Groups that are not complete in the buffer are refused, not trained."""
    t.asked -= {"select"}
    gone, unfinished, chosen = (numbers(event[name]) for name in ("evicted", "aborted", "groups"))
    drop_groups(t, *(tuple(number for number in groups if number in t.buffer) for groups in (gone, unfinished)))
    least, most = limits(t)
    wrong = [number for number in chosen if number not in t.buffer or t.buffer[number].order < 0]
    if chosen and not may_choose(t):  # the step was given up while the sampler chose
        for number in chosen:
            t.note("unselected", group=number)
        t.news = True
    elif wrong or len(set(chosen)) < len(chosen) or (chosen and not least <= len(chosen) <= most):
        end_with_error(
            t,
            f"the sampler chose the groups {event.groups}; it may choose {least} to {most} complete ones, each once, or none",
        )
    elif chosen:
        select_groups(t, chosen)
        t.news = True


# -- the trainer ----------------------------------------------------------------------------------------------------------


def train(t: StreamTurn) -> None:
    if t.step is not None and not t.step.aborting and not t.step.finishing:
        score(t, t.step)
        feed(t)
        finish(t)


def has(t: StreamTurn, kind: str) -> bool:
    """Whether the desk has granted devices for `kind`; if not, request them. A pipeline holds one kind of trainer grant at a time."""
    if kind in t.granted:
        return True
    if kind not in t.asked:
        t.asked |= {kind}
        t.do("acquire", "desk", kind=kind)
    return False


def score(t: StreamTurn, step: OpenStep) -> None:
    """Recompute log-probabilities, chunk by chunk, under the grant for training if that is held."""
    which = t.settings.logprobs
    if not which:
        t.step = replace(step, scored=len(step.groups))
    elif not step.scoring and step.scored < len(step.groups) and "training" not in t.asked:
        if "training" not in t.granted and (step.fed < step.scored or not has(t, "logprobs")):
            return
        chunk = step.groups[step.scored : step.chunk_end(step.scored)]
        for kind in which:
            t.do("logprobs", "trainer", step=step.id, groups=ids(chunk), which=kind)
        t.step = replace(step, scoring=which)


def on_scored(t: StreamTurn, step: OpenStep, event: Event) -> None:
    left = tuple(kind for kind in step.scoring if kind != event.which)
    t.step = replace(step, scoring=left, scored=step.scored if left else step.chunk_end(step.scored))
    if not left and "logprobs" in t.granted:
        t.granted -= {"logprobs"}
        t.do("release", "desk", kind="logprobs")


def boundary(t: StreamTurn, step: OpenStep) -> int:
    return min((step.update + 1) * t.settings.minibatch, t.need)


def feed(t: StreamTurn) -> None:
    """Queue scored groups as microbatches, in order, up to the end of the update. A chunk without a valid token counts as fed but is not
    run."""
    step = t.step
    while step is not None and step.fed < min(step.scored, boundary(t, step)):
        if "logprobs" in t.granted | t.asked or not has(t, "training"):
            return
        to = min(step.chunk_end(step.fed), step.scored, boundary(t, step))
        piece = step.groups[step.fed : to]
        step = replace(step, fed=to)
        if any(group.length for group in piece):
            if not step.begun:
                t.do("begin", "trainer", step=step.id, update=step.update)
                step = replace(step, begun=True, unanswered=step.unanswered + 1)
            t.do("microbatch", "trainer", step=step.id, update=step.update, groups=ids(piece))
            step = replace(step, unanswered=step.unanswered + 1)
        else:
            step = replace(step, unrun=step.unrun | {group.id for group in piece})
        t.step = step


def finish(t: StreamTurn) -> None:
    """Order the optimizer step when every microbatch of the update is done.

    Previous log-probabilities come from the weights before the step, so with several updates compute all of them before the first finish.
    """
    step = t.step
    if step is None or step.fed == step.finished or step.fed < boundary(t, step) or step.unanswered:
        return
    if not step.begun:
        end_with_error(
            t, f"step {step.id} update {step.update} has no valid token in its {step.fed - step.finished} groups"
        )
    elif step.scored == t.need or t.settings.previous != "recomputed":
        t.do("finish", "trainer", step=step.id, update=step.update)
        t.step = replace(step, finishing=True)


def on_finished(t: StreamTurn, step: OpenStep) -> None:
    """Clear the rows, as the weights have changed. After the last update of a step, raise the version and hold dispatch."""
    groups = step.groups[step.finished : step.fed]
    for group in groups:
        if group.id in step.unrun:
            close_group(t, group, "dropped", "no valid token")
        else:
            t.note("trained", group=group.id, step=step.id, update=step.update, version=t.version)
            t.count("trained", group.length)
    trained = tuple(group for group in groups if group.id not in step.unrun)
    t.updates += 1
    t.clearing = t.clearing.put((step.id, step.update), trained)
    t.do("clear", "trainer", step=step.id, update=step.update, groups=ids(groups))
    during = t.version
    t.step = replace(step, finished=step.fed, update=step.update + 1, begun=False, finishing=False)
    if step.fed == t.need:
        bump(t, step)
    log(t, step, trained, during)


def bump(t: StreamTurn, step: OpenStep) -> None:
    t.step = None
    t.shrunk = Map({version: count for version, count in t.shrunk.items() if version > t.version})
    t.version += 1
    t.updates_at = t.updates_at.put(t.version, t.updates)
    t.progress = -1
    t.note("bumped", version=t.version, updates=t.updates, step=step.id)
    hold(t)


def end_shrunk_step(t: StreamTurn) -> None:
    """End a step that shrank to the groups already in the weights: its last finish could not know that it was the last."""
    if t.step is not None and t.step.finished == t.need and not t.step.on_the_trainer:
        bump(t, t.step)


def log(t: StreamTurn, step: OpenStep, groups: tuple[Group, ...], during: int) -> None:
    """Log the counts of an optimizer step under the version after it. The times of the step come from the ledger."""
    oldest = [group.oldest for group in groups if group.length]  # a group without tokens has no lag
    lags = [during - version for version in oldest]
    behind = [t.updates - 1 - t.updates_at.get(version, 0) for version in oldest]
    values = {
        "groups": len(groups),
        "tokens": sum(group.length for group in groups),
        "lag_max": max(lags),
        "lag_mean": repr(sum(lags) / len(lags)),
        "lag_updates_max": max(behind),
        "queue": len(t.buffer) - t.unfinished,
        "in_flight": t.in_flight,
        **{f"total_{name}": count for name, count in t.counts.items()},
    }
    t.do("metrics", "log", step=step.id, update=step.update, version=t.version, **values)


# -- answers and failures -------------------------------------------------------------------------------------------------


def on_trainer(t: StreamTurn, event: Event) -> None:
    """Handle `done` or `error` of a trainer command. Late answers of a step that was given up change nothing."""
    if event.step >= t.steps:
        raise ForeignAnswer(f"the trainer answered {event.of} of step {event.step}; {t.steps} steps were opened")
    failed = event.name == "error"
    if event.of == "clear":
        on_cleared(t, event, failed)
        return
    step = t.step
    if step is None or step.id != event.step or step.aborting != (event.of == "abort"):
        return
    if event.of == "abort":
        on_aborted(t, step)
    elif failed:
        fail_step(t, f"{event.of} of step {step.id} failed: {event.why}")
    elif event.of == "finish":
        on_finished(t, step)
    elif event.of == "logprobs":
        on_scored(t, step, event)
    else:
        t.step = replace(step, unanswered=step.unanswered - 1)


def on_cleared(t: StreamTurn, event: Event, failed: bool) -> None:
    """End the trained groups, cleared or not: they are in the weights already."""
    for group in t.clearing.get((event.step, event.update), ()):
        if failed:
            t.note("aborted", group=group.id, why="trained, but its rows could not be cleared", version=t.version)
            t.count("aborted")
        else:
            t.note("cleared", group=group.id, step=event.step)
            t.count("cleared")
    t.clearing = t.clearing.without((event.step, event.update))
    if failed:
        end_with_error(t, f"clear of step {event.step} failed after version {t.version} was reached: {event.why}")


def fail_step(t: StreamTurn, why: str) -> None:
    """Abort a failed step. If none of it is in the weights, try again, at most `step_retries` times in a run; otherwise end the run."""
    assert t.step is not None
    if t.retried < t.settings.step_retries and not t.step.finished and not t.ending:
        t.retried += 1
        t.count("retried")
    else:
        end_with_error(t, why)
    abort(t, t.step)


def abort(t: StreamTurn, step: OpenStep) -> None:
    t.do("abort", "trainer", step=step.id)
    t.step = replace(step, aborting=True, finishing=False)


def on_aborted(t: StreamTurn, step: OpenStep) -> None:
    """Close the step, even if the abort failed: that error never hides the first one."""
    for kind in ("training", "logprobs"):
        if kind in t.granted:
            t.granted -= {kind}
            t.do("release", "desk", kind=kind)
    t.step = replace(step, begun=False, unanswered=0, scoring=())
    put_back(t)


def ids(groups: tuple[Group, ...]) -> tuple[int, ...]:
    return tuple(group.id for group in groups)


Handler = Callable[[StreamTurn, Event], None]
TRAINERS = ("begin", "microbatch", "finish", "abort", "clear", "logprobs")  # commands to the trainer


# What a resume reads of a state.
RESUMED = ("version", "updates", "steps", "step", "buffer", "owed", "prompt", "counts")


def resume_from(state: Any) -> Resume:
    """Return what a resumed run needs of a state between two steps. Groups in flight or in the buffer are generated again.

    The state of an own core may have a method `resume` instead, which returns it.
    """
    if callable(own := getattr(state, "resume", None)):
        start = own()
        if not isinstance(start, Resume):
            raise BadInput(
                f"resume() of the controller's state returned {start!r}; it must return a kit.stream.settings.Resume"
            )
        return start
    refuse_state(state, RESUMED)
    replaced = (getattr(owed, "replaces", None) for owed in state.owed)  # what an own core owes may be of any kind
    held = {*state.buffer, *(group.id for group in replaced if group is not None)}
    if state.step is not None:
        raise BadInput(f"step {state.step.id} is open; a run can only be resumed between two steps")
    if state.prompt >= 0:
        held.add(state.prompt)
    reserved = int(state.counts.get("reserved", 0)) + (state.prompt >= 0)
    return Resume(
        version=state.version, updates=state.updates, steps=state.steps, next=reserved, open=tuple(sorted(held))
    )


def refuse_state(state: Any, names: tuple[str, ...]) -> None:
    if lacking := [name for name in names if not hasattr(state, name)]:
        raise BadInput(
            f"the controller's state ({type(state).__name__}) has no {', '.join(lacking)}, so its loop cannot be stopped and resumed; "
            "give it version, step, and a method resume() that returns a kit.stream.settings.Resume, or leave out the phase resume"
        )


class Controller:
    """One pipeline's controller: `begin()`, then `step(state, event)` for every event. Refuses settings that cannot work (`BadInput`).

    Limits: a sample has one terminal answer (completed, failed or cancelled) for each time it was sent; the trainer answers in order.
    """

    def __init__(self, settings: StreamSettings, *, pipeline: str = "", resume: Resume | None = None) -> None:
        if refused := refusals(settings):
            raise BadInput("; ".join(refused))
        self.settings = settings
        self.sampler = SAMPLERS.get(settings.sampler)
        self.pipeline = pipeline
        self.resume = resume

    def begin(self) -> tuple[StreamState, tuple[Command, ...]]:
        """Request the devices for generation; dispatch starts when the first version is published."""
        settings, start = self.settings, self.resume
        fields = StreamFields(
            last=settings.steps, replicas=Map({number: ReplicaState() for number in range(settings.replicas)})
        )
        if start is not None:
            fields.version, fields.updates, fields.steps = start.version, start.updates, start.steps
            fields.index, fields.accepted = start.version - 1, start.version * settings.groups
            fields.updates_at = Map({start.version: start.updates})
            fields.counts = Map({"reserved": start.next - len(start.open)})
        t = StreamTurn(fields, settings, self.sampler, self.pipeline)
        for replica in t.replicas:
            t.note("joined", replica=replica)
        t.note("hold", version=t.version)
        report_progress(t)
        has(t, "generation")
        return StreamState(t), tuple(t.commands)

    def step(self, state: StreamState, event: Event) -> tuple[StreamState, tuple[Command, ...]]:
        t = StreamTurn(state, self.settings, self.sampler, self.pipeline)
        handler = HANDLERS.get(event.name)
        if handler is None:
            raise BadInput(f"unknown event {event.name!r}; the controller handles {', '.join(HANDLERS)}")
        if not t.closed:
            handler(t, event)
            settle_loop(t)
        return StreamState(t), tuple(t.commands)


def settle_loop(t: StreamTurn) -> None:
    """Run the rules that depend on the state. The order matters: a selection frees places for the dispatch after it."""
    if not t.ending:
        if t.version >= t.last:
            abort_the_rest(t, "the run is over")
        end_shrunk_step(t)
        generation.sync_if_due(t)
        choose(t)
        train(t)
        generation.send_waiting(t)
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


def is_done(t: StreamTurn) -> bool:
    return t.version >= t.last and not t.held


def is_stuck(t: StreamTurn) -> bool:
    """Whether no prompt is left and nothing is in progress, so that no event can change the state any more."""
    step = t.step
    trainer = step is not None and (step.unanswered or step.scoring or step.finishing or step.aborting)
    busy = trainer or t.in_flight or t.waiting or t.held or t.clearing or t.asked - {"admit"}
    return t.exhausted and t.prompt < 0 and not busy


def end_of_data(t: StreamTurn) -> None:
    """End the run without an error only if no step is open and the buffer is empty; a partial step is never trained."""
    if t.step is None and not t.buffer:
        t.ending = "exhausted"
    else:
        taken = 0 if t.step is None else len(t.step.groups)
        end_with_error(
            t, f"the data ended with {taken} of {t.need} groups of a step selected and {len(t.buffer)} in the buffer"
        )


def wind_down(t: StreamTurn) -> None:
    """End a run: first the trainer's step, then every group, then the devices. After an error, do not wait for the replicas."""
    step = t.step
    if step is not None and step.finishing:
        return  # the weights may change: wait for the answer, so that the count is right
    if step is not None and step.on_the_trainer:
        if not step.aborting:
            abort(t, step)
        return
    if step is not None:
        put_back(t)
    if t.clearing:
        return
    abort_the_rest(t, t.error or "the run is over")
    if not t.in_flight or t.error:
        close(t)


def abort_the_rest(t: StreamTurn, why: str) -> None:
    for group in list(t.buffer.values()):
        if group.order < 0:
            doom(t, group, "aborted", why)


def close(t: StreamTurn) -> None:
    for group in list(t.buffer.values()):
        how, why = group.ends or ("aborted", t.error or "the run is over")
        close_group(t, group, "failed" if how == "replaced" else how, why)
    for owed in t.owed:
        if owed.replaces is not None and owed.replaces.ends is not None:  # no prompt was left to replace it
            close_group(t, owed.replaces, "failed", owed.replaces.ends[1])
    t.owed = ()
    for kind in sorted(t.granted | (t.asked & {"generation", "logprobs", "training"})):
        t.do("release", "desk", kind=kind)
    t.replicas = Map()  # after an error requests may still be in flight: their answers are ignored
    t.closed = True
    error = {"error": t.error} if t.error else {}
    t.do("ended", "runner", why=t.ending, version=t.version, updates=t.updates, **error, **t.counts)


# -- other events ---------------------------------------------------------------------------------------------------------


def report_progress(t: StreamTurn) -> None:
    """Report to the desk, every 2 %, how much of the awaited step is generated. Groups of a later step do not count: with all replicas
    asleep, the loop would report a complete step and wait for ever."""
    need = t.need
    complete = len(t.buffer) - t.unfinished
    if complete:
        complete = sum(group.order >= 0 and group.target <= t.version for group in t.buffer.values())
    there = min(need, (0 if t.step is None else len(t.step.groups)) + complete)
    if need > 0 and (part := 50 * there // need) != t.progress:
        t.progress = part
        t.do("progress", "desk", completed=there, target=need)


def on_granted(t: StreamTurn, event: Event) -> None:
    if event.kind in t.asked:
        t.asked -= {event.kind}
        t.granted |= {event.kind}


def on_error(t: StreamTurn, event: Event) -> None:
    """Handle a failed command. Failures that do not affect correctness are only counted; any other ends the run or the step."""
    of, why = event.of, event.why
    if of in TRAINERS:
        on_trainer(t, event)
    elif of == "generate":
        generation.on_failed(t, event)
    elif of == "sync":
        generation.on_sync_error(t, why)
    elif of == "metrics":
        on_logger_failed(t, event)
    elif of in ("progress", "answer", "release", "discard"):
        t.count("ignored_errors")
    else:
        end_with_error(t, f"{of} failed: {why}")


def on_logger_failed(t: StreamTurn, event: Event) -> None:
    t.count("logger_failed")
    t.note("logger_error", why=event.get("why", ""))


def on_ask(t: StreamTurn, event: Event) -> None:
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
        replicas=tuple(t.replicas),
        step=step,
    )


def ignore(_: StreamTurn, __: Event) -> None:
    """Ignore an event that only the ledger needs."""


HANDLERS: dict[str, Handler] = {
    "prompt": generation.on_prompt,
    "exhausted": generation.on_exhausted,
    "started": ignore,
    "tokens": generation.on_tokens,
    "tool_called": ignore,
    "completed": generation.on_completed,
    "failed": generation.on_failed,
    "cancelled": generation.on_cancelled,
    "joined": generation.on_joined,
    "left": generation.on_left,
    "died": generation.on_died,
    "published": generation.on_published,
    "synced": generation.on_synced,
    "granted": on_granted,
    "done": on_trainer,
    "error": on_error,
    "admitted": on_admitted,
    "chosen": on_chosen,
    "logger_failed": on_logger_failed,
    "logged": ignore,
    "ask": on_ask,
}
