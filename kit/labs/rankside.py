"""A lab on a rank: its phases object persists between calls; every phase is measured, including one that raises.

The notebook calls `begin` once, `step` for each phase (for a driven step `open_step`, `act` repeatedly, `close_step`), and `end`.
Measurements are published (`kit.world.channel.publish`) and reach the run's folder during the phase.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kit import routing
from kit.errors import BadInput
from kit.labs.definition import Fault, made
from kit.measure import Metric, PhaseMeter, provenance, pss
from kit.measure.host import trim
from kit.measure.phase import History, between_phases, watch_files
from kit.megatron.config import forced_tf32
from kit.results.records import Recording, Row
from kit.target import from_outside, load, replaced
from kit.tls import Certificate
from kit.train.plain import Numerics, full_float32
from kit.world import channel


@dataclass(kw_only=True, slots=True)
class Context(Recording):
    """The interface for a lab's phases. `record` adds the lab's own number to the current phase. `rank` and `world_size` count
    over all Worlds of the run; this rank is in World number `world`. `role` is this rank's role, `roles` has the ranks of each.
    `meeting` is a fresh name, the same on all ranks, by which ranks of several Worlds find each other."""

    rank: int
    world_size: int
    world_sizes: tuple[int, ...]
    world: int
    role: str
    roles: dict[str, tuple[int, ...]]
    meeting: str
    device: torch.device
    config: Any
    devices: tuple[str, ...] = ()  # of all ranks
    nodes: tuple[int, ...] = ()  # the machine of each rank; none where all are on one
    # The address of each rank's machine that other machines reach; none where all are on one.
    hosts: tuple[str, ...] = ()
    # For links between machines; only ranks that are called, such as rank 0, have its private key.
    certificate: Certificate | None = None
    # Where ranks are called by other machines, by the name of the meeting.
    ports: dict[str, int] = field(default_factory=dict)

    def _send(self, row: Row) -> None:
        channel.publish(row.facts())

    @property
    def host(self) -> str:
        """The address of rank 0's machine that other machines reach; empty on one machine."""
        return self.hosts[0] if self.hosts else ""

    def world_of(self, rank: int) -> str:
        worlds = [world for world, size in enumerate(self.world_sizes) for _ in range(size)]
        return f"{self.meeting} {worlds[rank]}"

    def machine_of(self, rank: int) -> str:
        return f"{self.meeting} machine {self.nodes[rank] if self.nodes else 0}"

    def implementation(self, target: str) -> Any:
        return load(target)(self)


def publish_row(row: Row) -> None:
    channel.publish(row.facts())


@dataclass(kw_only=True, slots=True)
class Session:
    """One lab on this rank. `meter` measures the current driven step."""

    context: Context
    phases: Any
    history: History | None
    numerics: Numerics  # as this rank had them before
    fault: Fault | None
    whole: contextlib.ExitStack  # undone when the lab ends
    phase: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # undone when a driven step ends
    meter: PhaseMeter | None = None

    def restore(self) -> None:
        """This rank as it was before the lab: the next one on it gets the right code and its own numerics."""
        self.phase.close()
        self.whole.close()
        self.numerics.restore()


_session: Session | None = None


def broken(fault: Fault | None, phase: str = "") -> contextlib.AbstractContextManager[None]:
    """The bug that is switched on, in its place for a phase, or with "" for the whole lab."""
    return replaced(fault.patch_in(phase, "ranks") if fault else {})


@contextlib.contextmanager
def old_objects_passed_over() -> Iterator[None]:
    """Collections and walks over all objects do not look at what was imported before, which halves the time of a run. Own code may look for
    its groups or tensors there, so it runs without this."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def begin(
    *,
    roles: list[dict[str, Any]],
    config_type: str,
    config: dict[str, Any],
    fault: dict[str, Any] | None,
    devices: list[str],
    nodes: list[int],
    world_sizes: list[int],
    meeting: str,
    hosts: list[str] | None = None,
    fingerprint: str = "",
    snapshots: str | None = None,
) -> dict[str, Any]:
    """Make the phases object of this rank's role. Returns this rank's proportional memory, and on rank 0 its provenance. With a folder
    for `snapshots` it keeps a history of its CUDA memory."""
    global _session, _pem  # noqa: PLW0603 - one rank is one process and serves one lab
    pem, _pem = _pem, ""
    if _session is not None:  # of a lab that broke off, and was never ended here
        _session.restore()
        _session = None
    rank = int(os.environ["KIT_RANK"])
    bug = None if fault is None else Fault(**fault)
    mine = next(role for role in roles if rank in role["ranks"])
    context = Context(
        rank=rank,
        role=mine["name"],
        roles={role["name"]: tuple(role["ranks"]) for role in roles},
        world_size=sum(world_sizes),
        world_sizes=tuple(world_sizes),
        world=sum(rank >= end for end in itertools.accumulate(world_sizes)),
        meeting=meeting,
        device=torch.device(devices[rank]),
        devices=tuple(devices),
        nodes=tuple(nodes) if len({*nodes}) > 1 else (),
        hosts=tuple(hosts or ()),
        certificate=Certificate(pem, fingerprint) if fingerprint else None,
        config=made(load(config_type), config),
    )
    for name, flag in routing.FLAGS.items():
        if context.config.routing == "torch" and routing.is_routing(name):
            raise BadInput(
                f"routing=torch, but these ranks go through {name}; make the World without {flag}, or use routing={name}"
            )
    watch_files()
    about = provenance() if rank == 0 else None
    history = History(Path(snapshots) / f"rank{rank}.pickle") if snapshots else None
    numerics = Numerics.now()
    if context.device.type == "cuda" and getattr(context.config, "dtype", "") == "float32":
        if why := forced_tf32():
            raise BadInput(why)
        full_float32()
    # Loaded while all code is right: a module that is first imported with a bug in place would keep what it took from there.
    phases = load(mine["phases"])
    with contextlib.ExitStack() as whole:
        if not any(map(from_outside, (mine["phases"], *config.values()))):
            whole.enter_context(old_objects_passed_over())
        whole.enter_context(broken(bug))
        _session = Session(
            context=context,
            phases=phases(context),
            history=history,
            numerics=numerics,
            fault=bug,
            whole=whole.pop_all(),
        )
    if history is not None:
        history.start()
    return {"provenance": about, "pss": pss(), "ports": context.ports, **routing_record(context.config)}


_pem = ""


def hold_key(*, pem: str) -> None:
    """Before the lab begins, on a rank that other machines call: the certificate of the lab's links with its private key."""
    global _pem  # noqa: PLW0603 - as above
    _pem = pem


def learn_ports(*, ports: dict[str, int]) -> None:
    """Where ranks are called, once the lab has begun there."""
    _running().context.ports.update(ports)


def run_phase(*, cycle: int, name: str) -> None:
    """Run one phase, measure it, and publish the measurements, even if it raises."""
    session = _running()
    meter = PhaseMeter(str(session.context.device))
    failed = [Metric("failed", 1, "1")]
    try:
        with broken(session.fault, name), meter:
            getattr(session.phases, name)(cycle)
        failed = []
    except BaseException:
        memory_history()  # now, because answering the error frees the memory of the exception
        raise
    finally:
        publish_all(meter, *failed)


def open_step(*, name: str) -> None:
    """Begin a driven step, which is measured on this rank until `close_step`."""
    session = _running()
    session.phase.enter_context(broken(session.fault, name))
    session.meter = PhaseMeter(str(session.context.device))
    session.meter.__enter__()


def act(*, method: str, args: dict[str, Any]) -> Any:
    """One call of a driven step. Its time is recorded as a span."""
    began = time.time()
    try:
        return getattr(_running().phases, method)(**args)
    except Exception:  # not an interrupt, which is unrelated to this call
        publish_row(Row(metric="failed", value=1.0, unit="1", time=time.time(), ids={"call": method}))
        raise
    finally:
        ended = time.time()
        publish_row(Row(metric="call", value=ended - began, unit="s", time=ended, start=began, ids={"call": method}))


def when_step_ends(do: Callable[[], object]) -> None:
    """Have this done at the end of the driven step, also of one that fails."""
    _running().phase.callback(do)


def close_step() -> None:
    session = _running()
    meter, session.meter = session.meter, None
    session.phase.close()
    if meter is not None:
        meter.__exit__(None, None, None)
        publish_all(meter)


def publish_all(meter: PhaseMeter, *more: Metric) -> None:
    """The measurements of a phase, then those after it, which may fail."""
    for metric in (*meter.metrics, *more):
        publish_row(Row(**metric._asdict(), time=meter.ended))
    for metric in between_phases(str(_running().context.device)):
        publish_row(Row(**metric._asdict(), time=time.time()))


def memory_history() -> None:
    """Write this rank's history of CUDA memory, if it keeps one, and stop recording it."""
    session = _running()
    if session.history is not None:
        session.history.write()
        session.history.stop()
        session.history = None


def end() -> dict[str, Any]:
    global _session  # noqa: PLW0603 - as above
    memory_history()
    _running().restore()
    answer = {"pss": pss(), **routing_record(_running().context.config)}
    _session = None
    gc.collect()  # ranks may continue with another lab, which must fit next to what this one leaves
    trim()
    return answer


def routing_record(config: Any) -> dict[str, Any]:
    if config.routing == "torch":
        return {}
    return {"routing": routing.routing_status(config.routing)}


def _running() -> Session:
    if _session is None:
        raise RuntimeError("no lab was begun on this rank")
    return _session


def digest_of_hashes(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{name} {value}" for name, value in sorted(hashes.items())).encode()).hexdigest()
