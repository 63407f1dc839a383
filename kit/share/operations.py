"""What a pipeline may ask of the desk. Each operation may come twice; what cannot be done is refused with a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kit.loop.messages import Event, Map, listed, numbers
from kit.share.state import CLUSTERS, GENERATION, KINDS, Cluster, Pipeline, Request

if TYPE_CHECKING:
    from kit.share.state import Turn


def fail(t: Turn, why: str) -> None:
    """The desk cannot go on."""
    t.error = why


def refuse(t: Turn, event: Event, why: str) -> None:
    ids = {name: event[name] for name in ("kind", "cluster") if event.get(name) is not None}
    t.say("error", event.pipeline, of=event.name, why=why, **ids)


def known(t: Turn, event: Event) -> Pipeline | None:
    """The pipeline that asks. One that is not there, or on its way out, is refused."""
    one: Pipeline | None = t.pipelines.get(event.pipeline)
    if one is None or one.closing:
        refuse(t, event, f"the pipeline {event.pipeline} is not registered")
        return None
    return one


# -- coming ---------------------------------------------------------------------------------------------------------------


def on_register(t: Turn, event: Event) -> None:
    """A second time with the same clusters it changes nothing."""
    name, tp = event.pipeline, event.get("tp", 1)
    given = {cluster: numbers(str(event[cluster])) for cluster in CLUSTERS if event.get(cluster) is not None}
    clusters = Map({cluster: Cluster(some, tp if cluster == GENERATION else 1) for cluster, some in given.items()})
    there = t.pipelines.get(name)
    generation = given.get(GENERATION, ())
    if name not in t.settings.pipelines:
        refuse(t, event, f"no pipeline {name} is expected; those are {', '.join(t.settings.pipelines)}")
    elif name in t.left or (there is not None and (there.closing or there.clusters != clusters)):
        refuse(t, event, f"{name} was registered before")
    elif odd := sorted({*generation, *(one for some in given.values() for one in some)} - {*range(t.settings.devices)}):
        refuse(t, event, f"{name} names the devices {odd}; there are {t.settings.devices}")
    elif any(len({*some}) < len(some) for some in given.values()):
        refuse(t, event, f"{name} names a device twice in one cluster")
    elif tp < 1 or len(generation) % tp:
        refuse(t, event, f"{name} has {len(generation)} devices to generate on, which tp={tp} does not divide")
    else:
        if there is None:
            t.pipelines = t.pipelines.put(name, Pipeline(clusters))
            t.note("clusters", name, tp=tp, **{cluster: listed(some) for cluster, some in given.items()})
        t.say("registered", name)


def on_admit(t: Turn, event: Event) -> None:
    if (one := known(t, event)) is not None:
        if one.admitted:
            t.say("admitted", event.pipeline)
        elif not one.asked:
            t.change(event.pipeline, asked=True)
            if t.settings.admission_ms:
                t.alarm(t.settings.admission_ms, "admission", event.pipeline, "starts")


def admit(t: Turn) -> None:
    """A pipeline is admitted after the first hand-over of the one before it. That one then trains on once this one is set up.

    Both sides have a limit, and reaching it is reported.
    """
    before = None
    for name, one in t.pipelines.items():
        if one.asked and not one.admitted and may_start(t, before, one):
            t.change(name, admitted=True)
            t.say("admitted", name)
        before = t.pipelines[name]
    for request in t.requests:
        if request.held and not is_held(t, request):
            t.requests = tuple(replace(each, held=False) if each == request else each for each in t.requests)
            enter(t, request)


def may_start(t: Turn, before: Pipeline | None, one: Pipeline) -> bool:
    over = before is None or before.handed_over or before.closing
    return over or "starts" in one.overdue or not t.settings.admission_ms


def is_held(t: Turn, request: Request) -> bool:
    """Training after the first hand-over waits for the set-up of the next pipeline."""
    one, names = t.pipelines[request.pipeline], list(t.pipelines)
    after = names[names.index(request.pipeline) + 1 :][:1]
    first = request.kind != "training" or not one.handed_over or "trains" in one.overdue or not t.settings.admission_ms
    return not first and any(not t.pipelines[name].set_up and not t.pipelines[name].closing for name in after)


# -- requests -------------------------------------------------------------------------------------------------------------


def on_acquire(t: Turn, event: Event) -> None:
    """A granted request asked again gets the same devices. Another priority, or a second pending one, is refused."""
    one = known(t, event)
    if one is None:
        return
    kind, name = event.kind, event.pipeline
    cluster = event.get("cluster", KINDS.get(kind, ""))
    given = event.get("release", "")
    lease, waits = t.leases.get((name, cluster)), t.waits(name, cluster)
    lease = None if lease is not None and lease.kind == given else lease
    waits = None if waits is not None and waits.kind == given else waits
    if not one.admitted:
        refuse(t, event, f"{name} has not been admitted")
    elif kind not in KINDS or cluster not in one.clusters or not runs_on(kind, cluster):
        refuse(t, event, f"{name} cannot ask for {kind or 'nothing'} on {cluster or 'no cluster'}")
    elif given == GENERATION:
        refuse(t, event, f"{name} cannot release its generation and ask in one operation; its replicas sleep first")
    elif waits is not None and not waits.again:
        refuse(t, event, f"{name} waits for {cluster} already")
    elif lease is not None and lease.kind != kind:
        refuse(t, event, f"{name} holds {cluster} for {lease.kind} and asks for it as {kind}")
    elif one.releasing and cluster == GENERATION:
        refuse(t, event, f"{name} releases its generation; ask when it is released")
    else:
        for where in (cluster, KINDS.get(given, "")):
            give_back(t, name, where, given)
        if lease is not None and (lease.devices or lease.active):
            answer(t, Request(name, cluster, kind, lease.since))
            return
        target = event.get("target", one.progress[1]) if kind == GENERATION else 0
        if kind == GENERATION:
            t.change(name, set_up=True, estimate=target)
        t.requests = tuple(each for each in t.requests if each != waits)
        queue(t, Request(name, cluster, kind, 0, target))


def runs_on(kind: str, cluster: str) -> bool:
    """Generation runs on its own cluster only, and there nothing else but what initialises it."""
    return cluster == GENERATION if kind == GENERATION else cluster != GENERATION or kind == "initialisation"


def queue(t: Turn, request: Request) -> None:
    t.serial += 1
    request = replace(request, number=t.serial, held=is_held(t, request))
    t.requests += (request,)
    if request.held:
        t.alarm(t.settings.admission_ms, "admission", request.pipeline, "trains")
    else:
        enter(t, request)


def enter(t: Turn, request: Request) -> None:
    """From here on it waits in the queue."""
    t.due = True
    if not request.again:
        t.alarm(t.settings.request_ms, "request", request.number)
    t.note(
        "queued",
        request.pipeline,
        cluster=request.cluster,
        kind=request.kind,
        number=request.number,
        target=request.target,
    )


def answer(t: Turn, request: Request) -> None:
    """The devices of a lease, to the pipeline that asked for it."""
    name, cluster = request.key
    lease = t.leases[request.key]
    bundles = t.pipelines[name].generation.bundles
    devices = lease.devices.union(*(bundles[one] for one in lease.active))
    t.requests = tuple(one for one in t.requests if one.key != request.key)
    t.say("granted", name, kind=lease.kind, cluster=cluster, devices=listed(sorted(devices)))


def on_release(t: Turn, event: Event) -> None:
    """What was not granted yet is withdrawn. A release of what is not held changes nothing."""
    if event.kind == GENERATION and event.pipeline in t.pipelines:
        on_planned_release(t, event)
    elif event.pipeline in t.pipelines:
        give_back(t, event.pipeline, event.get("cluster", KINDS.get(event.kind, "")), event.kind)


def give_back(t: Turn, name: str, cluster: str, kind: str) -> None:
    """End a lease, the devices of which are free: every one but that of generation, whose replicas sleep first."""
    key = name, cluster
    lease = t.leases.get(key)
    withdraw(t, key, kind)
    if lease is not None and lease.kind == kind != GENERATION:
        t.idle |= lease.devices
        t.leases = t.leases.without(key)
        t.due = True
        if kind == "training":
            t.change(name, handed_over=True)


def withdraw(t: Turn, key: tuple[str, str], kind: str) -> None:
    if any((one.key, one.kind) == (key, kind) for one in t.requests):
        t.requests = tuple(one for one in t.requests if one.key != key)
        t.note("withdrawn", key[0], cluster=key[1])
        t.due = True


def on_planned_release(t: Turn, event: Event) -> None:
    """All replicas of a pipeline fall asleep, and its lease ends."""
    if (one := known(t, event)) is not None:
        withdraw(t, (event.pipeline, GENERATION), GENERATION)
        t.change(event.pipeline, releasing=True, waiters=one.waiters + 1)
        t.due = True


def release_generation(t: Turn, name: str) -> None:
    """Nothing of it is active any more: the lease ends, and every waiter has its answer."""
    one = t.pipelines[name]
    for _ in range(one.waiters):
        t.say("released", name, kind=GENERATION)
    lease = t.leases.get((name, GENERATION))
    if lease is not None and lease.kind == GENERATION:
        t.leases = t.leases.without((name, GENERATION))
    t.change(name, releasing=False, waiters=0)
    t.due = True
    if one.closing:
        drop(t, name, "unregistered")


def on_resize(t: Turn, event: Event) -> None:
    one = known(t, event)
    if one is None:
        return
    add, remove = (frozenset(numbers(str(event.get(name, "")))) for name in ("add", "remove"))
    if bool(add) == bool(remove):
        refuse(t, event, "a resize names exactly one of add and remove")
    elif odd := sorted(one for one in add | remove if one >= len(t.pipelines[event.pipeline].generation.bundles)):
        refuse(t, event, f"{event.pipeline} has no replica {odd[0]}")
    elif gone := sorted((add | remove) & one.dead):
        refuse(t, event, f"replica {gone[0]} of {event.pipeline} died")
    else:
        t.change(event.pipeline, out=(one.out | remove) - add)
        t.due = True
        t.say("resized", event.pipeline, out=listed(sorted((one.out | remove) - add)))


# -- progress -------------------------------------------------------------------------------------------------------------


def on_progress(t: Turn, event: Event) -> None:
    """How much of the awaited step is there. A report that says the same again is no progress."""
    one = t.pipelines.get(event.pipeline)
    stream, report = event.get("stream", "training"), (min(event.completed, event.target), event.target)
    if one is not None and one.streams.get(stream) != report:
        t.change(event.pipeline, streams=one.streams.put(stream, report), moved=one.moved + 1)


def on_progress_end(t: Turn, event: Event) -> None:
    one, stream = t.pipelines.get(event.pipeline), event.get("stream", "training")
    if one is not None and stream in one.streams:
        t.change(event.pipeline, streams=one.streams.without(stream), moved=one.moved + 1)


def waits_for(t: Turn, name: str) -> bool:
    """Whether a pipeline generates, has no replica, and does not say that it needs none."""
    one = t.pipelines[name]
    idle = not t.active(name) and not t.under_way(name) and t.waits(name, GENERATION) is None
    return idle and not one.leaving and (not one.streams or one.remaining > 0)


# -- going ----------------------------------------------------------------------------------------------------------------


def on_unregister(t: Turn, event: Event) -> None:
    """Its replicas fall asleep, its other devices are free; who waits for something of it gets an error. Later calls do nothing."""
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


def wake_waiters(t: Turn, name: str, how: str) -> None:
    """Whoever waits for a request of a pipeline that goes gets an error."""
    for one in t.requests:
        if one.pipeline == name:
            t.note("withdrawn", name, cluster=one.cluster)
            if not one.again:
                t.say("error", name, of="acquire", kind=one.kind, cluster=one.cluster, why=f"{name} {how}")
    t.requests = tuple(one for one in t.requests if one.pipeline != name)


def drop(t: Turn, name: str, how: str) -> None:
    """A pipeline is gone, with everything that it held. Operations on it that are under way have no effect any more."""
    wake_waiters(t, name, how)
    one = t.pipelines[name]
    for _ in range(one.waiters):
        t.say("released", name, kind=GENERATION)
    bundles = one.generation.bundles
    for key, lease in t.leases.items():
        if key[0] == name:
            t.idle = t.idle.union(lease.devices, *(bundles[replica] for replica in lease.active))
            t.leases = t.leases.without(key)
    for who, replica in t.sleeping | t.waking:
        if who == name:
            t.idle |= bundles[replica]
    t.sleeping = frozenset(pair for pair in t.sleeping if pair[0] != name)
    t.waking = frozenset(pair for pair in t.waking if pair[0] != name)
    t.pipelines = t.pipelines.without(name)
    t.left |= {name}
    t.note("gone", name, how=how, idle=listed(sorted(t.idle)))
    t.say("unregistered", name)
    t.due = True


def alarmed(t: Turn, what: tuple[Any, ...]) -> None:
    """A request, or one side of an admission, has reached its limit."""
    if what[0] == "request":
        for request in t.requests:
            if request.number == what[1]:
                t.requests = tuple(one for one in t.requests if one != request)
                t.due = True
                t.note("expired", request.pipeline, cluster=request.cluster, kind=request.kind, number=request.number)
                why = f"{request.kind} of {request.pipeline} was not granted within {t.settings.request_ms} ms"
                t.say("error", request.pipeline, of="acquire", kind=request.kind, cluster=request.cluster, why=why)
    elif what[0] == "admission" and what[1] in t.pipelines:
        one = t.pipelines[what[1]]
        if what[2] == "trains" or not one.admitted:
            t.change(what[1], overdue=one.overdue | {what[2]})
            t.note("admission_limit", what[1], side=what[2])
