"""World: live torchrun ranks that stay between cells; the package's docstring has the life of one. Worlds: several, driven as one.

Each of several Worlds is a separate torchrun job and process group, as a trainer and its inference replicas are. A rank's number
counts through all of them, in calls, answers, errors and logs. When a rank dies, all Worlds end, as one World does; with `isolate=True`
only its own World ends, and the others go on.
"""

from __future__ import annotations

import abc
import atexit
import html
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kit.errors import BadInput, KitError
from kit.machine import has_gpu_driver
from kit.world import asked
from kit.world.asked import NodePart, WorldPlan
from kit.world.calls import Pending, WorldCall, WorldObserver, look_at_members, ranks_word
from kit.world.channel import WorldMember
from kit.world.crew import Crew
from kit.world.launch import PRINT, RAY, RAY_START_S, TORCHRUN, launch_commands

DEVICES = ("auto", "cpu", "cuda")
TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
BY_HAND_S = 3600.0  # until a person has started the agents of other machines


class Printer:
    """The default observer: whole lines, marked by rank, to where the notebook prints."""

    def started(self, phase: str, ranks: Sequence[int]) -> None: ...

    def tick(self, answered: Sequence[int]) -> None: ...

    def ended(self) -> None: ...

    def output(self, rank: int, text: str) -> None:
        sys.stdout.write("".join(f"[{rank}] {line}\n" for line in text.split("\n")))


class RankCalls(abc.ABC):
    """Live ranks that can be called: those of one World, or of several."""

    observer: WorldObserver
    timeout_s: float
    _lock: threading.RLock  # held while what arrived is taken in, never while waiting for it
    _turn: threading.RLock

    def call(
        self,
        target: str,
        *,
        args: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        phase: str | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """Call `package.module:function` on every rank with JSON arguments and return its JSON result for each rank.

        Pass arguments as keywords or as the mapping `args`, which allows parameters named `ranks` or `phase`.
        """
        function, request = asked.check_call(target, args, keywords)
        return self._request(request, phase or function, ranks, timeout_s)

    def submit(
        self,
        target: str,
        *,
        args: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        phase: str | None = None,
        observer: WorldObserver | None = None,
        on_news: Callable[[int, list[Any]], None] | None = None,
    ) -> Pending:
        """Like `call`, but return a Pending at once, which has the result later. A rank runs one call at a time.

        `timeout_s` counts from now. `on_news(rank, values)` receives what the function reports (`kit.world.channel.publish`) while it runs.
        """
        function, request = asked.check_call(target, args, {})
        return self._submit(request, phase or function, ranks, timeout_s, observer=observer, on_news=on_news)

    def lend(
        self,
        ranks: Sequence[int],
        *,
        phase: str,
        observer: WorldObserver | None = None,
        on_news: Callable[[int, list[Any]], None] | None = None,
    ) -> Pending:
        """Lend ranks, which are actors of Ray, to callers by Ray. The call is in flight until Ray gives them back."""
        seconds = asked.MOST_SECONDS
        return self._submit({"do": "lend"}, phase, ranks, seconds, observer=observer, on_news=on_news)

    def _request(
        self, what: dict[str, Any], phase: str, ranks: Sequence[int] | None, timeout_s: float | None
    ) -> list[Any]:
        with self._turn:  # threads that call take turns
            return self._submit(what, phase, ranks, timeout_s).result()

    def _submit(
        self,
        what: dict[str, Any],
        phase: str,
        ranks: Sequence[int] | None,
        timeout_s: float | None,
        *,
        observer: WorldObserver | None = None,
        on_news: Callable[[int, list[Any]], None] | None = None,
    ) -> Pending:
        seconds = self.timeout_s if timeout_s is None else timeout_s
        asked.check_seconds("timeout_s", seconds)
        with self._lock:
            calls = self._calls(what, phase, ranks)
            return Pending(calls, self._lock, observer or self.observer, seconds, on_news)

    @abc.abstractmethod
    def _calls(self, what: dict[str, Any], phase: str, ranks: Sequence[int] | None) -> list[WorldCall]:
        """A call for each World concerned, none of them sent; an error where a rank cannot take one now."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class World(RankCalls):
    """`ranks` processes under torchrun, joined in one process group. They run what they are asked until the World is closed."""

    def __init__(
        self,
        ranks: int = 2,
        *,
        device: str = "auto",
        timeout_s: float = TIMEOUT_S,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        nodes: int = 1,
        endpoint: str = "",
        launch: str = PRINT,
        engine: str = TORCHRUN,
        logs: str | os.PathLike[str] | None = None,
        start_timeout_s: float | None = None,
        observer: WorldObserver | None = None,
        devices: Sequence[int] = (),
        part: NodePart | None = None,
        asynchronous: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`devices` places each rank on a GPU by its number; several ranks, and several Worlds, may share one. `launch`: how the agents
        of other machines are started, see `launch.py`. `engine`: torchrun, or ray, whose actors the ranks then are.

        `part` and `look` are for Worlds: this one is one of several, its ranks wait for `launch`, and `look` is called while they start.
        `asynchronous`: the actors are, and it starts them itself; a call on them is not interrupted, but finds `rayside.is_interrupted`.
        """
        several = part is not None and not asynchronous
        if part is None:
            asked.check_layout(ranks, nodes, endpoint)
            part = NodePart(first=0, before=0, neighbours=ranks // nodes)
        share = 0.0 if device == "cpu" else ranks / nodes / part.neighbours
        commands = launch_commands(launch, max(nodes, part.machines), share)
        if part.machines > 1 and commands:  # each of several Worlds is on one machine
            commands = (commands[part.machine - 1],) if part.machine else ()
        elif launch == RAY:
            commands = commands[:1]  # in one placement group
        by_hand = (nodes > 1 or part.machine > 0) and not commands
        default_s = BY_HAND_S if by_hand else RAY_START_S if engine == RAY else START_TIMEOUT_S
        asked.check_seconds("timeout_s", timeout_s)
        if start_timeout_s is not None:
            asked.check_seconds("start_timeout_s", start_timeout_s)
        if device not in DEVICES:
            raise BadInput(f"device must be one of {', '.join(DEVICES)}, not {device!r}")
        if device == "cuda" and not has_gpu_driver():
            raise BadInput("device='cuda' needs a GPU driver, and this machine has none; use device='cpu' or 'auto'")
        asked.check_engine(engine, max(nodes, part.machines), python)
        self.timeout_s = timeout_s
        self._count = f"{ranks} rank{'s' if ranks > 1 else ''}"
        self.observer: WorldObserver = observer or Printer()
        self._lock = threading.RLock()
        self._turn = threading.RLock()
        self._look = look
        self.on_death: Callable[[str, KitError | None], None] = lambda *_: None
        self.dead = ""  # why, once it is
        self._closed = False
        self._next = 0
        self._crew = Crew(
            WorldPlan(
                ranks=ranks,
                nodes=nodes,
                endpoint=endpoint,
                launch=commands,
                device=device,
                engine=engine,
                asynchronous=asynchronous,
                python=asked.find_python(python),
                env=asked.check_env(env or {}),
                preload=asked.check_preload(preload),
                logs=None if logs is None else asked.writable_folder(logs),
                start_timeout_s=start_timeout_s or default_s,
                # Ranks give up on a collective after the notebook did, so that the notebook's diagnosis comes first.
                group_timeout_s=max(1800.0, 2 * timeout_s),
                part=part,
                devices=asked.check_gpu_numbers(devices, ranks),
            ),
            tick=self._tick,
        )
        atexit.register(self.close)
        try:
            self._crew.start(launch=not several)
        except BaseException:
            atexit.unregister(self.close)
            self._closed = True
            raise

    # -- what a person does with it ---------------------------------------------------------------------------------

    def run(self, code: str, *, ranks: Sequence[int] | None = None, timeout_s: float | None = None) -> None:
        """Run code on every rank, or on `ranks`. Names persist there. Printed lines are shown with the rank."""
        self.cell(code, ranks=ranks, timeout_s=timeout_s)

    def cell(
        self, code: str, *, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[str | None]:
        """Like `run`, and return the repr of the last line's value for each rank, as a notebook cell shows it."""
        return self._request(asked.check_code("run", code), "run", ranks, timeout_s)

    def eval(self, code: str, *, ranks: Sequence[int] | None = None, timeout_s: float | None = None) -> list[Any]:
        """The value of an expression on every rank, which must be JSON."""
        return self._request(asked.check_code("eval", code), "eval", ranks, timeout_s)

    def submit_code(self, code: str, *, ranks: Sequence[int] | None = None, timeout_s: float | None = None) -> Pending:
        """Like `cell`, but return a Pending at once."""
        return self._submit(asked.check_code("run", code), "run", ranks, timeout_s)

    def restart(self) -> None:
        """End all ranks, even if they hang, and start fresh ones: new processes without names. The torchrun process is reused."""
        with self._turn, self._lock:
            self._check_open()
            self._give_up(KitError("this World was restarted while the call was in flight"))
            self.dead = "restart() was interrupted"
            try:
                self._crew.kill()
                if self._crew.ready_to_launch():
                    self._crew.launch()
                else:
                    replaced, self._crew = self._crew, Crew(self._crew.plan, self._crew.tick)
                    self._crew.silent = replaced.silent
                    replaced.close()  # a Ray cluster stays for the new one
                    self._crew.start()
            except BaseException as error:
                if isinstance(error, Exception):
                    self.dead = f"restart() failed: {str(error).partition(chr(10))[0]}"
                self._crew.kill()
                raise
            self.dead = ""

    def close(self) -> None:
        """End all ranks and torchrun and wait until they have ended. Can be called again."""
        if self._crew.inherited or (self._closed and not self._crew.folder.exists()):
            return
        self._closed = True
        self._give_up(KitError("this World was closed while the call was in flight"))
        self._crew.close()
        atexit.unregister(self.close)

    def stacks(self) -> dict[int, str]:
        """The Python stack of each rank, or its state and the reason why there is no stack."""
        crew, seen = self._crew, look_at_members(self._crew.members)
        described = crew.describe([m for m in crew.members if m.rank not in seen])
        return {m.rank: described.get(m.rank) or seen[m.rank].stack or "idle" for m in crew.members}

    def status(self) -> list[dict[str, Any]]:
        """One row per rank: rank, pid, node, host, device, seat (the number of its device), reason for this device, phase, and state: idle,
        busy, lost (its machine is silent), dead or closed."""
        names = ("rank", "pid", "node", "host", "device", "seat", "why", "phase")
        ended = self.state if self.state in {"closed", "dead"} else ""
        return [
            {name: getattr(m, name) for name in names}
            | {"state": ended or ("lost" if self._crew.is_lost(m) else "busy" if m.busy else "idle")}
            for m in self._crew.members
        ]

    @property
    def addresses(self) -> list[str]:
        """Where other machines reach each rank's; empty where all are here."""
        return [self._crew.address_of(member.node) for member in self._crew.members]

    def kill_rank(self, rank: int) -> None:
        """SIGKILL a rank, on whatever machine it is, to rehearse its death."""
        self._check_open()
        (number,) = asked.check_chosen([rank], self.numbers)
        with self._lock:
            self._crew.kill_rank(next(member for member in self._crew.members if member.rank == number))

    @property
    def pids(self) -> list[int]:
        return [m.pid for m in self._crew.members]

    @property
    def torchrun_pid(self) -> int | None:
        return self._crew.torchrun_pid

    @property
    def ranks(self) -> int:
        return self._crew.plan.ranks

    @property
    def numbers(self) -> range:
        """The numbers of its ranks; in one of several Worlds they continue those of the previous ones."""
        return self._crew.plan.numbers

    @property
    def device(self) -> str:
        return self._crew.members[0].device.partition(":")[0] if self._crew.members else self._crew.plan.device

    @property
    def engine(self) -> str:
        return self._crew.plan.engine

    @property
    def actors(self) -> dict[int, str]:
        """With engine=ray, the name of each rank's actor."""
        return {member.rank: f"{self._crew.actor_name}-{member.rank}" for member in self._crew.members}

    @property
    def logs(self) -> Path:
        return self._crew.logs

    @property
    def python(self) -> str:
        return self._crew.plan.python.path

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables that were passed as `env`."""
        return self._crew.plan.env

    @property
    def state(self) -> str:
        """idle, busy (a rank has not answered an earlier call), dead or closed."""
        if self._closed or self._crew.inherited:
            return "closed"
        if self.dead:
            return "dead"
        return "busy" if any(m.busy for m in self._crew.members) else "idle"

    # -- how -------------------------------------------------------------------------------------------------------

    def _calls(self, what: dict[str, Any], phase: str, ranks: Sequence[int] | None) -> list[WorldCall]:
        return [self.prepare(what, phase, self.ready(ranks))]

    def prepare(self, what: dict[str, Any], phase: str, members: list[WorldMember]) -> WorldCall:
        self._next += 1
        return WorldCall(self._crew, members, {**what, "id": self._next, "phase": phase}, self.die)

    def ready(self, ranks: Sequence[int] | None) -> list[WorldMember]:
        """The ranks, if they can take a call now; an error that says why not."""
        self._check_open()
        chosen = asked.check_chosen(ranks, self.numbers)
        members = [member for member in self._crew.members if member.rank in chosen]
        if not self.dead and any(member.busy for member in self._crew.members):
            self._crew.take()  # answers that came late
            for call in self._crew.calls():
                if call.gone:
                    call.advance()
        if self.dead:
            raise KitError(
                f"this World is dead: {self.dead.removesuffix('; restart() starts fresh ranks')}; restart() starts fresh ranks"
            )
        if busy := [m for m in members if m.busy]:
            seconds = time.monotonic() - min(m.since for m in busy)
            raise KitError(
                f"{ranks_word([m.rank for m in busy])} still in phase {busy[0].phase!r}, sent {seconds:.0f} s ago; "
                "wait, look at stacks(), or restart() for fresh ranks"
            )
        return members

    def _check_open(self) -> None:
        if self._crew.inherited:
            raise KitError(
                f"this World belongs to process {self._crew.owner}, which started it; a process forked from it cannot use it"
            )
        if self._closed:
            raise KitError("this World is closed; make a new one")

    def _tick(self) -> None:
        self.observer.tick(())  # nobody has answered while ranks start
        self._look()

    def die(self, why: str, error: KitError | None = None) -> None:
        """End the ranks for a reason; restart() brings fresh ones. Calls in flight end with the error."""
        if self.dead:
            return
        self.dead = why
        self._give_up(error or KitError(f"this World is dead: {why}"))
        self._crew.kill()
        self.on_death(why, error)

    def _give_up(self, error: KitError) -> None:
        for call in self._crew.calls():
            call.settle(error)

    def __repr__(self) -> str:
        rows = (f"rank {r['rank']}: pid {r['pid']}, {r['device']}, {r['phase']}, {r['state']}" for r in self.status())
        return f"<World of {self._count}, {self.state}: {'; '.join(rows)}>"

    def _repr_html_(self) -> str:
        columns = ("rank", "pid", "host", "device", "phase", "state")
        head = "".join(f"<th>{name}</th>" for name in columns)
        cells = ("".join(f"<td>{html.escape(str(row[name]))}</td>" for name in columns) for row in self.status())
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        why = f"<p>{html.escape(self.dead)}</p>" if self.dead else ""
        return f"<b>World of {self._count}, {self.state}</b>{why}<table><tr>{head}</tr>{body}</table>"


class Worlds(RankCalls):
    """Live ranks in as many Worlds as there are sizes; the part of World's interface that a lab needs."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        names: Sequence[str] = (),
        isolate: bool = False,
        devices: Sequence[Sequence[int] | None] = (),
        timeout_s: float = TIMEOUT_S,
        observer: WorldObserver | None = None,
        nodes: int = 1,
        endpoint: str = "",
        machines: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """`devices` has a list of GPU numbers for each World, None for one on the CPU; `options` are World's. With several nodes each World
        is on one of them: `machines` has its number, 0 for this one; without it they are on all in turn, the first one here."""
        if not sizes:
            raise BadInput("Worlds need at least one size, a number of ranks")
        asked.check_worlds(sizes, nodes, endpoint, machines)
        if devices and len(devices) != len(sizes):
            raise BadInput(f"devices has {len(devices)} lists for {len(sizes)} Worlds; give one list per World")
        for size, places in zip(sizes, devices, strict=False):
            asked.check_gpu_numbers(places or (), size)
        self.names = tuple(names) or tuple(f"World {n}" for n in range(len(sizes)))
        self.isolate = isolate
        self.timeout_s = timeout_s
        self.worlds: list[World] = []
        self._starting = True
        self._silent: set[int] = set()  # machines
        self._observer: WorldObserver = observer or Printer()
        self._lock = threading.RLock()
        self._turn = threading.RLock()
        try:
            for number, (size, part) in enumerate(zip(sizes, asked.spread(sizes, nodes, machines), strict=True)):
                places = devices[number] if devices else ()
                on_cpu = {"device": "cpu"} if places is None else {}
                made = World(
                    size,
                    timeout_s=timeout_s,
                    observer=self.observer,
                    devices=places or (),
                    part=part,
                    endpoint=endpoint,
                    look=self._look_at_start,
                    **{**options, **on_cpu},
                )
                made._lock = self._lock  # ranks of several Worlds are called together
                made._crew.silent = self._silent
                if not isolate:
                    made.on_death = self._end_all
                self.worlds.append(made)
            for world in self.worlds:  # while one launches, the agents of the others are on their way, or load torch
                world._crew.launch()
            self._starting = False
        except BaseException:
            self.close()
            raise

    def _calls(self, what: dict[str, Any], phase: str, ranks: Sequence[int] | None) -> list[WorldCall]:
        chosen = asked.check_chosen(ranks, range(self.ranks))
        parts = [
            (world, own_numbers) for world in self.worlds if (own_numbers := [n for n in chosen if n in world.numbers])
        ]
        ready = [(world, world.ready(own_numbers)) for world, own_numbers in parts]  # all of them, before one is asked
        return [world.prepare(what, phase, members) for world, members in ready]

    def restart(self) -> None:
        """End all ranks, whatever they do, and start fresh ones."""
        with self._turn:
            for world in self.worlds:
                world.restart()

    def close(self) -> None:
        for world in self.worlds:  # a lost machine is waited for once
            world._give_up(KitError("this World was closed while the call was in flight"))
            world._crew.let_go()
        for world in self.worlds:
            world.close()

    def stacks(self) -> dict[int, str]:
        return {rank: stack for world in self.worlds for rank, stack in world.stacks().items()}

    def status(self) -> list[dict[str, Any]]:
        return [row for world in self.worlds for row in world.status()]

    @property
    def observer(self) -> WorldObserver:
        return self._observer

    @observer.setter
    def observer(self, observer: WorldObserver) -> None:
        self._observer = observer
        for world in self.worlds:
            world.observer = observer

    @property
    def addresses(self) -> list[str]:
        return [address for world in self.worlds for address in world.addresses]

    def kill_rank(self, rank: int) -> None:
        asked.check_chosen([rank], range(self.ranks))
        next(world for world in self.worlds if rank in world.numbers).kill_rank(rank)

    @property
    def engine(self) -> str:
        return self.worlds[0].engine

    @property
    def python(self) -> str:
        return self.worlds[0].python

    @property
    def actors(self) -> dict[int, str]:
        return {rank: name for world in self.worlds for rank, name in world.actors.items()}

    @property
    def pids(self) -> list[int]:
        return [pid for world in self.worlds for pid in world.pids]

    @property
    def ranks(self) -> int:
        return sum(world.ranks for world in self.worlds)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(world.ranks for world in self.worlds)

    @property
    def device(self) -> str:
        return self.worlds[0].device

    @property
    def state(self) -> str:
        """idle, busy, dead or closed: of the Worlds' states the last in this order."""
        return max((world.state for world in self.worlds), key=("idle", "busy", "dead", "closed").index)

    def _look_at_start(self) -> None:
        """A World that dies while another one starts ends the start of all."""
        for world in self.worlds if self._starting else ():
            world._crew.look_beside_others()

    def _end_all(self, why: str, error: KitError | None) -> None:
        for world in self.worlds:
            world.die(why, error)

    def __repr__(self) -> str:
        rows = "; ".join(f"{name}: {world!r}" for name, world in zip(self.names, self.worlds, strict=True))
        return f"<Worlds of {' and '.join(map(str, self.sizes))} ranks, {self.state}: {rows}>"
