"""The known bugs of the desk and of pipelines in the lab `share`: what a fault puts in place of the right code. Notebook side.

Originals are bound when this module is imported, before the first replacement is in place.
"""

from __future__ import annotations

from dataclasses import replace

from kit.labs.share.lab import ShareConfig
from kit.labs.share.scenarios import SCENARIOS, Scenario, trains
from kit.loop.messages import Command, Event, Map
from kit.results.records import Id
from kit.share import core
from kit.share.core import Scheduler
from kit.share.judge.specified import SPECIFIED
from kit.share.member import Joined, Member
from kit.share.planner import PLANNERS, Gaps, Planner, Share, Supply, View, gap_ratio, make_plan, share_of
from kit.share.simulated import DeskSimulation
from kit.share.state import GENERATION, PRIORITY, DeskFields, DeskState, DeskTurn, Op, Plan, Request
from kit.stream import core as stream
from kit.stream import generation
from kit.stream.adapters import Reports, ReportsByAdapter
from kit.stream.generation import StreamState, StreamTurn

advance, answer, drop, expand, grant = core.advance, core.answer, core.drop_pipeline, core.expand, core.grant
lose, queue, shrink = core.lose, core.queue, core.shrink_replica
run_scenario = Scenario.run
desk_step, member_step, adapted = Scheduler.step, Member.step, Member.adapted
meets, measure_gaps, order = Supply.meets, Gaps.__init__, Gaps.order
on_left, send, report_progress = generation.on_left, generation.send_waiting, stream.report_progress
may_choose, reports_by_adapter = stream.may_choose, ReportsByAdapter.reports

# -- the desk: who gets which devices -------------------------------------------------------------------------------------


def gives_twice(supply: Supply, request: Request) -> bool:
    idle = set(supply.idle)
    met = meets(supply, request)
    supply.idle |= idle
    return met


def keeps_nothing(supply: Supply, request: Request) -> bool:
    supply.kept.clear()
    return meets(supply, request)


def share_of_removed(f: DeskFields, name: str, shrunk: list[tuple[str, int]]) -> Share:
    share = share_of(f, name, shrunk)
    share.touched -= f.pipelines[name].out
    return share


def grants_unseen(t: DeskTurn, op: Op) -> None:
    idle, t.idle = t.idle, t.idle | op.devices
    grant(t, op)
    t.idle = idle - op.devices


def advances_at_once(t: DeskTurn) -> None:
    sleeping, t.sleeping = t.sleeping, frozenset()
    advance(t)
    t.sleeping = sleeping


def numbers_backwards(t: DeskTurn, request: Request) -> None:
    """Later requests get lower numbers, by which they are served and which the desk notes."""
    before, highest = t.serial, 10**6
    t.serial = highest - before
    queue(t, request)
    t.serial = before + t.serial - (highest - before)


def drops_without_devices(t: DeskTurn, name: str, how: str) -> None:
    t.leases = Map({key: lease for key, lease in t.leases.items() if key[0] != name})
    drop(t, name, how)


last_first = property(lambda request: (-PRIORITY[request.kind], request.number))
youngest_first = property(lambda request: (PRIORITY[request.kind], -request.number))


def target_without_floor(gaps: Gaps, share: Share) -> int:
    return (2 * share.remaining * gaps.budget + gaps.weight) // (2 * gaps.weight) if gaps.weight else 0


def gaps_without_tp(gaps: Gaps, view: View) -> None:
    measure_gaps(gaps, View([replace(share, tp=1) for share in view.shares.values()], view.idle, view.devices))
    shares = [view.shares[share.name] for share in gaps.known]
    gaps.eligible = [share for share in shares if share.name in gaps.bundles]
    gaps.known = shares


def lacks_without_demand(gaps: Gaps, share: Share) -> bool:
    return len(share.active) < gaps.bundles[share.name]


def order_without_demand(gaps: Gaps, share: Share) -> tuple[float, int, str]:
    return order(gaps, share) if share.remaining else (float("inf"), 0, share.name)


remaining_beside_progress = property(lambda share: max(share.target - share.completed, 0) + max(share.asks, 0))


def looks_at_first_devices(view: View) -> None:
    for share in view.shares.values():
        for replica in [*share.free] if share.since >= 0 else ():
            if min(share.bundles[replica]) in view.idle:
                view.expand(share.name, replica)


def keeps_half(view: View) -> None:
    kept = view.idle & {*range(view.devices // 2, view.devices)}
    view.idle -= kept
    gap_ratio(view)
    view.idle |= kept


def swaps_at_every_event(view: View) -> None:
    for share in view.shares.values():
        if len(share.bundles) > 1:
            for replica in sorted(share.active)[:1]:
                view.shrink(share.name, replica)
    gap_ratio(view)


LOOKS_AT_FIRST_DEVICES = {**PLANNERS, **dict.fromkeys(SPECIFIED, looks_at_first_devices)}
KEEPS_HALF = {**PLANNERS, **dict.fromkeys(SPECIFIED, keeps_half)}
SWAPS_AT_EVERY_EVENT = {**PLANNERS, **dict.fromkeys(SPECIFIED, swaps_at_every_event)}


def finds_no_violation(*_: object) -> list[str]:
    return []


def never_off_balance(_: object) -> bool:
    return False


def shrinks_for_nothing(supply: Supply, request: Request) -> bool:
    for owner in sorted({supply.owners[device] for device in supply.needs(request) if device in supply.owners}):
        supply.shrink(*owner)
    return meets(supply, request)


def expands_half_a_replica(t: DeskTurn, op: Op, replica: int) -> None:
    expand(t, op, replica)
    if t.commands and t.commands[-1].name == "expand":
        ordered = t.commands.pop()
        devices = ordered.devices[:-1] or ordered.devices
        t.commands.append(Command("expand", ordered.to, ordered.pipeline, **{**dict(ordered.ids), "devices": devices}))


def forgets_what_it_shrank(t: DeskTurn, name: str, replica: int) -> None:
    shrink(t, name, replica)
    if not t.active(name):
        t.leases = t.leases.without((name, GENERATION))


def queues_no_gang(t: DeskTurn, request: Request) -> None:
    cluster = t.pipelines[request.pipeline].clusters[request.cluster]
    if request.kind == GENERATION or len(cluster.devices) == 1:
        queue(t, request)


def answers_twice(t: DeskTurn, request: Request) -> None:
    answer(t, request)
    answer(t, request)


def advances_and_shrinks(t: DeskTurn) -> None:
    """After the orders to wake, also puts a replica to sleep that has none of their devices."""
    plan = None if t.sleeping else t.plan
    advance(t)
    for name in {op.pipeline for op in plan.expands} if plan is not None else ():
        if len(t.active(name)) > 1:
            shrink(t, name, min(t.active(name)))


def plans_only_without_loss(t: DeskTurn, planner: Planner, devices: int, names: tuple[str, ...]) -> Plan:
    lost = [replica for pipeline in t.pipelines.values() for replica in pipeline.dead]
    if lost:
        raise IndexError("list index out of range")
    return make_plan(t, planner, devices, names)


def finishes_before_sleep(t: DeskTurn) -> None:
    for name, pipeline in t.pipelines.items():
        if pipeline.leaving and not t.active(name):
            core.release_generation(t, name)


def loses_and_waits(t: DeskTurn, name: str, replica: int) -> None:
    sleeping = t.sleeping & {(name, replica)}
    lose(t, name, replica)
    t.sleeping |= sleeping


def loses_and_forgets(t: DeskTurn, name: str, replica: int) -> None:
    lose(t, name, replica)
    if t.pipelines[name].releasing:
        t.change(name, waiters=0)


# -- the desk: what it hears and when it answers --------------------------------------------------------------------------


def reports_unclamped(t: DeskTurn, event: Event) -> None:
    if (pipeline := t.pipelines.get(event.pipeline)) is not None:
        stream_name = event.get("stream", "training")
        streams = Map({**pipeline.streams, stream_name: (0, event.target)})
        t.change(event.pipeline, streams=streams, moved=pipeline.moved + 1)


def forgets_the_adapter(t: DeskTurn, event: Event) -> None:
    stream_name = "adapter 0" if core.is_of_adapter(event.get("stream", "")) else "training"
    core.on_progress(t, Event(event.name, event.pipeline, **{**dict(event.ids), "stream": stream_name}))


def makes_no_plan(t: DeskTurn, event: Event) -> None:
    due = t.due
    core.on_progress(t, event)
    t.due = due


def ignores(*_: object) -> None:
    """An event or a rule without effect."""


def drops_every_third_alarm(t: DeskTurn, event: Event) -> None:
    if event.number % 3:
        core.on_alarm(t, event)


PROGRESS_NEVER_ENDS = {**core.HANDLERS, "progress_end": ignores}
REPORTS_MAKE_NO_PLAN = {**core.HANDLERS, "progress": makes_no_plan}
ADAPTERS_IN_ONE_STREAM = {**core.HANDLERS, "progress": forgets_the_adapter}
PROGRESS_IS_UNCLAMPED = {**core.HANDLERS, "progress": reports_unclamped}
EVERY_THIRD_ALARM_IS_DROPPED = {**core.HANDLERS, "alarm": drops_every_third_alarm}
DEATHS_ARE_IGNORED = {**core.HANDLERS, "died": ignores}


def loses_without_a_plan(t: DeskTurn, name: str, replica: int) -> None:
    due = t.due
    lose(t, name, replica)
    t.due = due


RESTARTS_ARE_IGNORED = {**core.HANDLERS, "restarted": ignores}


def adds_nothing_again(t: DeskTurn, event: Event) -> None:
    out = t.pipelines[event.pipeline].out
    core.on_resize(t, event)
    t.change(event.pipeline, out=out | t.pipelines[event.pipeline].out)


def resizes_in_silence(t: DeskTurn, event: Event) -> None:
    core.on_resize(t, event)
    t.commands = [command for command in t.commands if command.name != "resized"]


def joins_the_dead(t: DeskTurn, event: Event) -> None:
    t.waking |= {(event.who, event.replica)}
    core.on_expanded(t, event)


LATE_ANSWERS_COUNT = {**core.HANDLERS, "expanded": joins_the_dead}
RESIZES_IN_SILENCE = {**core.HANDLERS, "resize": resizes_in_silence}
REMOVED_FOR_GOOD = {**core.HANDLERS, "resize": adds_nothing_again}


def watches_nobody(t: DeskTurn) -> None:
    t.alarm(t.settings.watchdog_ms, "watchdog")


def waits_for_all(t: DeskTurn) -> None:
    for request in t.requests:
        replicas = t.pipelines[request.pipeline].generation.bundles
        if request.kind == GENERATION and len(t.active(request.pipeline)) == len(replicas):
            core.answer(t, request)


def always_may_start(*_: object) -> bool:
    return True


def never_holds(*_: object) -> bool:
    return False


def waiters_sleep_on(t: DeskTurn, name: str, _: str) -> None:
    t.requests = tuple(request for request in t.requests if request.pipeline != name)


def hears_nothing_meanwhile(desk: Scheduler, state: DeskState, event: Event) -> tuple[DeskState, tuple[Command, ...]]:
    return (state, ()) if state.plan is not None else desk_step(desk, state, event)


# The pipelines of the scenario "gangs" without a gang: each takes a device, and requests the other one while it holds it.
ONE_BY_ONE = replace(
    SCENARIOS["gangs"],
    lines={
        "a": (*trains(200, 5000), *trains(300, 5000, "critic")),
        "b": (*trains(210, 5000), *trains(310, 5000, "critic")),
    },
    clusters={"a": {"trainer": (0,), "critic": (1,)}, "b": {"trainer": (1,), "critic": (0,)}},
)


def runs_one_by_one(_: Scenario, config: ShareConfig | None = None) -> DeskSimulation:
    return run_scenario(ONE_BY_ONE, config)


# -- pipelines ------------------------------------------------------------------------------------------------------------

NOBODY = -1


def routes_by_an_old_set(t: StreamTurn, event: Event) -> None:
    """Requests are resent using the set of replicas before the shrink, in which the sleeper looks idle. They are cancelled later."""
    before = t.replicas
    on_left(t, event)
    if event.replica in before:
        t.replicas = before.put(event.replica, replace(before[event.replica], load=-1))
        send(t)
        on_left(t, event)


def shrinks_first(member: Member, state: Joined, event: Event) -> tuple[Joined, tuple[Command, ...]]:
    state, commands = member_step(member, state, event)
    shrinks = tuple(command for command in commands if command.name == "shrink")
    return state, (*shrinks, *(command for command in commands if command.name != "shrink"))


def refuses_when_empty(t: StreamTurn) -> None:
    if t.waiting and not t.held and not generation.active(t) and t.version == t.last - 1:
        generation.end_with_error(t, "there is no replica to send a request to")
    send(t)


def forgets_what_was_in_flight(t: StreamTurn, event: Event) -> None:
    if event.replica in t.replicas:
        t.replicas = t.replicas.without(event.replica)


def counts_too_early(t: StreamTurn, event: Event) -> None:
    """The requests to cancel are counted before the last one comes, so that one stays with a sleeping replica."""
    in_flight = [
        (group.id, number)
        for group in t.buffer.values()
        for number, sample in enumerate(group.samples)
        if sample.in_flight and sample.replica == event.replica
    ]
    for group, number in in_flight[-1:]:
        t.put(t.buffer[group].put(number, replica=NOBODY))
    on_left(t, event)
    for group, number in in_flight[-1:]:
        t.put(t.buffer[group].put(number, replica=event.replica))


OLD_SET_ROUTES = {**stream.HANDLERS, "left": routes_by_an_old_set}
IN_FLIGHT_IS_FORGOTTEN = {**stream.HANDLERS, "left": forgets_what_was_in_flight}
COUNTED_TOO_EARLY = {**stream.HANDLERS, "left": counts_too_early}


def waits_for_every_adapter(t: StreamTurn) -> bool:
    adapters = t.settings.window + 1
    steps = min(adapters, t.last - t.version)
    begins_round = t.version % adapters == 0
    complete = sum(group.order >= 0 for group in t.buffer.values())
    return may_choose(t) and not (begins_round and complete < steps * t.settings.groups)


def reports_fifty_times(t: StreamTurn) -> None:
    before = len(t.commands)
    report_progress(t)
    t.commands[before:] = [
        replace_ids(report, completed=50 * report.completed, target=50 * report.target)
        for report in t.commands[before:]
    ]


def reports_all_complete(t: StreamTurn) -> None:
    before = len(t.commands)
    report_progress(t)
    t.commands[before:] = [replace_ids(report, completed=report.target) for report in t.commands[before:]]


def adapters_report_fifty_times(loop: ReportsByAdapter, state: StreamState) -> Reports:
    reports = reports_by_adapter(loop, state)
    return {adapter: (50 * completed, 50 * target) for adapter, (completed, target) in reports.items()}


def adapters_report_all_complete(loop: ReportsByAdapter, state: StreamState) -> Reports:
    return {adapter: (target, target) for adapter, (_, target) in reports_by_adapter(loop, state).items()}


def replace_ids(command: Command, **ids: Id) -> Command:
    return Command(command.name, command.to, command.pipeline, **{**dict(command.ids), **ids})


def releases_at_once(
    member: Member, state: Joined, after: object, commands: tuple[Command, ...]
) -> tuple[Joined, tuple[Command, ...]]:
    state, commands = adapted(member, state, after, commands)
    if any(command.name == "finish" and command.to == "trainer" for command in commands):
        commands += (member.ask("release", kind="training"),)
    return state, commands


def asks_before_it_is_there(member: Member, state: Joined, event: Event) -> tuple[Joined, tuple[Command, ...]]:
    if state.core is None and event.name == "admitted":
        return state, (member.ask("acquire", kind="generation", target=1),)
    if state.core is None and event.name == "granted":
        return member.start()
    return member_step(member, state, event)
