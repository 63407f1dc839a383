"""How the agents of a World's other machines are started: by a person, over ssh, in a Slurm allocation, by Ray, or by a command of
your own.

The key never appears in a command line that the kit runs: each command gets it on its standard input, which ssh, srun and
raylaunch.py pass on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kit.errors import BadInput, how_ended
from kit.world import leftovers

TORCHRUN = "torchrun"
PRINT, SLURM, SSH, RAY = "print", "slurm", "ssh:", "ray"
# A client that loses its machine ends by itself.
SSH_COMMAND = "ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=4 {host} {{command}}"
SRUN_COMMAND = "srun --overlap --nodes=1 --ntasks=1 --nodelist={host} sh -c {{command}}"
# -P: the folder of the file has modules with common names
RAY_COMMAND = "exec {python} -P {path} --notebook {notebook} --machine {machine} --share {share} {{command}}"
RAYLAUNCH = str(Path(__file__).with_name("raylaunch.py"))
NOTE = "note: "  # begins a line of a launch that the notebook prints
OWN_OF_A_MACHINE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RAY_START_S = 300.0
SCONTROL_S = 10.0
LAST_WORDS_S = 1.0  # for a launch by Ray that has lost its agent to end too
TERMINATED_S = 3.0  # for a launch to clean up
WAYS = f"'{PRINT}', '{SSH}HOST1,HOST2', '{SLURM}', '{RAY}', or a command with {{command}} and, if you like, {{node}}"


def launch_commands(launch: str, nodes: int, share: float = 1.0) -> tuple[str, ...]:
    """The shell command for each other machine, with {command} still in it; none where a person starts the agents. `share`: the part of a
    machine's GPUs that the World uses."""
    if not isinstance(launch, str):
        raise BadInput(f"launch must be {WAYS}, not {launch!r}")
    if nodes == 1 and launch != PRINT:
        raise BadInput("launch= is for several nodes; leave it out, or give nodes=2 or more")
    if launch == PRINT:
        return ()
    if launch.startswith(SSH):
        hosts = [host.strip() for host in launch.removeprefix(SSH).split(",") if host.strip()]
        return for_hosts(SSH_COMMAND, hosts, nodes, f"launch={launch!r} names")
    if launch == SLURM:
        return for_hosts(SRUN_COMMAND, slurm_hosts(), nodes, "this Slurm allocation has, beside this one,")
    if launch == RAY:
        if importlib.util.find_spec("ray") is None:
            raise BadInput(f"launch='ray' needs Ray in the notebook's environment: {sys.executable} -m pip install ray")
        python, path = shlex.quote(sys.executable), shlex.quote(RAYLAUNCH)
        return tuple(
            RAY_COMMAND.format(python=python, path=path, notebook=os.getpid(), machine=machine, share=share)
            for machine in range(1, nodes)
        )
    return tuple(from_template(launch, node) for node in range(1, nodes))


def for_hosts(template: str, hosts: list[str], nodes: int, has: str) -> tuple[str, ...]:
    if len(hosts) != nodes - 1:
        raise BadInput(f"{has} {len(hosts)} machines, and nodes={nodes} needs {nodes - 1} beside this one")
    if wrong := [host for host in hosts if host.startswith("-") or shlex.quote(host) != host]:
        raise BadInput(f"launch= names {wrong[0]!r}, which is no host name")
    return tuple(template.format(host=host) for host in hosts)


def slurm_hosts() -> list[str]:
    """The other machines of this allocation; the notebook's own is the one that runs this process."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    own = (os.environ.get("SLURMD_NODENAME") or os.uname().nodename).partition(".")[0]
    if not listed:
        raise BadInput(
            "launch='slurm' works inside an allocation (salloc or sbatch), and SLURM_JOB_NODELIST is not set"
        )
    if shutil.which("scontrol") is None or shutil.which("srun") is None:
        raise BadInput("launch='slurm' needs scontrol and srun on the PATH")
    hosts = machines_of(listed)
    if own not in {host.partition(".")[0] for host in hosts}:
        raise BadInput(
            f"launch='slurm' needs the notebook on a machine of the allocation ({listed}), and this one is {own}"
        )
    return [host for host in hosts if host.partition(".")[0] != own]


@functools.cache  # a panel checks its settings at every keystroke
def machines_of(listed: str) -> tuple[str, ...]:
    """The names in Slurm's list of hosts, which may be written as ranges."""
    command = ["scontrol", "show", "hostnames", listed]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"launch='slurm' cannot ask scontrol for the machines: {error}") from error
    if done.returncode:
        raise BadInput(f"scontrol {how_ended(done.returncode)}: {done.stderr.strip()}")
    return tuple(done.stdout.split())


def from_template(template: str, node: int) -> str:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise BadInput(f"launch={template!r} cannot be read: {error}") from None
    if "command" not in names or names - {"command", "node"}:
        raise BadInput(f"launch must be {WAYS}, not {template!r}")
    return template.format(node=node, command="{command}")


class Launched(NamedTuple):
    """The local command that runs the agents of one or more machines."""

    nodes: Sequence[int]
    text: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, nodes: Sequence[int], template: str, commands: Sequence[str], key: bytes, log: Path) -> Launched:
        text = template.replace("{command}", shlex.join(commands))
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", text], stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as keys:  # it has ended, as `failure` finds
            keys.write(key.hex().encode() + b"\n")
        return cls(nodes, text, process, log)

    @property
    def name(self) -> str:
        return f"the launch of machine {', '.join(map(str, self.nodes))}"

    def failure(self, when: str, *, lost: bool = False) -> str:
        """How the command failed; empty if it has not. One that ended well may have left its agent in the background. `lost`: its agent
        is, so Ray's launch is about to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if status := self.process.wait(LAST_WORDS_S if lost and RAYLAUNCH in self.text else 0.0):
                return f"{self.name} {how_ended(status)}{when}{self.last_words(3)}"
        return ""

    def last_words(self, most: int) -> str:
        words = self.log.read_text(errors="replace").strip().splitlines()[-most:]
        return ": " + " | ".join(words) if words else ""

    def notes(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]

    def end(self, within_s: float) -> None:
        """Wait until the command has ended with its agent; end one that has lost its machine."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TERMINATED_S)
            leftovers.end_group(self.process.pid)
            self.process.wait(10.0)


def agent_command(python: str, agent: Path, arguments: Sequence[str], env: Mapping[str, str]) -> str:
    """The command line of an agent. `env`: the variables of the World's ranks, except each machine's own name for its network."""
    given = [f"{name}={value}" for name, value in env.items() if name not in OWN_OF_A_MACHINE]
    settings = ["env", *given] if given else []
    return shlex.join([*settings, python, str(agent), *arguments])
