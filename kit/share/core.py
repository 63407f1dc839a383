"""The scheduler: an event changes the desk's state by one rule; then the desk issues the commands that the state calls for.

| from | event (ids) | answer to the pipeline |
|---|---|---|
| pipeline | register (a cluster's devices by its name, tp) | registered, or error |
| pipeline | admit | admitted, once it is its turn |
| pipeline | acquire (kind; cluster, target, release) | granted (kind, cluster, devices), or error; `release`: a kind to release first |
| pipeline | release (kind; cluster) | released for generation, else none; a request not granted yet is withdrawn |
| pipeline | planned_release | each gets `released` once all replicas sleep; a waiting request to generate is withdrawn |
| pipeline | resize (add or remove) | resized, or error: allow replicas to be active again, or no longer |
| pipeline | unregister | unregistered, once all replicas sleep; waiting requests get an error |
| pipeline | progress (completed, target; stream, such as "adapter 3"), progress_end (stream) | none, or error |
| devices | shrunk (who, replica) | answers left (replica, devices), after which the replica gets no requests and sleeps |
| devices | expanded (who, replica), then joined (replica) | answers the command `expand` (replica, devices) to "devices" |
| devices | error (of, who, replica, why) | none: after a failed shrink the desk ends; after a failed expand the replica is dead |
| devices | died (who; replica) | none: its devices are free at once. Without a replica a pipeline is gone, also before it registers |
| devices | restarted (who; replica) | none: new ranks replace those that died. The replica may wake, or the pipeline may register, again |
| devices | taken, freed (who, device) | none: an observer saw it; it is there for the ledger |
| clock | alarm (number) | answers the command `after` (number, ms) |

A cycle orders all shrinks (`left`), then grants and orders all expands (`expand`), then commits. Operations that arrive during a cycle
change only the state; the next plan takes them into account. A loss may change the plan, but not what it has ordered to sleep. Released
devices are free: a pipeline that releases training has left them. A request that waits keeps its devices from later ones, but not from
a pipeline that holds others.

What a desk in place of this one has to know:

- Answers go to the pipeline: `Command("granted", "a", "a", kind="training", cluster="trainer", devices=(0, 1))`. Commands to "devices"
  and notes to "ledger" name the pipeline that they are about. Registered devices are `trainer=(0, 1)`, `generation=(2, 3)`; replica r has
  the r-th `tp` of `generation`. A request without `cluster` is for the cluster of its kind (`kit.share.state.KINDS`).
- The desk sends `joined` once it has `expanded`; a replica gets no request before. A request for generation is granted with the first
  replica that joins, and others may join later. `released` and `unregistered` follow the last `shrunk`.
- Refuse what is not possible with `error` (of, kind, cluster, why) in the same turn: then it changes nothing. That is so for requests of
  pipelines that are unknown or not admitted, and for a second one, of another kind, for a cluster. A pipeline may ask again for what its
  request waits for: answer that with an error, or grant both. One that died is told `unregistered` too; it does not wait for that.
- A request that will not be granted is answered by `error` (`of="acquire"`, kind, cluster, why): after `request_ms`, and when its
  pipeline is removed or unregisters.
- With `config.admission_ms`, a pipeline starts after the first hand-over of the one that registered before it (it releases training),
  which trains again once the next has requested generation. Each of the two waits has that limit. `config.operation_ms` is the limit of a
  shrink or an expand; with `config.watchdog_ms` a pipeline that has neither replicas nor progress is asked for again (`queued`), or
  gets replicas without a second grant.
- A replica that falls asleep loses what it has generated of a group. Pipelines that are given each other's last replica at every look,
  before one of them can finish a group, never end: `no_thrash` and `no_deadlock` see it.
- Write notes where they belong among the orders: `plan` before them, `commit` after them. The operations in a plan's note name replicas
  for generation ("a.generation:0,1") and devices for the rest ("b.trainer:3"). `demand` lists the pipelines that reported progress. The
  notes `clusters`, `admission_limit`, `queued`, `expired` and `withdrawn` may be left out.
- When the last pipeline of `config.names` is gone: `Command("ended", "runner", "desk", why="done")`; after a failure an `error` to each
  pipeline, then `ended` with why="error" and the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from kit.errors import BadInput
from kit.loop.messages import NOTES, Command, Event, Map
from kit.results.records import numbers
from kit.share.planner import PLANNERS, Planner, is_off_balance, make_plan, violations
from kit.share.state import (
    CLUSTERS,
    GENERATION,
    KINDS,
    Cluster,
    DeskFields,
    DeskSettings,
    DeskState,
    DeskTurn,
    Lease,
    Op,
    PipelineState,
    Plan,
    Request,
)
from kit.target import raised_in_words


class Scheduler:
    """The desk: `begin()`, then `step(state, event)` for every event. `planner` overrides the one in the settings."""

    def __init__(self, settings: DeskSettings, *, desk: str = "desk", planner: Planner | None = None) -> None:
        if planner is None and settings.planner not in PLANNERS:
            raise BadInput(f"planner={settings.planner!r} is neither one of {', '.join(PLANNERS)} nor a module:attr")
        self.settings = settings
        self.desk = desk
        self.planner = planner or PLANNERS[settings.planner]

    def begin(self) -> tuple[DeskState, tuple[Command, ...]]:
        settings = self.settings
        t = DeskTurn(DeskFields(idle=frozenset(range(settings.devices))), settings, self.desk)
        t.commands.append(limits_note(settings, self.desk))
        t.alarm(settings.watchdog_ms, "watchdog")
        return DeskState(t), tuple(t.commands)

    def step(self, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
        t = DeskTurn(state, self.settings, self.desk)
        if event.name not in HANDLERS:
            raise BadInput(f"unknown event {event.name!r}; the desk handles {', '.join(HANDLERS)}")
        if not t.closed:
            HANDLERS[event.name](t, event)
            settle_desk(t, self.planner)
        return DeskState(t), tuple(t.commands)


def limits_note(settings: DeskSettings, desk: str) -> Command:
    return Command("limits", NOTES, desk, **{**asdict(settings), "pipelines": ",".join(settings.pipelines)})


def settle_desk(t: DeskTurn, planner: Planner) -> None:
    """Apply the rules until nothing changes: admissions, grants, ends of releases, then a plan if none is in progress."""
    while not t.error:
        admit(t)
        grant_generation(t)
        advance(t)
        finish_releases(t)
        if t.plan is not None or not (t.due or is_off_balance(t)):
            break
        t.due = False
        start(t, planner)
        if t.plan is None:  # nothing to do
            break
    if t.error:
        stop(t)
    elif t.left >= {*t.settings.pipelines} and not t.pipelines:
        t.closed = True
        t.commands.append(Command("ended", "runner", t.desk, why="done", cycles=t.cycles))


# -- a cycle --------------------------------------------------------------------------------------------------------------


def start(t: DeskTurn, planner: Planner) -> None:
    try:
        plan = make_plan(t, planner, t.settings.devices, t.settings.pipelines)
    except Exception as error:  # noqa: BLE001 - any exception of a planner ends the run with the planner's name
        t.error = f"the planner {t.settings.planner} raised {raised_in_words(error)}"
        return
    if not plan:
        return
    if wrong := violations(t, plan, t.settings.devices):
        t.error = f"the planner {t.settings.planner} made a plan that violates condition {wrong[0]}"
        return
    t.cycles += 1
    t.plan = plan
    ops = {name: " ".join(map(str, getattr(plan, name))) for name in ("shrinks", "grants", "expands")}
    demand = " ".join(f"{name}:{pipeline.remaining}" for name, pipeline in t.pipelines.items() if pipeline.streams)
    t.note("plan", t.desk, number=t.cycles, idle=tuple(sorted(t.idle)), demand=demand, **ops)
    t.alarm(t.settings.operation_ms, "cycle", t.cycles)
    for op in plan.shrinks:
        for replica in op.replicas:
            shrink_replica(t, op.pipeline, replica)


def shrink_replica(t: DeskTurn, name: str, replica: int) -> None:
    key = name, GENERATION
    t.lease(key, active=t.leases[key].active - {replica})
    t.sleeping |= {(name, replica)}
    t.say("left", name, replica=replica, devices=tuple(sorted(t.pipelines[name].generation.bundles[replica])))


def advance(t: DeskTurn) -> None:
    """Start the grants and all expands after the last shrink, and commit after the last expand."""
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
            t.due |= any(not request.held for request in t.requests)
            t.note("commit", t.desk, number=t.cycles, idle=tuple(sorted(t.idle)))


def grant(t: DeskTurn, op: Op) -> None:
    """Grant a cluster, unless the pipeline has gone or withdrawn its request since the plan was made, or put one in its place that the
    admission holds back."""
    request = t.waits(op.pipeline, op.cluster)
    if request is not None and not request.held and op.devices <= t.idle:
        t.idle -= op.devices
        t.leases = t.leases.put(request.key, Lease(request.kind, request.number, op.devices))
        answer(t, request)


def expand(t: DeskTurn, op: Op, replica: int) -> None:
    """Wake a replica, unless the pipeline has gone or no longer wants devices since the plan was made, or the replica is lost."""
    pipeline = t.pipelines.get(op.pipeline)
    wanted = (op.pipeline, GENERATION) in t.leases or t.waits(op.pipeline, GENERATION) is not None
    if pipeline is None or pipeline.leaving or not wanted or replica in pipeline.out | pipeline.dead:
        return
    bundle = pipeline.generation.bundles[replica]
    t.idle -= bundle
    t.waking |= {(op.pipeline, replica)}
    t.commands.append(Command("expand", "devices", op.pipeline, replica=replica, devices=tuple(sorted(bundle))))


def grant_generation(t: DeskTurn) -> None:
    for request in t.requests:
        if request.kind == GENERATION and t.active(request.pipeline):
            answer(t, request)


def finish_releases(t: DeskTurn) -> None:
    for name, pipeline in t.pipelines.items():
        if pipeline.leaving and not t.active(name) and not t.under_way(name):
            release_generation(t, name)


def stop(t: DeskTurn) -> None:
    for name in t.pipelines:
        t.say("error", name, of=t.desk, why=t.error)
    t.requests = ()
    t.closed = True
    t.commands.append(Command("ended", "runner", t.desk, why="error", error=t.error, cycles=t.cycles))


# -- answers of the devices -----------------------------------------------------------------------------------------------


def on_shrunk(t: DeskTurn, event: Event) -> None:
    replica = event.get("who", event.pipeline), event.replica
    if replica in t.sleeping:
        t.sleeping -= {replica}
        t.idle |= t.pipelines[replica[0]].generation.bundles[replica[1]]


def on_expanded(t: DeskTurn, event: Event) -> None:
    name, replica = replica_key = event.get("who", event.pipeline), event.replica
    if replica_key not in t.waking:
        return
    t.waking -= {replica_key}
    key = name, GENERATION
    if key not in t.leases:
        request = t.waits(*key)
        t.leases = t.leases.put(key, Lease(GENERATION, t.serial if request is None else request.number))
    t.lease(key, active=t.leases[key].active | {replica})
    t.say("joined", name, replica=replica)


def on_error(t: DeskTurn, event: Event) -> None:
    """A replica that cannot wake is lost and its devices are free. If one cannot sleep, it may still hold its devices, so the desk ends."""
    name = event.get("who", event.pipeline)
    if event.of == "expand" and (name, event.replica) in t.waking:
        t.note("failed", name, replica=event.replica, why=event.why)
        lose(t, name, event.replica)
    elif event.of == "shrink" and (name, event.replica) in t.sleeping:
        t.error = f"replica {event.replica} of {name} could not release its devices: {event.why}"
    elif event.of == "after":
        t.error = f"the clock failed: {event.why}"


def on_died(t: DeskTurn, event: Event) -> None:
    name, replica = event.get("who", event.pipeline), event.get("replica", -1)
    if name not in t.pipelines:
        if replica < 0 and name in t.settings.pipelines:  # it died before it registered; nobody waits for it any more
            t.left |= {name}
    elif replica >= 0:
        lose(t, name, replica)
    else:
        drop_pipeline(t, name, "died")


def on_restarted(t: DeskTurn, event: Event) -> None:
    """Forget the death of a replica, or of a pipeline. One that is alive is left as it is."""
    name, replica = event.get("who", event.pipeline), event.get("replica", -1)
    if name not in t.pipelines and replica < 0:
        t.left -= {name}
    elif name in t.pipelines and replica in t.pipelines[name].dead:
        t.change(name, dead=t.pipelines[name].dead - {replica})
        t.due = True


def lose(t: DeskTurn, name: str, replica: int) -> None:
    pipeline = t.pipelines[name]
    if replica in pipeline.dead or replica >= len(pipeline.generation.bundles):
        return
    t.change(name, dead=pipeline.dead | {replica})
    held = (name, replica)
    if replica in t.active(name) or held in t.sleeping | t.waking:
        t.idle |= pipeline.generation.bundles[replica]
        t.sleeping -= {held}
        t.waking -= {held}
        if replica in t.active(name):
            t.lease((name, GENERATION), active=t.active(name) - {replica})
    t.due = True


# -- the clock ------------------------------------------------------------------------------------------------------------


def on_alarm(t: DeskTurn, event: Event) -> None:
    alarm = t.alarms.get(event.number)
    if alarm is None:
        return
    t.alarms = t.alarms.without(event.number)
    if alarm[0] == "watchdog":
        watch(t)
    elif alarm[0] == "cycle" and t.plan is not None and alarm[1] == t.cycles:
        slow = " and ".join(f"replica {replica} of {name}" for name, replica in sorted(t.sleeping or t.waking))
        order = "a shrink" if t.sleeping else "an expand"
        t.error = f"{slow} did not answer {order} within {t.settings.operation_ms} ms"
    elif alarm[0] == "request":
        for request in [request_due for request_due in t.requests if request_due.number == alarm[1]]:
            expire(t, request)
    elif alarm[0] == "admission" and alarm[1] in t.pipelines:
        pipeline = t.pipelines[alarm[1]]
        if alarm[2] == "trains" or not pipeline.admitted:
            t.change(alarm[1], overdue=pipeline.overdue | {alarm[2]})
            t.note("admission_limit", alarm[1], side=alarm[2])


def expire(t: DeskTurn, request: Request) -> None:
    name, kind, cluster = request.pipeline, request.kind, request.cluster
    t.requests = tuple(waiting for waiting in t.requests if waiting != request)
    t.due = True
    t.note("expired", name, cluster=cluster, kind=kind, number=request.number)
    why = f"{kind} of {name} was not granted within {t.settings.request_ms} ms"
    t.say("error", name, of="acquire", kind=kind, cluster=cluster, why=why)


def watch(t: DeskTurn) -> None:
    """Repeat the granted request of a pipeline that has no replica, none on the way, and no progress since the last watch."""
    for name, pipeline in t.pipelines.items():
        if (name, GENERATION) in t.leases and pipeline.moved == pipeline.watched and lacks_replicas(t, name):
            t.note("asked_again", name)
            queue(t, Request(name, GENERATION, GENERATION, 0, pipeline.estimate, again=True))
        t.change(name, watched=pipeline.moved)
    t.alarm(t.settings.watchdog_ms, "watchdog")


# -- operations of pipelines: each may be repeated; an impossible one is refused with a reason -----------------------------


def refuse(t: DeskTurn, event: Event, why: str) -> None:
    ids = {name: event[name] for name in ("kind", "cluster") if event.get(name) is not None}
    t.say("error", event.pipeline, of=event.name, why=why, **ids)


def pipeline_of_request(t: DeskTurn, event: Event) -> PipelineState | None:
    """Return the pipeline of a request; refuse a pipeline that is not registered or is leaving."""
    pipeline: PipelineState | None = t.pipelines.get(event.pipeline)
    if pipeline is None or pipeline.closing:
        refuse(t, event, f"the pipeline {event.pipeline} is not registered")
        return None
    return pipeline


# -- registration and admission -------------------------------------------------------------------------------------------


def on_register(t: DeskTurn, event: Event) -> None:
    """Registering again with the same clusters changes nothing."""
    name, tp = event.pipeline, event.get("tp", 1)
    listed = {cluster: numbers(event[cluster]) for cluster in CLUSTERS if event.get(cluster) is not None}
    clusters = Map(
        {cluster: Cluster(devices, tp if cluster == GENERATION else 1) for cluster, devices in listed.items()}
    )
    there = t.pipelines.get(name)
    generation = listed.get(GENERATION, ())
    if name not in t.settings.pipelines:
        refuse(t, event, f"unexpected pipeline {name}; expected: {', '.join(t.settings.pipelines)}")
    elif name in t.left or (there is not None and (there.closing or there.clusters != clusters)):
        refuse(t, event, f"{name} was already registered")
    elif odd := sorted(
        {*generation, *(device for devices in listed.values() for device in devices)} - {*range(t.settings.devices)}
    ):
        refuse(t, event, f"{name} names the devices {odd}, but there are only {t.settings.devices}")
    elif any(len({*devices}) < len(devices) for devices in listed.values()):
        refuse(t, event, f"{name} names a device twice in one cluster")
    elif tp < 1 or len(generation) % tp:
        refuse(t, event, f"tp={tp} does not divide {name}'s number of generation devices, {len(generation)}")
    else:
        if there is None:
            t.pipelines = t.pipelines.put(name, PipelineState(clusters))
            t.note("clusters", name, tp=tp, **listed)
        t.say("registered", name)


def on_admit(t: DeskTurn, event: Event) -> None:
    if (pipeline := pipeline_of_request(t, event)) is not None:
        if pipeline.admitted:
            t.say("admitted", event.pipeline)
        elif not pipeline.asked:
            t.change(event.pipeline, asked=True)
            if t.settings.admission_ms:
                t.alarm(t.settings.admission_ms, "admission", event.pipeline, "starts")


def admit(t: DeskTurn) -> None:
    """Admit a pipeline after the first hand-over of the previous one, which trains again once the new one is set up.

    Both waits have a limit; reaching it is reported.
    """
    before = None
    for name, pipeline in t.pipelines.items():
        if pipeline.asked and not pipeline.admitted and may_start(t, before, pipeline):
            t.change(name, admitted=True)
            t.say("admitted", name)
        before = t.pipelines[name]
    for request in t.requests:
        if request.held and not is_held(t, request):
            t.requests = tuple(
                replace(waiting, held=False) if waiting == request else waiting for waiting in t.requests
            )
            enter(t, request)


def may_start(t: DeskTurn, before: PipelineState | None, one: PipelineState) -> bool:
    over = before is None or before.handed_over or before.closing
    return over or "starts" in one.overdue or not t.settings.admission_ms


def is_held(t: DeskTurn, request: Request) -> bool:
    """Whether a request must wait: after its first hand-over a pipeline trains again only once the next pipeline is set up."""
    pipeline, names = t.pipelines[request.pipeline], list(t.pipelines)
    if (
        request.kind != "training"
        or not pipeline.handed_over
        or "trains" in pipeline.overdue
        or not t.settings.admission_ms
    ):
        return False
    after = names[names.index(request.pipeline) + 1 :][:1]
    return any(not t.pipelines[name].set_up and not t.pipelines[name].closing for name in after)


# -- requests -------------------------------------------------------------------------------------------------------------


def on_acquire(t: DeskTurn, event: Event) -> None:
    """Queue a request. A repeated one gets the devices already granted; one of another kind, or a second pending one, is refused."""
    pipeline = pipeline_of_request(t, event)
    if pipeline is None:
        return
    kind, name = event.kind, event.pipeline
    cluster = event.get("cluster", KINDS.get(kind, ""))
    released = event.get("release", "")
    lease, waits = t.leases.get((name, cluster)), t.waits(name, cluster)
    lease = None if lease is not None and lease.kind == released else lease
    waits = None if waits is not None and waits.kind == released else waits
    if not pipeline.admitted:
        refuse(t, event, f"{name} has not been admitted")
    elif kind not in KINDS or cluster not in pipeline.clusters or not runs_on(kind, cluster):
        refuse(t, event, f"{name} cannot request {kind or 'nothing'} on {cluster or 'no cluster'}")
    elif released == GENERATION:
        refuse(
            t, event, f"{name} cannot release generation and request in one operation; its replicas must sleep first"
        )
    elif waits is not None and not waits.again:
        refuse(t, event, f"{name} already waits for {cluster}")
    elif lease is not None and lease.kind != kind:
        refuse(t, event, f"{name} holds {cluster} for {lease.kind} and cannot request it for {kind}")
    elif pipeline.releasing and cluster == GENERATION:
        refuse(t, event, f"{name} is releasing its generation; request again once it is released")
    else:
        for where in (cluster, KINDS.get(released, "")):
            give_back(t, name, where, released)
        if lease is not None and (lease.devices or lease.active):
            answer(t, Request(name, cluster, kind, lease.since))
            return
        target = event.get("target", pipeline.progress[1]) if kind == GENERATION else 0
        if kind == GENERATION:
            t.change(name, set_up=True, estimate=target)
        t.requests = tuple(waiting for waiting in t.requests if waiting != waits)
        queue(t, Request(name, cluster, kind, 0, target))


def runs_on(kind: str, cluster: str) -> bool:
    """Whether a kind may use a cluster: generation only its own, which otherwise allows only initialisation."""
    return cluster == GENERATION if kind == GENERATION else cluster != GENERATION or kind == "initialisation"


def queue(t: DeskTurn, request: Request) -> None:
    t.serial += 1
    request = replace(request, number=t.serial, held=is_held(t, request))
    t.requests += (request,)
    if request.held:
        t.alarm(t.settings.admission_ms, "admission", request.pipeline, "trains")
    else:
        enter(t, request)


def enter(t: DeskTurn, request: Request) -> None:
    t.due = True
    if not request.again:
        t.alarm(t.settings.request_ms, "request", request.number)
    ids = {name: getattr(request, name) for name in ("cluster", "kind", "number", "target")}
    t.note("queued", request.pipeline, **ids)


def answer(t: DeskTurn, request: Request) -> None:
    name, cluster = request.key
    lease = t.leases[request.key]
    bundles = t.pipelines[name].generation.bundles
    devices = lease.devices.union(*(bundles[replica] for replica in lease.active))
    t.requests = tuple(waiting for waiting in t.requests if waiting.key != request.key)
    t.say("granted", name, kind=lease.kind, cluster=cluster, devices=tuple(sorted(devices)))


def on_release(t: DeskTurn, event: Event) -> None:
    """Release devices. A request not granted yet is withdrawn; releasing something not held changes nothing."""
    if event.kind == GENERATION and event.pipeline in t.pipelines:
        on_planned_release(t, event)
    elif event.pipeline in t.pipelines:
        give_back(t, event.pipeline, event.get("cluster", KINDS.get(event.kind, "")), event.kind)


def give_back(t: DeskTurn, name: str, cluster: str, kind: str) -> None:
    """End a lease and free its devices, or withdraw the request. Leases of generation end elsewhere, after their replicas sleep."""
    key = name, cluster
    lease = t.leases.get(key)
    withdraw(t, key, kind)
    if lease is not None and lease.kind == kind != GENERATION:
        t.idle |= lease.devices
        t.leases = t.leases.without(key)
        t.due = True
        if kind == "training":
            t.change(name, handed_over=True)


def withdraw(t: DeskTurn, key: tuple[str, str], kind: str) -> None:
    if any((waiting.key, waiting.kind) == (key, kind) for waiting in t.requests):
        t.requests = tuple(waiting for waiting in t.requests if waiting.key != key)
        t.note("withdrawn", key[0], cluster=key[1])
        t.due = True


def on_planned_release(t: DeskTurn, event: Event) -> None:
    if (pipeline := pipeline_of_request(t, event)) is not None:
        withdraw(t, (event.pipeline, GENERATION), GENERATION)
        t.change(event.pipeline, releasing=True, waiters=pipeline.waiters + 1)
        t.due = True


def release_generation(t: DeskTurn, name: str) -> None:
    pipeline = t.pipelines[name]
    for _ in range(pipeline.waiters):
        t.say("released", name, kind=GENERATION)
    lease = t.leases.get((name, GENERATION))
    if lease is not None and lease.kind == GENERATION:
        t.leases = t.leases.without((name, GENERATION))
    t.change(name, releasing=False, waiters=0)
    t.due = True
    if pipeline.closing:
        drop_pipeline(t, name, "unregistered")


def on_resize(t: DeskTurn, event: Event) -> None:
    pipeline = pipeline_of_request(t, event)
    if pipeline is None:
        return
    add, remove = (frozenset(numbers(event.get(name, ()))) for name in ("add", "remove"))
    if bool(add) == bool(remove):
        refuse(t, event, "a resize needs exactly one of add and remove")
    elif odd := sorted(replica for replica in add | remove if replica >= len(pipeline.generation.bundles)):
        refuse(t, event, f"{event.pipeline} has no replica {odd[0]}")
    elif gone := sorted((add | remove) & pipeline.dead):
        refuse(t, event, f"replica {gone[0]} of {event.pipeline} died")
    else:
        t.change(event.pipeline, out=(pipeline.out | remove) - add)
        t.due = True
        t.say("resized", event.pipeline, out=tuple(sorted((pipeline.out | remove) - add)))


# -- progress -------------------------------------------------------------------------------------------------------------


def on_progress(t: DeskTurn, event: Event) -> None:
    """Record how much of the awaited step is complete. A repeated report is not progress. New work may need idle devices.

    A pipeline trains all of its weights or adapters, so it reports "training" or each adapter; validation goes with both.
    """
    pipeline = t.pipelines.get(event.pipeline)
    stream, report = event.get("stream", "training"), (min(event.completed, event.target), event.target)
    if pipeline is not None and pipeline.streams.get(stream) != report:
        if others := [known for known in pipeline.streams if are_mixed(known, stream)]:
            why = f"{event.pipeline} reports progress of {others[0]} and cannot report {stream} too; report each adapter, or none"
            refuse(t, event, why)
            return
        t.change(event.pipeline, streams=pipeline.streams.put(stream, report), moved=pipeline.moved + 1)
        t.due |= pipeline.remaining == 0 < t.pipelines[event.pipeline].remaining


def is_of_adapter(stream: str) -> bool:
    return stream.startswith("adapter ")


def are_mixed(*streams: str) -> bool:
    return "training" in streams and any(map(is_of_adapter, streams))


def on_progress_end(t: DeskTurn, event: Event) -> None:
    pipeline, stream = t.pipelines.get(event.pipeline), event.get("stream", "training")
    if pipeline is not None and stream in pipeline.streams:
        t.change(event.pipeline, streams=pipeline.streams.without(stream), moved=pipeline.moved + 1)


def lacks_replicas(t: DeskTurn, name: str) -> bool:
    """Whether a pipeline has no replica, none on the way and no request for one, unless it reports that it needs none."""
    pipeline = t.pipelines[name]
    idle = not t.active(name) and not t.under_way(name) and t.waits(name, GENERATION) is None
    return idle and not pipeline.leaving and (not pipeline.streams or pipeline.remaining > 0)


# -- leaving --------------------------------------------------------------------------------------------------------------


def on_unregister(t: DeskTurn, event: Event) -> None:
    """Put its replicas to sleep and free its other devices; its waiting requests get an error. Repeated calls change nothing."""
    name = event.pipeline
    if name not in t.pipelines:
        t.say("unregistered", name)
    elif not t.pipelines[name].closing:
        wake_waiters(t, name, "unregistered")
        for (who, cluster), lease in t.leases.items():
            if who == name:
                give_back(t, name, cluster, lease.kind)
        t.change(name, closing=True, streams=Map())
        t.due = True


def wake_waiters(t: DeskTurn, name: str, how: str) -> None:
    for request in t.requests:
        if request.pipeline == name:
            t.note("withdrawn", name, cluster=request.cluster)
            if not request.again:
                t.say("error", name, of="acquire", kind=request.kind, cluster=request.cluster, why=f"{name} {how}")
    t.requests = tuple(request for request in t.requests if request.pipeline != name)


def drop_pipeline(t: DeskTurn, name: str, how: str) -> None:
    """Remove a pipeline with everything that it held. Operations in progress on it no longer have an effect."""
    wake_waiters(t, name, how)
    pipeline = t.pipelines[name]
    for _ in range(pipeline.waiters):
        t.say("released", name, kind=GENERATION)
    moving = [replica for who, replica in t.sleeping | t.waking if who == name]
    t.idle = t.idle.union(*(pipeline.generation.bundles[replica] for replica in [*t.active(name), *moving]))
    t.idle = t.idle.union(*(lease.devices for key, lease in t.leases.items() if key[0] == name))
    t.leases = Map({key: lease for key, lease in t.leases.items() if key[0] != name})
    t.sleeping = frozenset(pair for pair in t.sleeping if pair[0] != name)
    t.waking = frozenset(pair for pair in t.waking if pair[0] != name)
    t.pipelines = t.pipelines.without(name)
    t.left |= {name}
    t.note("gone", name, how=how, idle=tuple(sorted(t.idle)))
    t.say("unregistered", name)
    t.due = True


HANDLERS: dict[str, Callable[[DeskTurn, Event], None]] = {
    "register": on_register,
    "admit": on_admit,
    "acquire": on_acquire,
    "release": on_release,
    "planned_release": on_planned_release,
    "resize": on_resize,
    "unregister": on_unregister,
    "progress": on_progress,
    "progress_end": on_progress_end,
    "shrunk": on_shrunk,
    "expanded": on_expanded,
    "died": on_died,
    "restarted": on_restarted,
    "error": on_error,
    "alarm": on_alarm,
    "taken": lambda *_: None,  # only the ledger needs it
    "freed": lambda *_: None,
}
