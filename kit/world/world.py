"""World: live torchrun ranks that stay between cells. See the package's docstring for the life of one."""

from __future__ import annotations

import atexit
import html
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.errors import BadInput, KitError
from kit.world import interpreter, leftovers
from kit.world.asked import (
    check_call,
    check_chosen,
    check_code,
    check_env,
    check_layout,
    check_preload,
    check_seconds,
    writable_folder,
)
from kit.world.calls import Call, Interrupted, Observer
from kit.world.capacity import GPU_DRIVERS
from kit.world.channel import ChannelClosed
from kit.world.crew import Crew
from kit.world.members import Member, Part, Plan
from kit.world.silence import looks, ranks_word

DEVICES = ("auto", "cpu", "cuda")
TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0


class Printer:
    """The default observer: whole lines, marked by rank, to where the notebook prints."""

    def started(self, phase: str, ranks: Sequence[int]) -> None: ...

    def output(self, rank: int, text: str) -> None:
        sys.stdout.write("".join(f"[{rank}] {line}\n" for line in text.split("\n")))

    def tick(self, answered: Sequence[int]) -> None: ...

    def ended(self) -> None: ...


class World:
    """`ranks` processes under torchrun, joined in one process group, doing what they are told until closed."""

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
        logs: str | os.PathLike[str] | None = None,
        start_timeout_s: float | None = None,
        observer: Observer | None = None,
        part: Part | None = None,
    ) -> None:
        """`part` is for Worlds: this one is one of several, and its ranks wait for `launch`."""
        check_layout(ranks, nodes, endpoint)
        check_seconds("timeout_s", timeout_s)
        if device not in DEVICES:
            raise BadInput(f"device must be one of {', '.join(DEVICES)}, not {device!r}")
        if device == "cuda" and not any(path.exists() for path in GPU_DRIVERS):
            raise BadInput("device='cuda' needs a GPU driver, and this machine has none; use device='cpu' or 'auto'")
        self.timeout_s = timeout_s
        self.observer: Observer = observer or Printer()
        self._lock = threading.RLock()
        self.dead = ""  # why, once it is
        self._closed = False
        self._next = 0
        self._own_logs = logs is None
        if start_timeout_s is None:
            start_timeout_s = START_TIMEOUT_S if nodes == 1 else 3600.0
        self._crew = Crew(
            Plan(
                ranks=ranks,
                nodes=nodes,
                endpoint=endpoint,
                device=device,
                python=interpreter.find(python),
                env=check_env(env or {}),
                preload=check_preload(preload),
                logs=writable_folder(logs),
                start_timeout_s=start_timeout_s,
                # Ranks give up on a collective after the notebook did, so that the notebook's diagnosis comes first.
                group_timeout_s=max(1800.0, 2 * timeout_s),
                part=part or Part(0, ranks),
            ),
            say=print,
            tick=self._tick,
        )
        atexit.register(self.close)
        try:
            self._crew.start(launch=part is None)
        except BaseException:
            atexit.unregister(self.close)
            self._closed = True
            raise

    def launch(self) -> None:
        """Start the ranks of a World that is one of several."""
        self._crew.launch()

    # -- what a person does with it ---------------------------------------------------------------------------------

    def run(self, code: str, *, ranks: Sequence[int] | None = None, timeout_s: float | None = None) -> None:
        """Run code on every rank (or some). Names persist there; what it prints is shown, marked by rank."""
        self.cell(code, ranks=ranks, timeout_s=timeout_s)

    def cell(
        self, code: str, *, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[str | None]:
        """Like `run`, and the repr of the last line's value per rank, as a notebook's cell shows it."""
        check_code(code, "exec")
        return self._request({"do": "run", "code": code}, "run", ranks, timeout_s)

    def eval(self, code: str, *, ranks: Sequence[int] | None = None, timeout_s: float | None = None) -> list[Any]:
        """The value of an expression on every rank; it must be JSON."""
        check_code(code, "eval")
        return self._request({"do": "eval", "code": code}, "eval", ranks, timeout_s)

    def call(
        self,
        target: str,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        phase: str | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Call `package.module:function` on every rank with JSON keyword arguments; its JSON result per rank."""
        function = check_call(target, arguments)
        return self._request({"do": "call", "target": target, "with": arguments}, phase or function, ranks, timeout_s)

    def restart(self) -> None:
        """End all ranks, whatever they do, and start fresh ones: new processes, empty names. torchrun's process stays warm."""
        with self._lock:
            self._check_open()
            self._crew.kill()
            leftovers.end_marked(leftovers.mark(self._crew.id), spare=self._crew.torchrun_pid)
            if self._crew.ready_to_launch():
                self._crew.launch()
            else:
                self._crew.close()
                self._crew = Crew(self._crew.plan, say=print, tick=self._tick)
                self._crew.start()
            self.dead = ""

    def close(self) -> None:
        """End all ranks and torchrun and wait until they are gone. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._crew.close()
        if self._own_logs:
            shutil.rmtree(self.logs, ignore_errors=True)

    def stacks(self) -> dict[int, str]:
        """What each rank is doing right now: its Python stack, or its state and why there is none."""
        seen = looks(self._crew.members)
        return {
            m.rank: (seen[m.rank].stack or "idle") if m.rank in seen else self._crew.describe(m)
            for m in self._crew.members
        }

    def status(self) -> list[dict[str, Any]]:
        """A row per rank: rank, pid, node, host, device, why this device, phase, state."""
        return [
            {
                "rank": m.rank,
                "pid": m.pid,
                "node": m.node,
                "host": m.host,
                "device": m.device,
                "why": m.why,
                "phase": m.phase,
                "state": self.state if self.state in {"closed", "dead"} else "busy" if m.busy is not None else "idle",
            }
            for m in self._crew.members
        ]

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
        """The ranks' numbers: from 0 on, or where those of the Worlds before it end."""
        return self._crew.plan.numbers

    @property
    def device(self) -> str:
        return self._crew.members[0].device.partition(":")[0] if self._crew.members else self._crew.plan.device

    @property
    def logs(self) -> Path:
        return self._crew.plan.logs

    @property
    def python(self) -> str:
        return self._crew.plan.python.path

    @property
    def state(self) -> str:
        """idle, busy (a rank has not answered an earlier call), dead or closed."""
        if self._closed:
            return "closed"
        if self.dead:
            return "dead"
        return "busy" if any(m.busy is not None for m in self._crew.members) else "idle"

    # -- how -------------------------------------------------------------------------------------------------------

    def _request(
        self, what: dict[str, Any], phase: str, ranks: Sequence[int] | None, timeout_s: float | None
    ) -> list[Any]:
        seconds = self.timeout_s if timeout_s is None else timeout_s
        check_seconds("timeout_s", seconds)
        with self._lock:
            members = self.ready(ranks)
            self._next += 1
            request = {**what, "id": self._next, "phase": phase}
            call = Call(self._crew, members, request, self.observer, seconds)
            try:
                return [answer["value"] for answer in call.run()]
            except Interrupted as stop:
                self.die(f"it was interrupted and {stop}")
                tell_the_prompt(f"World ended: {self.dead}")
                raise
            except KitError as error:
                if call.gone:
                    self.die(str(error).partition("\n")[0])
                raise

    def _tick(self) -> None:
        """While ranks start nobody has answered; who looks on may end the start, as it may a call."""
        self.observer.tick(())

    def ready(self, ranks: Sequence[int] | None) -> list[Member]:
        """The ranks, if they can take a call now; an error that says why not."""
        self._check_open()
        chosen = check_chosen(ranks, self.numbers)
        members = [member for member in self._crew.members if member.rank in chosen]
        self._check_usable(members)
        return members

    def _check_open(self) -> None:
        if self._closed:
            raise KitError("this World is closed; make a new one")

    def _check_usable(self, members: list[Member]) -> None:
        """Refuse while dead or while a rank that is asked is still in an earlier call; take in answers that came late."""
        if self.dead:
            raise KitError(
                f"this World is dead: {self.dead.removesuffix('; restart() starts fresh ranks')}; restart() starts fresh ranks"
            )
        for member in self._crew.members:
            if member.busy is None:
                continue
            try:
                late = member.work.arrived() if select.select([member.work], [], [], 0)[0] else []
            except ChannelClosed:
                self.die(f"rank {member.rank} ended in phase {member.phase!r}")
                raise KitError(f"this World is dead: {self.dead}; restart() starts fresh ranks") from None
            if any(message["id"] == member.busy for message in late):
                member.busy, member.phase = None, "idle"
        if busy := [m for m in members if m.busy is not None]:
            seconds = time.monotonic() - min(m.since for m in busy)
            raise KitError(
                f"{ranks_word([m.rank for m in busy])} still in phase {busy[0].phase!r}, sent {seconds:.0f} s ago; "
                "wait, look at stacks(), or restart() for fresh ranks"
            )

    def die(self, why: str) -> None:
        """End the ranks and say why; restart() brings fresh ones."""
        self.dead = why
        self._crew.kill()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rows = "; ".join(
            f"rank {r['rank']}: pid {r['pid']}, {r['device']}, {r['phase']}, {r['state']}" for r in self.status()
        )
        return f"<World of {count(self.ranks)}, {self.state}: {rows}>"

    def _repr_html_(self) -> str:
        columns = ("rank", "pid", "host", "device", "phase", "state")
        head = "".join(f"<th>{name}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(row[name]))}</td>" for name in columns) + "</tr>"
            for row in self.status()
        )
        why = f"<p>{html.escape(self.dead)}</p>" if self.dead else ""
        return f"<b>World of {count(self.ranks)}, {self.state}</b>{why}<table><tr>{head}</tr>{body}</table>"


def tell_the_prompt(what: str) -> None:
    """The prompt is back; say why the ranks are not. A thread has no prompt: who started it tells people in its own way."""
    if threading.current_thread() is threading.main_thread():
        print(f"{what}; restart() starts fresh ranks")


def count(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"
