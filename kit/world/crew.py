"""The live processes behind a World: the agents, their ranks, and the links to them. Starts, assembles and ends them; runs no calls."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kit import machine
from kit.errors import KitError, RankDied, RankError, ending, how_ended
from kit.tls import make_certificate
from kit.world import asked, leftovers, raycluster, warm
from kit.world.agentside import AGENT, read_log
from kit.world.asked import CREWS, WorldPlan
from kit.world.channel import (
    HELLO,
    MALFORMED,
    AgentEnd,
    ChannelClosed,
    Exit,
    Malformed,
    Message,
    TamperedChannel,
    WorldLink,
    WorldListener,
    WorldMember,
    malformed,
    readable_message,
)
from kit.world.launch import RAY, Launched, agent_command

SENDING_S = 10
LAUNCHES_END_S = 10.0  # a command that is ended earlier may take its agent along, before that has cleaned up
DESCRIBED_S = 1.0  # machines that do not answer delay the report about the others by this, whatever their number
ACCOUNT_S = 15.0  # a busy machine takes seconds until torchrun has noticed and reported how a rank ended


class Question(NamedTuple):
    """For the agent of a node."""

    node: int
    do: str
    arguments: dict[str, Any]


def is_valid_hello(hello: Message, **wanted: range | None) -> bool:
    return all(type(hello[name]) is int and (among is None or hello[name] in among) for name, among in wanted.items())


class Crew:
    """Agents and ranks of one World, through however many generations of ranks."""

    def __init__(self, plan: WorldPlan, tick: Callable[[], None] = lambda: None) -> None:
        """`tick` is called often while they start; what it raises ends the start."""
        self.plan = plan
        self.tick = tick
        self.id = secrets.token_hex(3)
        self.members: list[WorldMember] = []
        self.agents: dict[int, AgentEnd] = {}
        # Machines whose agent left a question without an answer, and has sent nothing since. Several Worlds share what they know.
        self.silent: set[int] = set()
        self.exits: list[Exit] = []
        self.generation = -1
        self._oom_kills: int | None = None  # before these ranks started
        self._key = secrets.token_bytes(32)
        self._certificate = make_certificate() if plan.is_remote else None
        self._broken_links: dict[tuple[str, int], str] = {}  # of this generation's ranks and agents, and why
        self.folder = leftovers.base() / leftovers.mark(self.id)
        self.folder.mkdir(mode=0o700)
        self.logs = plan.logs or self.folder / "logs"  # by default they end with the World
        self.logs.mkdir(exist_ok=True)
        self._agent_log = self.logs / f"torchrun{plan.part.first or ''}.log"  # several Worlds share a folder
        self._process: subprocess.Popen[bytes] | warm.ForkedAgent | None = None
        self._listener: WorldListener | None = None
        self._launched: list[Launched] = []
        self._unnamed: list[WorldLink] = []  # proved the key, but have not sent their names
        self._let_go_at = 0.0  # when it was first let go
        self._joined: dict[int, dict[str, tuple[WorldLink, Message]]] = {}
        self.owner = os.getpid()
        self.inherited = False  # True in a process forked from the notebook: the World is its parent's
        self._cluster = raycluster.hold(plan.python.path) if plan.engine == RAY else None
        CREWS.add(self)

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self, *, launch: bool = True) -> None:
        """Start the agents, and the first generation of ranks if that is not left to the caller."""
        try:
            self._start_agent(self._listen())
            if launch:
                self.launch()
        except BaseException:
            self.close()
            raise

    def _listen(self) -> WorldListener:
        if self._listener is None:
            place = self.plan.host if self.plan.is_remote else self.folder / "s"
            self._listener = WorldListener(self._key, place, self._certificate)
        return self._listener

    def _start_agent(self, listener: WorldListener) -> None:
        where = ["--connect", listener.address]
        if self._certificate is not None:
            where += ["--certificate", self._certificate.fingerprint]
        others = [*where, "--ranks", str(self.plan.part.neighbours)]
        if 0 in self.plan.machines:
            (self.folder / "key").touch(mode=0o600)
            (self.folder / "key").write_text(self._key.hex())
            arguments = [*where, "--node", "0", "--folder", str(self.folder)]
            if self._cluster is not None:
                arguments += ["--early", raycluster.SLOWEST]  # while the cluster starts
            self._process = warm.fork_agent(self.plan, self.folder, self._agent_log, arguments)
            if self._process is None:
                self._process = self._start_cold(arguments)
        away = [machine for machine in self.plan.machines if machine]
        together = [away] if len(self.plan.launch) == 1 else [[node] for node in away]
        for nodes, template in zip(together, self.plan.launch, strict=False):
            texts = [
                agent_command(self.plan.python.path, AGENT, [*others, "--node", str(node)], self.plan.env)
                for node in nodes
            ]
            first = self.plan.part.first
            output = self.logs / f"machine{nodes[0]}{f'_rank{first}' if first else ''}.log"
            self._launched.append(Launched.start(nodes, template, texts, self._key, output))
        for node in () if self.plan.launch else away:
            numbers = self.plan.numbers
            print(
                f"for the World of ranks {numbers.start} to {numbers.stop - 1}, on machine {node} of {self.plan.job_machines - 1} others, "
                "where the kit is installed, run:\n"
                f"  KIT_KEY={self._key.hex()} python -m kit.world.agent {' '.join(others)} --node {node}"
            )

    def _start_cold(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        env = asked.agent_environment(self.plan.part.neighbours, self.plan.job_machines, self.plan.env)
        with open(self._agent_log, "ab", opener=owner_only) as log:
            process = subprocess.Popen(
                [self.plan.python.path, str(AGENT), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**env, machine.MARK: leftovers.mark(self.id)},
                start_new_session=True,
            )
        (self.folder / leftovers.SESSION).write_text(str(process.pid))
        return process

    def launch(self) -> None:
        """Wait for the agents, start a generation of ranks under torchrun and wait until all have joined WORLD."""
        self._assemble(lambda: len(self.agents) == self.plan.nodes, "agents")
        for launched in self._launched if self.generation < 0 else ():
            for note in launched.notes():
                print(note)
        address = self._listen().address
        self.generation += 1
        ray = None if self._cluster is None else self._ray_order(self._cluster)
        self.members, self.exits = [], []
        self._broken_links.clear()
        self._oom_kills = machine.oom_kills()
        for _, agent in sorted(self.agents.items()):  # the first one opens the ranks' store
            agent.link.send({"do": "launch", "with": self._order(agent.node, address, ray)})
        joined = self._joined = {}
        self._assemble(lambda: len(joined) == self.plan.ranks, "ranks")  # each reports first on its watch link
        for links in joined.values():
            with contextlib.suppress(ChannelClosed):  # it has ended since; its agent reports how
                links["watch"][0].send({"do": "join"})
        self._assemble(lambda: sum(len(links) == 2 for links in joined.values()) == self.plan.ranks, "ranks")
        for rank in sorted(joined):
            (watch, _), (work, hello) = joined[rank]["watch"], joined[rank]["work"]
            member = WorldMember(**{name: hello[name] for name in HELLO}, work=work, watch=watch)
            log = self.logs / f"rank{member.rank}.log"
            member.log = log.stat().st_size if member.node == 0 and log.exists() else 0
            for link in (work, watch):
                link.limit_sending(SENDING_S)  # sending to a stopped rank must not stop us
            self.members.append(member)
        for agent in self.agents.values():
            ranks = {m.rank: [m.pid, m.started] for m in self.members if m.node == agent.node}
            agent.link.send({"do": "watch", "with": {"ranks": ranks}})
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def ready_to_launch(self, seconds: float = 5.0) -> bool:
        """Has every torchrun finished with the ranks before? Another machine must not join an old rendezvous.

        One that does not (its ranks all left with status 0, for instance, which it does not take for an end) is to be replaced.
        """
        ended = self._hear_until(lambda: all(agent.ended >= self.generation for agent in self.agents.values()), seconds)
        return ended and len(self.agents) == self.plan.nodes

    def _ray_order(self, cluster: raycluster.HeldCluster) -> Message:
        """What the agent needs to start ranks as actors, once the cluster is there."""
        deadline = time.monotonic() + self.plan.start_timeout_s
        while (facts := cluster.facts()) is None:
            self.hear_agents()
            self._check_start("Ray cluster")
            self.tick()
            if time.monotonic() > deadline:
                raise KitError(f"no Ray cluster after {self.plan.start_timeout_s:g} s: {cluster.last_words()}")
            readable_message(self._agent_fds(), 0.05)
        part, device = self.plan.part, "cpu" if self.plan.asynchronous else self.plan.device
        order = raycluster.order_of(facts, ranks=self.plan.ranks, neighbours=part.neighbours, device=device)
        about = {"namespace": cluster.namespace, "name": self.actor_name, "asynchronous": self.plan.asynchronous}
        return {**order, **about}

    @property
    def actor_name(self) -> str:
        """Of this generation's ranks as actors; a rank's own number follows."""
        return f"{self.id}-{self.generation}"

    def _order(self, node: int, address: str, ray: Message | None) -> Message:
        plan = self.plan
        port = plan.endpoint.rpartition(":")[2]
        arguments = [
            *(
                f"--nnodes={plan.nodes}",
                f"--node-rank={plan.machines.index(node)}",
                f"--nproc-per-node={plan.ranks // plan.nodes}",
            ),
            *("--rdzv-backend=static", f"--rdzv-id=kit-{self.id}-{self.generation}", "--max-restarts=0"),
            *("--run-path", "--start-method=fork", "--monitor-interval=0.05"),
            *((f"--master-addr={plan.host}", f"--master-port={port}") if plan.nodes > 1 else ()),
        ]
        return {
            "generation": self.generation,
            "torchrun": arguments,
            "address": address,
            "store": ["127.0.0.1", 0] if plan.nodes == 1 else [plan.host, int(port)] if node == 0 else None,
            "first": plan.part.first,
            "before": plan.part.before,
            "neighbours": plan.part.neighbours,
            "device": plan.device,
            "devices": list(plan.devices),
            "preload": list(plan.preload),
            "logs": str(self.logs),
            "ray": ray,
            "group_timeout_s": plan.group_timeout_s,
        }

    def _assemble(self, complete: Callable[[], bool], what: str) -> None:
        """Let callers in until `complete`, printing who is still missing; a start that fails names why."""
        printed = time.monotonic()
        deadline = printed + self.plan.start_timeout_s
        while not complete():
            self._let_in(what, 0.05)
            self.tick()
            if time.monotonic() > deadline:
                raise KitError(f"{self._missing(what)} after {self.plan.start_timeout_s:g} s; {self._last_words()}")
            if time.monotonic() - printed > 5 and self.plan.is_remote:
                printed = time.monotonic()
                print(self._missing(what))

    def _let_in(self, what: str, seconds: float) -> None:
        """Let callers in, after waiting so long for one."""
        listener = self._listen()
        unnamed = [link.fileno() for link in self._unnamed]
        ready = readable_message([*listener.filenos(), *self._agent_fds(), *unnamed], seconds)
        for link in [link for link in self._unnamed if link.fileno() in ready]:
            self._greet(link)  # without waiting: a caller that stops within its first frame delays no other
        self._unnamed += listener.welcome()
        self.hear_agents()
        self._check_start(what)

    def _greet(self, link: WorldLink) -> None:
        hello: Message = {}
        try:
            if not (messages := link.arrived()):
                return
            (hello,) = messages
            if hello["role"] == "agent":
                if not is_valid_hello(hello, node=self.plan.machines, pid=None):
                    raise Malformed(f"{hello}")
                link.limit_silence()
                self.agents[hello["node"]] = AgentEnd(hello["node"], link, link.peer)
            else:
                known = is_valid_hello(hello, rank=self.plan.numbers, node=None, pid=None, started=None)
                if not known or hello["role"] not in {"work", "watch"} or not hello.keys() >= set(HELLO):
                    raise Malformed(f"{hello}")
                self._joined.setdefault(hello["rank"], {})[hello["role"]] = (link, hello)
        except ChannelClosed:
            link.close()  # it ended; its agent reports how
        except MALFORMED as error:
            raise malformed(f"rank {hello['rank']}" if "rank" in hello else "a process of this World", error) from error
        self._unnamed.remove(link)
        if failed := hello.get("failed"):
            text = f"rank {hello['rank']} could not start: {failed['error']}\n{failed['traceback']}"
            self.kill()
            raise RankError(text, rank=hello["rank"], phase="start", traceback=failed["traceback"])

    def _check_start(self, what: str) -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            raise KitError(f"torchrun {how_ended(status)} before the {what} joined; {self._last_words()}")
        for launched in self._launched:
            if not self.agents.keys() >= set(launched.nodes) and (text := launched.failure(" before its agent joined")):
                raise KitError(text)
        for agent in self.agents.values():
            if agent.ended == self.generation and agent.error:
                if not agent.statuses:
                    raise KitError(f"the ranks ended before they joined: {agent.error}; {self._last_words()}")
                rank, status = next(iter(agent.statuses.items()))
                text = f"rank {rank} {how_ended(status)} before it joined; {self._last_words(2)}"
                raise RankDied(text, rank=rank, phase="start", **ending(status))

    def _missing(self, noun: str) -> str:
        if noun == "agents":
            number, noun = self.plan.nodes, "machines"
            absent = sorted(set(self.plan.machines) - set(self.agents))
            waiting = [launched for launched in self._launched if not self.agents.keys() >= set(launched.nodes)]
            launching = [f"; {launched.name} says{words}" for launched in waiting if (words := launched.last_words(1))]
        else:
            launching = []
            number, steps = self.plan.ranks, {rank: len(self._joined.get(rank, {})) for rank in self.plan.numbers}
            absent = [rank for rank, done in steps.items() if done < min(1 + min(steps.values()), 2)]
        return f"{number - len(absent)} of {number} {noun} have joined; missing: {', '.join(map(str, absent))}{''.join(launching)}"

    def _last_words(self, most: int = 12) -> str:
        log = self._agent_log
        lines = log.read_text(errors="replace").strip().splitlines()[-most:] if log.exists() else []
        return "\n".join(["torchrun's last lines:", *lines]) if lines else "torchrun wrote nothing"

    # -- taking in what arrives ------------------------------------------------------------------------------------------

    def filenos(self) -> list[int]:
        """Those of ranks that are busy, and of the agents, which report ends."""
        work = [m.work.fileno() for m in self.members if m.call is not None]
        return [*work, *(m.watch.fileno() for m in self.members if m.asked), *self._agent_fds()]

    def take(self, ready: set[int] | None = None) -> None:
        """Take in all that has arrived, without waiting; `ready` are the links that were seen to be readable."""
        if ready is None:
            ready = readable_message(self.filenos(), 0)
        if not ready.isdisjoint(self._agent_fds()):
            self.hear_agents()
            gone = {exit_.rank for exit_ in self.exits}
            gone |= {m.rank for m in self.members if m.call is not None and self.has_no_agent(m)}
            for call in self.calls():  # also those without such a rank: torchrun ends all of them
                call.gone |= gone - call.answers.keys()
        for member in self.members:
            if member.asked and member.watch.fileno() in ready:
                self._hear_watch(member)
            if member.call is not None and member.work.fileno() in ready:
                self.hear(member)

    def hear(self, member: WorldMember) -> bool:
        """Take in what a rank answered; False once it is gone."""
        try:
            for message in member.work.arrived():
                call = member.call
                if call is not None and message["id"] == call.request["id"]:
                    while member.asked and readable_message([member.watch.fileno()], 0):
                        self._hear_watch(member)  # what it reported before it answered
                    member.news += message.pop("news", ())
                    call.hear(member, message)
        except ChannelClosed as error:
            self._note_tampering(error, "rank", member.rank)
            if member.call is not None and member.rank not in member.call.answers:
                member.call.gone.add(member.rank)
            return False
        except MALFORMED as error:
            self.refuse(member, error)
        return True

    def _note_tampering(self, error: Exception, end: str, number: int) -> None:
        if isinstance(error, TamperedChannel):
            self._broken_links[end, number] = str(error)

    def why_lost(self, member: WorldMember) -> str:
        """That a link to this rank, or to the agent of its machine, was tampered with; else how the launch of a lost agent ended."""
        links = self._broken_links
        why = links.get(("rank", member.rank)) or links.get(("agent", member.node))
        if why:
            return f"; a link to it was broken: {why}"
        launches = [] if member.node in self.agents else self._launched
        failures = [launched.failure("", lost=True) for launched in launches if member.node in launched.nodes]
        return "".join(f"; {text}" for text in failures if text)

    def refuse(self, member: WorldMember, error: Exception) -> None:
        """End the World of a rank that sent what no rank of the kit sends."""
        for call in self.calls():
            why = malformed(f"rank {member.rank}", error)
            call.die(str(why), why)

    def _hear_watch(self, member: WorldMember) -> None:
        try:
            member.hear_watch()
        except ChannelClosed:
            member.asked = 0.0  # its end is heard of on the other link
        except MALFORMED as error:
            self.refuse(member, error)

    def calls(self) -> list[Any]:
        return list({id(m.call): m.call for m in self.members if m.call is not None}.values())

    def has_no_agent(self, member: WorldMember) -> bool:
        """Whether it is gone with its machine's agent. Its own link may notice much later: the kernel is patient with what was sent."""
        return member.node not in self.agents and (member.node > 0 or self.torchrun_pid is not None)

    def is_lost(self, member: WorldMember) -> bool:
        """Whether no answer is to be expected from its machine."""
        return member.node in self.silent or member.node not in self.agents

    def address_of(self, node: int) -> str:
        """Where other machines reach this one; empty for a lost one."""
        if node == 0:
            return self.plan.host
        return self.agents[node].address if node in self.agents else ""

    # -- talking to agents ------------------------------------------------------------------------------------------

    def _agent_fds(self) -> list[int]:
        return [agent.link.fileno() for agent in self.agents.values()]

    def hear_agents(self) -> None:
        """Take in what agents sent. An agent that is gone takes its node's ranks along; `torchrun_gone` has the reason."""
        for agent in list(self.agents.values()):
            try:
                while readable_message([agent.link.fileno()], 0):
                    for message in agent.link.arrived():
                        self._note(agent, message)
            except (ChannelClosed, *MALFORMED) as error:
                self._note_tampering(error, "agent", agent.node)
                agent.link.close()
                del self.agents[agent.node]

    def _hear_until(self, done: Callable[[], object], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (over := bool(done())) and time.monotonic() < deadline:
            readable_message(self._agent_fds(), 0.02)
            self.hear_agents()
        return over

    def _note(self, agent: AgentEnd, message: Message) -> None:
        self.silent.discard(agent.node)
        if "exit" in message:
            member = next((member for member in self.members if member.rank == message["exit"]), None)
            if member is not None and member.pid == message["pid"]:
                status = message["status"]
                if status is None and agent.ended == self.generation:  # torchrun's own account came first
                    status = agent.statuses.get(member.rank)
                self.exits.append(Exit(member.rank, status, message["at"]))
        elif "id" in message:
            agent.answers[message["id"]] = message["answer"]
        else:
            agent.ended, agent.error = message["ended"], message["error"]
            agent.statuses = {int(rank): status for rank, status in message["statuses"].items()}
            for exit_seen in self.exits:
                exit_seen.status = agent.statuses.get(exit_seen.rank) if exit_seen.status is None else exit_seen.status

    def ask(self, node: int, do: str, **arguments: Any) -> Any:
        """One question to a node's agent, answered within two seconds; None if not."""
        return self.ask_all([Question(node, do, arguments)], 2.0)[0]

    def ask_all(self, questions: Sequence[Question], seconds: float) -> list[Any]:
        """Ask agents all at once; the answers, None for those that are missing once none has come for so many seconds. A silent agent is
        not waited for again."""
        numbers = [time.monotonic_ns() + place for place in range(len(questions))]
        asked = {
            number: self.agents[question.node]
            for number, question in zip(numbers, questions, strict=True)
            if question.node in self.agents and question.node not in self.silent
        }
        for number, question in zip(numbers, questions, strict=True):
            if number in asked:
                with contextlib.suppress(ChannelClosed):
                    asked[number].link.send({"id": number, "do": question.do, "with": question.arguments})

        def unanswered() -> list[int]:
            return [
                number for number, agent in asked.items() if agent.node in self.agents and number not in agent.answers
            ]

        while (left := len(unanswered())) and self._hear_until(lambda left=left: len(unanswered()) < left, seconds):  # type: ignore[misc]
            pass
        self.silent |= {asked[number].node for number in unanswered()}
        return [asked[number].answers.pop(number, None) if number in asked else None for number in numbers]

    def first_exit(self, seconds: float = ACCOUNT_S) -> Exit | None:
        """The end that came before the others', with its status; waits for the agents' account of it, and of the rank that torchrun
        ended the others for."""

        def first() -> Exit | None:
            return min(self.exits, key=lambda end: (end.victim, end.at), default=None)

        def is_known() -> bool:
            end = first()
            return end is not None and end.status is not None and not (end.victim and self._may_report_more())

        first_machine = self.plan.machines[0]
        self._hear_until(lambda: first_machine not in self.agents or is_known(), seconds)
        return first()

    def _may_report_more(self) -> bool:
        """Whether an agent has not reported yet how all of its ranks ended."""
        reported = {end.rank for end in self.exits}
        return any(
            agent.ended < self.generation or not agent.statuses.keys() <= reported for agent in self.agents.values()
        )

    def out_of_memory(self, node: int) -> str:
        """How many processes of this machine's control group the kernel has killed for memory since these ranks started; empty if none."""
        kills = (machine.oom_kills() or 0) - (self._oom_kills or 0) if node == 0 else 0
        if kills <= 0:
            return ""
        most = machine.cgroup_limit("memory").maximum
        limit = f", which may use {most / 2**30:.2f} GiB" if most else ""
        killed = "a process" if kills == 1 else f"{kills} processes"
        return f"Out of memory: the kernel has killed {killed} of this control group{limit}; use fewer ranks or a smaller size"

    def kill_rank(self, member: WorldMember) -> None:
        """SIGKILL a rank, on whatever machine; the World has to notice by itself."""
        if member.node == 0:
            leftovers.kill_process(member.pid, member.started)
        elif not self.ask(member.node, "kill_rank", rank=member.rank):
            raise KitError(f"rank {member.rank} was not killed: the agent of machine {member.node} does not answer")

    def look_beside_others(self) -> None:
        """While others start: let this World's agents in; once it has ranks, raise if one of them, or torchrun, has ended."""
        if self.generation < 0:
            self._let_in("agents", 0.0)
            return
        self.hear_agents()
        if self.exits and (death := self.first_exit()) is not None:
            how = "is gone" if death.status is None else how_ended(death.status)
            text = f"rank {death.rank} {how} while other Worlds started; {self._last_words(2)}"
            raise RankDied(text, rank=death.rank, phase="start", **ending(death.status))
        if gone := self.torchrun_gone():
            raise KitError(f"torchrun {gone} while other Worlds started; {self._last_words()}")
        if lost := [machine for machine in self.plan.machines if machine not in self.agents]:
            raise KitError(f"the agent of machine {lost[0]} is gone while other Worlds started")

    def torchrun_gone(self) -> str | None:
        """How this machine's agent (torchrun) ended, or None while it lives."""
        if self._process is None or (0 in self.agents and self._process.poll() is None):
            return None
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return how_ended(status)

    @property
    def torchrun_pid(self) -> int | None:
        return self._process.pid if self._process else None

    # -- logs and states --------------------------------------------------------------------------------------------

    def read_log(self, member: WorldMember, offset: int, limit: int) -> bytes:
        if member.node == 0:
            return read_log(self.logs, member.rank, offset, limit)
        answer = self.ask(member.node, "log", rank=member.rank, offset=offset, limit=limit)
        return answer.encode("latin-1") if answer else b""

    def describe(self, members: Sequence[WorldMember]) -> dict[int, str]:
        """The stack or state of each rank that does not answer; all machines are asked at once."""
        local = [m for m in members if m.node == 0]
        remote = [m for m in members if m.node != 0]
        texts = {m.rank: leftovers.describe_leftover(m.pid, m.started, self.folder / f"stack{m.rank}") for m in local}
        answers = self.ask_all([Question(m.node, "describe", {"rank": m.rank}) for m in remote], DESCRIBED_S)
        for member, answer in zip(remote, answers, strict=True):
            texts[member.rank] = answer or "no stack: its machine's agent does not answer"
        return texts

    # -- ending -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL all ranks of this generation with what they started; torchrun stays, ready to launch the next one."""
        if self.inherited:
            return
        for member in self.members:
            if member.node == 0:
                leftovers.kill_process(member.pid, member.started, group=True)
        for link in self._rank_links():
            link.close()
        self._unnamed.clear()
        self._stop_listening()  # a rank that was still starting must not join the next generation
        for agent in self.agents.values():
            with contextlib.suppress(ChannelClosed):
                agent.link.send({"do": "kill"})

    def _rank_links(self) -> list[WorldLink]:
        """Those of ranks, and of callers on their way to be one."""
        joined = [link for links in self._joined.values() for link, _ in links.values()]
        return [*self._unnamed, *joined, *(link for m in self.members for link in (m.work, m.watch))]

    def forget(self) -> None:
        """In a process forked from the notebook: close its copies of the channels, or they would outlive the notebook."""
        self.inherited = True
        for link in [*(agent.link for agent in self.agents.values()), *self._rank_links()]:
            link.close()
        if self._listener is not None:
            self._listener.close(forked=True)

    def let_go(self) -> None:
        """Have everything end, without waiting for it; `close` follows."""
        if self.inherited:
            return
        self.kill()
        for agent in self.agents.values():
            agent.link.close()  # the agent takes the end of its channel as the end of the World
        self.agents.clear()
        self._let_go_at = self._let_go_at or time.monotonic()

    def close(self) -> None:
        if self.inherited:
            return
        self.let_go()
        if self._process is not None:
            try:
                self._process.wait(3.0)
            except subprocess.TimeoutExpired:
                if self._process.pid is not None:
                    leftovers.end_group(self._process.pid)
                self._process.wait(10.0)
        deadline = self._let_go_at + LAUNCHES_END_S
        for launched in self._launched:
            launched.end(within_s=max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + 10
        local_members = [m for m in self.members if m.node == 0]
        while any(machine.alive(m.pid, m.started) for m in local_members) and time.monotonic() < deadline:
            time.sleep(0.002)
        leftovers.end_carriers(leftovers.mark(self.id).__eq__)
        if self._cluster is not None:
            raycluster.release(self._cluster)
            self._cluster = None
        leftovers.remove_folder(self.folder)


def owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def forget_all() -> None:
    for crew in CREWS:
        crew.forget()


os.register_at_fork(after_in_child=forget_all)
