"""The scheduler: an event changes what the desk knows by one rule, then what follows from the state is ordered.

| from | event (ids) | answer to the pipeline |
|---|---|---|
| pipeline | register (a cluster's devices by its name, tp) | registered, or error |
| pipeline | admit | admitted, once its turn has come |
| pipeline | acquire (kind; cluster, target, release) | granted (kind, cluster, devices), or error; `release`: a kind given back at once |
| pipeline | release (kind; cluster) | none, and released where it is generation; what was not granted yet is withdrawn |
| pipeline | planned_release | released, once all replicas sleep; a second one joins the first |
| pipeline | resize (add or remove) | resized, or error: replicas that may be active again, or not any more |
| pipeline | unregister | unregistered, once all replicas sleep; those who wait get an error |
| pipeline | progress (completed, target; stream), progress_end (stream) | none |
| devices | shrunk (who, replica) | answers left (replica, devices), after which nothing is sent there and the replica sleeps |
| devices | expanded (who, replica), then joined (replica) | answers the command `expand` (replica, devices) to "devices" |
| devices | error (of, who, replica, why) | none: one of the two failed |
| devices | died (who; replica) | none: without a replica the whole pipeline is gone, and nothing of it is on its devices |
| clock | alarm (number) | answers the command `after` (number, ms) |

A cycle orders all shrinks (`left`), then grants and orders all expands (`expand`), then commits. While it is under way operations are only
noted. What is released is free: whoever releases training has nothing on its devices any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kit.errors import BadInput
from kit.loop.messages import Command, Event, listed
from kit.share import operations
from kit.share.operations import admit, alarmed, drop, fail, release_generation, waits_for
from kit.share.planner import PLANNERS, Planner, is_off_balance, make_plan
from kit.share.state import GENERATION, Fields, Lease, Plan, Request, Settings, State, Turn
from kit.share.validator import violations

if TYPE_CHECKING:
    from kit.share.state import Op

Handler = Callable[[Turn, Event], None]


class Scheduler:
    """The desk: `begin()`, then `step(state, event)` for every event. `planner` is another than the settings name."""

    def __init__(self, settings: Settings, *, desk: str = "desk", planner: Planner | None = None) -> None:
        if planner is None and settings.planner not in PLANNERS:
            raise BadInput(f"planner={settings.planner!r} is neither one of {', '.join(PLANNERS)} nor a module:attr")
        self.settings = settings
        self.desk = desk
        self.planner = planner or PLANNERS[settings.planner]

    def begin(self) -> tuple[State, tuple[Command, ...]]:
        settings = self.settings
        t = Turn(Fields(idle=frozenset(range(settings.devices))), settings, self.desk)
        names = ("devices", "planner", "request_ms", "operation_ms", "admission_ms", "watchdog_ms")
        t.note(
            "limits",
            self.desk,
            pipelines=",".join(settings.pipelines),
            **{one: getattr(settings, one) for one in names},
        )
        t.alarm(settings.watchdog_ms, "watchdog")
        return State(t), tuple(t.commands)

    def step(self, state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        t = Turn(state, self.settings, self.desk)
        handler = HANDLERS.get(event.name)
        if handler is None:
            raise BadInput(f"the desk knows no event {event.name!r}; it knows {', '.join(HANDLERS)}")
        if not t.closed:
            handler(t, event)
            settle(t, self.planner)
        return State(t), tuple(t.commands)


def settle(t: Turn, planner: Planner) -> None:
    """What follows from the state, until nothing does: admissions, grants, ends of releases, then a plan, where none is under way."""
    while not t.error:
        admit(t)
        grant_generation(t)
        advance(t)
        finish_releases(t)
        if t.plan is not None or not (t.due or is_off_balance(t)):
            break
        t.due = False
        start(t, planner)
        if t.plan is None:  # there was nothing to do
            break
    if t.error:
        stop(t)
    elif t.left >= {*t.settings.pipelines} and not t.pipelines:
        t.closed = True
        t.commands.append(Command("ended", "runner", t.desk, why="done", cycles=t.cycles))


# -- a cycle --------------------------------------------------------------------------------------------------------------


def start(t: Turn, planner: Planner) -> None:
    """Make a plan, try it on a copy, and order its shrinks."""
    try:
        plan = make_plan(t, planner, t.settings.devices, t.settings.pipelines)
    except Exception as error:  # noqa: BLE001 - whatever a planner raises ends the run with its name
        fail(t, f"the planner {t.settings.planner} raised {type(error).__name__}: {error}")
        return
    if not plan:
        return
    if wrong := violations(t, plan, t.settings.devices):
        fail(t, f"the planner {t.settings.planner} made a plan that violates condition {wrong[0]}")
        return
    t.cycles += 1
    t.plan = plan
    ops = {name: " ".join(map(str, getattr(plan, name))) for name in ("shrinks", "grants", "expands")}
    t.note("plan", t.desk, number=t.cycles, idle=listed(sorted(t.idle)), demand=demand(t), **ops)
    t.alarm(t.settings.operation_ms, "cycle", t.cycles)
    for op in plan.shrinks:
        for replica in op.replicas:
            shrink(t, op.pipeline, replica)


def demand(t: Turn) -> str:
    return " ".join(f"{name}:{one.remaining}" for name, one in t.pipelines.items() if one.streams)


def shrink(t: Turn, name: str, replica: int) -> None:
    """The pipeline sends its requests elsewhere, then lets the replica sleep."""
    key = name, GENERATION
    t.lease(key, active=t.leases[key].active - {replica})
    t.sleeping |= {(name, replica)}
    t.say("left", name, replica=replica, devices=listed(sorted(t.pipelines[name].generation.bundles[replica])))


def advance(t: Turn) -> None:
    """After the last shrink come the grants and all expands, after the last expand the commit."""
    if t.plan is not None and not t.sleeping:
        grants, expands = t.plan.grants, t.plan.expands
        t.plan = Plan()
        for op in grants:
            grant(t, op)
        for op in expands:
            for replica in op.replicas:
                expand(t, op, replica)
        if not t.waking:
            t.plan = None
            t.due |= any(not one.held for one in t.requests)
            t.note("commit", t.desk, number=t.cycles, idle=listed(sorted(t.idle)))


def grant(t: Turn, op: Op) -> None:
    """Skipped where the pipeline has gone, or has withdrawn its request, since the plan was made."""
    request = t.waits(op.pipeline, op.cluster)
    if request is not None and op.devices <= t.idle:
        t.idle -= op.devices
        t.leases = t.leases.put(request.key, Lease(request.kind, request.number, op.devices))
        operations.answer(t, request)


def expand(t: Turn, op: Op, replica: int) -> None:
    """Skipped where the pipeline has gone or wants no devices any more, or the replica is lost, since the plan was made."""
    one = t.pipelines.get(op.pipeline)
    wanted = (op.pipeline, GENERATION) in t.leases or t.waits(op.pipeline, GENERATION) is not None
    if one is None or one.leaving or not wanted or replica in one.out | one.dead:
        return
    bundle = one.generation.bundles[replica]
    t.idle -= bundle
    t.waking |= {(op.pipeline, replica)}
    t.order("expand", op.pipeline, replica=replica, devices=listed(sorted(bundle)))


def grant_generation(t: Turn) -> None:
    """A request for generation is granted as soon as any of its replicas is active."""
    for request in t.requests:
        if request.kind == GENERATION and t.active(request.pipeline):
            operations.answer(t, request)


def finish_releases(t: Turn) -> None:
    """A planned release has ended once nothing of the pipeline is active, falling asleep or waking up."""
    for name, one in t.pipelines.items():
        if one.leaving and not t.active(name) and not t.under_way(name):
            release_generation(t, name)


def stop(t: Turn) -> None:
    """The desk cannot go on: every pipeline stops, with the desk's name."""
    for name in t.pipelines:
        t.say("error", name, of=t.desk, why=t.error)
    t.requests = ()
    t.closed = True
    t.commands.append(Command("ended", "runner", t.desk, why="error", error=t.error, cycles=t.cycles))


# -- answers of the devices -----------------------------------------------------------------------------------------------


def on_shrunk(t: Turn, event: Event) -> None:
    one = event.get("who", event.pipeline), event.replica
    if one in t.sleeping:
        t.sleeping -= {one}
        t.idle |= t.pipelines[one[0]].generation.bundles[one[1]]


def on_expanded(t: Turn, event: Event) -> None:
    name, replica = one = event.get("who", event.pipeline), event.replica
    if one not in t.waking:
        return
    t.waking -= {one}
    key = name, GENERATION
    if key not in t.leases:
        request = t.waits(*key)
        t.leases = t.leases.put(key, Lease(GENERATION, t.serial if request is None else request.number))
    t.lease(key, active=t.leases[key].active | {replica})
    t.say("joined", name, replica=replica)


def on_error(t: Turn, event: Event) -> None:
    """A replica that cannot wake is lost, and its devices are free. One that cannot sleep may still hold its devices: nobody can go on."""
    name = event.get("who", event.pipeline)
    if event.of == "expand" and (name, event.replica) in t.waking:
        t.note("failed", name, replica=event.replica, why=event.why)
        lose(t, name, event.replica)
    elif event.of == "shrink" and (name, event.replica) in t.sleeping:
        fail(t, f"replica {event.replica} of {name} could not release its devices: {event.why}")
    elif event.of == "after":
        fail(t, f"the clock failed: {event.why}")


def on_died(t: Turn, event: Event) -> None:
    """A dead replica's devices are free, and so are those of a dead pipeline. Whoever waits for its release still gets an answer."""
    name, replica = event.get("who", event.pipeline), event.get("replica", -1)
    if name not in t.pipelines:
        return
    if replica >= 0:
        lose(t, name, replica)
    else:
        drop(t, name, "died")


def lose(t: Turn, name: str, replica: int) -> None:
    one = t.pipelines[name]
    if replica in one.dead or replica >= len(one.generation.bundles):
        return
    t.change(name, dead=one.dead | {replica})
    held = (name, replica)
    if replica in t.active(name) or held in t.sleeping | t.waking:
        t.idle |= one.generation.bundles[replica]
        t.sleeping -= {held}
        t.waking -= {held}
        if replica in t.active(name):
            t.lease((name, GENERATION), active=t.active(name) - {replica})
    t.due = True


# -- the clock ------------------------------------------------------------------------------------------------------------


def on_alarm(t: Turn, event: Event) -> None:
    what = t.alarms.get(event.number)
    if what is None:
        return
    t.alarms = t.alarms.without(event.number)
    if what[0] == "watchdog":
        watch(t)
    elif what[0] == "cycle" and t.plan is not None and what[1] == t.cycles:
        slow = " and ".join(f"replica {replica} of {name}" for name, replica in sorted(t.sleeping or t.waking))
        fail(
            t, f"{slow} did not answer {'a shrink' if t.sleeping else 'an expand'} within {t.settings.operation_ms} ms"
        )
    else:
        alarmed(t, what)


def watch(t: Turn) -> None:
    """Ask again for a pipeline whose request was consumed: it has no replica, none is under way, and its progress has not moved."""
    for name, one in t.pipelines.items():
        if (name, GENERATION) in t.leases and one.moved == one.watched and waits_for(t, name):
            t.note("asked_again", name)
            operations.queue(t, Request(name, GENERATION, GENERATION, 0, one.estimate, again=True))
        t.change(name, watched=one.moved)
    t.alarm(t.settings.watchdog_ms, "watchdog")


def ignore(_: Turn, __: Event) -> None:
    """An event that is there for the ledger."""


HANDLERS: dict[str, Handler] = {
    "register": operations.on_register,
    "admit": operations.on_admit,
    "acquire": operations.on_acquire,
    "release": operations.on_release,
    "planned_release": operations.on_planned_release,
    "resize": operations.on_resize,
    "unregister": operations.on_unregister,
    "progress": operations.on_progress,
    "progress_end": operations.on_progress_end,
    "shrunk": on_shrunk,
    "expanded": on_expanded,
    "died": on_died,
    "error": on_error,
    "alarm": on_alarm,
    "taken": ignore,
    "freed": ignore,
}
