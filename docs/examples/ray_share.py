"""Pipelines of Ray that share devices: the kit's desk as a named actor, and a virtual cluster for a pipeline written for NeMo-RL.

The desk is in a namespace of its own, each pipeline's actors in another one, so that pipelines may give their actors equal names. One
placement group has a bundle for each device; device mappings number its bundles. `python docs/examples/ray_share.py` runs two pipelines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from kit.errors import BadInput, KitError
from kit.loop.messages import Command, Event
from kit.share.core import Scheduler
from kit.share.state import GENERATION, DeskSettings

DESK = "desk"
DESK_NAMESPACE = "kit-desk"
COORDINATOR = "coordinator"  # a pipeline's actor that the desk calls: ping(), sleep(replica), wake(replica)
PING_S = 1.0


def namespace_of(pipeline: str) -> str:
    return f"kit-pipeline-{pipeline}"


def device_bundles(devices: int, *, gpus: bool) -> list[dict[str, float]]:
    """One bundle a device, so that the number of a device is that of its bundle."""
    return [{"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0} for _ in range(devices)]


def check_mapping(mapping: Sequence[int], devices: int, tp: int) -> tuple[int, ...]:
    """A mapping of ranks to devices, if the cluster can have it."""
    numbers = tuple(mapping)
    if not numbers or not all(type(number) is int for number in numbers):
        raise BadInput(f"a device mapping is a list of device numbers, not {list(numbers)}")
    if absent := sorted({*numbers} - {*range(devices)}):
        raise BadInput(
            f"the device mapping {list(numbers)} names {absent}, but the cluster has {devices} devices, numbered from 0"
        )
    if len({*numbers}) < len(numbers):
        raise BadInput(f"the device mapping {list(numbers)} names a device twice")
    if tp < 1 or len(numbers) % tp:
        raise BadInput(f"tp={tp} does not divide the {len(numbers)} devices of the mapping {list(numbers)}")
    return numbers


class VirtualCluster:
    """The part of NeMo-RL's RayVirtualCluster that its worker groups use, over some bundles of a group that pipelines share.

    `colocated`: how many worker groups may hold a bundle at once; each of their workers asks for that part of it.
    """

    def __init__(self, group: Any, mapping: Sequence[int], *, tp: int = 1, colocated: int = 1) -> None:
        self.group = group
        self.mapping = check_mapping(mapping, len(group.bundle_specs), tp)
        self.tp = tp
        self.use_gpus = "GPU" in group.bundle_specs[0]
        self.max_colocated_worker_groups = colocated

    def get_placement_groups(self) -> list[Any]:
        return [self.group]

    def world_size(self) -> int:
        return len(self.mapping)

    def node_count(self) -> int:
        return len({*self._nodes().values()})

    @property
    def bundle_indices(self) -> list[tuple[int, list[int]]]:
        """For each tied group of workers: the number of its placement group, and its bundles."""
        starts = range(0, len(self.mapping), self.tp)
        return [(0, list(self.mapping[start : start + self.tp])) for start in starts]

    def options(self, rank: int) -> dict[str, Any]:
        """Ray's options for the worker of this rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        part = 1.0 / self.max_colocated_worker_groups
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.mapping[rank])
        return {"scheduling_strategy": place, "num_cpus": part, "num_gpus": part if self.use_gpus else 0}

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Of the machine of rank 0."""
        import ray

        def address() -> tuple[str, int]:
            import socket

            with socket.socket() as door:
                door.bind(("", 0))
                return ray.util.get_node_ip_address(), door.getsockname()[1]

        found: tuple[str, int] = ray.get(ray.remote(address).options(**self.options(0)).remote())
        return found

    def shutdown(self) -> bool:
        """The group stays, because it belongs to the desk. Returns whether it was removed."""
        return False

    def _nodes(self) -> dict[int, str]:
        from ray.util import placement_group_table

        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        return {number: nodes[number] for number in self.mapping}


class Desk:
    """An asynchronous actor: pipelines await its answers, and it awaits their coordinators.

    A coordinator that is dead is found by a ping, or when it is called. Its pipeline is unregistered then, unless it waits for a planned
    release: that is completed first. Its replicas are actors that it made, so they end with it and hold no device.
    """

    def __init__(self, devices: int, pipelines: Sequence[str], *, gpus: bool = False, wait_s: float = 60.0) -> None:
        from ray.util.placement_group import placement_group

        self.wait_s = wait_s
        ms = int(1000 * wait_s)
        limits = {"request_ms": ms, "operation_ms": ms, "admission_ms": 0}
        self.core = Scheduler(DeskSettings(devices=devices, pipelines=tuple(pipelines), **limits))
        self.group = placement_group(device_bundles(devices, gpus=gpus))
        self.coordinators: dict[str, Any] = {}
        self.waiting: dict[tuple[str, str], list[asyncio.Future[Event]]] = {}  # by pipeline and the answer's name
        self.tasks: set[asyncio.Task[None]] = set()
        self.notes: list[tuple[str, str]] = []  # the name of each note and its pipeline
        self.state, commands = self.core.begin()
        self.first = commands  # executed once there is a loop

    # -- what pipelines call ------------------------------------------------------------------------------------------

    async def register(self, pipeline: str, mappings: Mapping[str, Sequence[int]], tp: int = 1) -> Any:
        """Register the pipeline of the coordinator in its namespace; returns the placement group, which is there by then."""
        import ray

        for cluster, mapping in mappings.items():
            check_mapping(mapping, self.core.settings.devices, tp if cluster == GENERATION else 1)
        await self._begin()
        try:
            coordinator = ray.get_actor(COORDINATOR, namespace=namespace_of(pipeline))
        except ValueError:
            where = namespace_of(pipeline)
            raise BadInput(
                f"{pipeline} has no actor {COORDINATOR!r} in the namespace {where!r}; start it first"
            ) from None
        await self.ask(pipeline, "register", "registered", tp=tp, **{name: tuple(m) for name, m in mappings.items()})
        self.coordinators[pipeline] = coordinator
        self._go(self._watch(pipeline))
        await self.ask(pipeline, "admit", "admitted")
        return self.group

    async def acquire(self, pipeline: str, kind: str, target: int = 0) -> tuple[int, ...]:
        granted = await self.ask(pipeline, "acquire", "granted", kind=kind, target=target)
        return tuple(granted.get("devices", ()))

    async def release(self, pipeline: str, kind: str) -> None:
        self._turn(Event("release", pipeline, kind=kind))

    async def planned_release(self, pipeline: str) -> None:
        await self.ask(pipeline, "planned_release", "released")

    async def unregister(self, pipeline: str) -> None:
        await self.ask(pipeline, "unregister", "unregistered")
        self.coordinators.pop(pipeline, None)

    async def registered(self) -> list[str]:
        return list(self.state.pipelines)

    async def idle(self) -> list[int]:
        return sorted(self.state.idle)

    async def ask(self, pipeline: str, name: str, answer: str, **ids: Any) -> Event:
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault((pipeline, answer), []).append(future)
        self._turn(Event(name, pipeline, **ids))
        try:
            event = await asyncio.wait_for(future, 2 * self.wait_s)
        except TimeoutError:
            raise KitError(f"the desk did not answer {name} of {pipeline} within {2 * self.wait_s:g} s") from None
        if event.name == "error":
            raise BadInput(f"{name} of {pipeline} was refused: {event.why}")
        return event

    # -- how ------------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        first, self.first = self.first, ()
        for command in first:
            self._carry(command)
        try:
            await asyncio.wait_for(self.group.ready(), self.wait_s)
        except TimeoutError:
            devices = self.core.settings.devices
            text = f"the Ray cluster has had no room for {devices} bundles of {self.group.bundle_specs[0]} for {self.wait_s:g} s"
            raise KitError(f"{text}; `ray status` shows its use") from None

    def _turn(self, event: Event) -> None:
        self.state, commands = self.core.step(self.state, event)
        for command in commands:
            self._carry(command)

    def _carry(self, command: Command) -> None:
        ids = dict(command.ids)
        if command.to == "clock":
            alarm = Event("alarm", DESK, number=command.number)
            asyncio.get_running_loop().call_later(command.ms / 1000, self._turn, alarm)
        elif command.to == "devices" or command.name == "left":
            self._go(self._move(command.pipeline, command.name, command.replica))
        elif command.to == "ledger":
            self.notes.append((command.name, command.pipeline))
        elif command.name == "error" and "of" in ids:
            answers = {"acquire": "granted", "register": "registered", "admit": "admitted"}
            wanted = {
                answers.get(ids["of"], ids["of"]),
                *({"granted", "released", "unregistered"} if ids["of"] == DESK else ()),
            }
            for name in wanted:
                self._answer(command.pipeline, name, Event("error", command.pipeline, **ids))
        else:
            self._answer(command.pipeline, command.name, Event(command.name, command.pipeline, **ids))

    def _answer(self, pipeline: str, name: str, event: Event) -> None:
        for future in self.waiting.pop((pipeline, name), []):
            if not future.done():
                future.set_result(event)

    def _go(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)  # the loop alone would let go of it
        task.add_done_callback(self.tasks.discard)

    async def _move(self, pipeline: str, order: str, replica: int) -> None:
        """Have a replica sleep or wake; its coordinator's answer is an event."""
        from ray.exceptions import RayActorError, RayError

        method, done, of = ("sleep", "shrunk", "shrink") if order == "left" else ("wake", "expanded", "expand")
        if (coordinator := self.coordinators.get(pipeline)) is None:  # dead, so its replicas are
            return
        try:
            await getattr(coordinator, method).remote(replica)
        except RayActorError:
            self._lose(pipeline)
        except RayError as error:
            why = str(error).strip().rpartition("\n")[2]
            self._turn(Event("error", DESK, of=of, who=pipeline, replica=replica, why=why))
        else:
            self._turn(Event(done, DESK, who=pipeline, replica=replica))

    async def _watch(self, pipeline: str) -> None:
        from ray.exceptions import RayActorError

        while pipeline in self.coordinators:
            try:
                await self.coordinators[pipeline].ping.remote()
            except RayActorError:
                self._lose(pipeline)
                return
            await asyncio.sleep(PING_S)

    def _lose(self, pipeline: str) -> None:
        """The coordinator is dead. Complete a planned release that waits, then unregister the pipeline."""
        known = self.state.pipelines.get(pipeline)
        self.coordinators.pop(pipeline, None)
        if known is not None and known.waiters:
            for name, replica in sorted(self.state.sleeping):
                if name == pipeline:
                    self._turn(Event("shrunk", DESK, who=pipeline, replica=replica))
        if known is not None:
            self._turn(Event("died", DESK, who=pipeline))


class Coordinator:
    """A pipeline's coordinator, as small as one can be: it only counts what its replicas do."""

    def __init__(self) -> None:
        self.awake: set[int] = set()

    def ping(self) -> None: ...

    def sleep(self, replica: int) -> None:
        self.awake.discard(replica)

    def wake(self, replica: int) -> None:
        self.awake.add(replica)

    def replicas_awake(self) -> list[int]:
        return sorted(self.awake)


def start_desk(devices: int, pipelines: Sequence[str], *, gpus: bool = False, wait_s: float = 60.0) -> Any:
    import ray

    how: dict[str, Any] = {"name": DESK, "namespace": DESK_NAMESPACE, "num_cpus": 0}
    return ray.remote(Desk).options(**how).remote(devices, pipelines, gpus=gpus, wait_s=wait_s)


def start_pipeline(pipeline: str) -> Any:
    import ray

    how: dict[str, Any] = {"name": COORDINATOR, "namespace": namespace_of(pipeline), "num_cpus": 0}
    return ray.remote(Coordinator).options(**how).remote()


def main() -> None:
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    try:
        desk = start_desk(2, ["a", "b"])
        coordinators = {name: start_pipeline(name) for name in ("a", "b")}
        for name in coordinators:
            group = ray.get(desk.register.remote(name, {"trainer": [0], GENERATION: [0, 1]}))
            cluster = VirtualCluster(group, [0, 1], colocated=2)
            print(f"{name}: world size {cluster.world_size()}, bundles {cluster.bundle_indices}")
        for name, coordinator in coordinators.items():
            print(f"{name} trains on devices", ray.get(desk.acquire.remote(name, "training")))
            ray.get(desk.release.remote(name, "training"))
            ray.get(desk.acquire.remote(name, GENERATION, 8))
            print(f"{name} generates with replicas", ray.get(coordinator.replicas_awake.remote()))
            ray.get(desk.planned_release.remote(name))
            ray.get(desk.unregister.remote(name))
    finally:
        if started:
            ray.shutdown()


if __name__ == "__main__":
    main()
