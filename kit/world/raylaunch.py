"""For launch='ray': runs the agents of a World's other machines as tasks of a Ray cluster, in one placement group, until the World ends.
For engine='ray': holds the cluster in which ranks are actors (`--hold`), until a line comes on standard input.

A process of its own: the notebook never becomes a Ray driver, and a cluster that was there stays. The key comes on standard input and
goes on as an argument, inside Ray. Run by path, so it imports nothing of the kit.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

START_S = 300.0  # the World's own time to start is shorter, unless somebody has set it
ROOM_S = 300.0
END_S = 4.0  # for the other agents to end too, once one has; the notebook waits longer
SHORT = 24  # of a folder's path; Ray adds to it, and a Unix socket's ends at 107 bytes
HELD_CPUS = 2  # of a small cluster for engine='ray', whose actors ask for none
OUTPUT = 8_000  # bytes of an agent's output that are passed on
NOTE = "note: "  # begins a line that the notebook prints, as launch.py has it
# Ranks count all GPUs of their machine, as with every other way to launch: `EVERY_GPU` in rayside.py, which is out of reach here.
ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
REHEARSAL = "kit-rehearsal"  # a resource that marks the clusters that are started here


def run_agent(command: str, key: str) -> tuple[int, str]:
    """The task. The agent ends with Ray's worker, or it would hold a machine that Ray takes for free."""
    prctl, die_with_parent = ctypes.CDLL(None).prctl, 1
    # Ray limits its workers to one thread; the agent decides by the number of its ranks.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=env,
            preexec_fn=lambda: prctl(die_with_parent, signal.SIGKILL),  # noqa: PLW1509 - it takes no lock
        ) as process:
            process.communicate(f"{key}\n".encode())
        output.seek(max(0, output.tell() - OUTPUT))
        return process.returncode, output.read().decode(errors="replace")


def say(text: str) -> None:
    """A World that has waited too long shows the last line."""
    print(text, flush=True)


def join_cluster(folder: str, agents: int) -> bool:
    """Join the cluster of this machine; without one, start a small one, which ends with this process. Returns whether there was one."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    say("waiting for the Ray cluster of this machine")
    try:
        ray.init(address="auto", **quiet)
        if REHEARSAL not in ray.cluster_resources():
            return True
        ray.shutdown()
    except (OSError, RuntimeError, RayError) as error:
        address = os.environ.get("RAY_ADDRESS")
        if address or not isinstance(error, ConnectionError):
            where = f"RAY_ADDRESS={address}" if address else "this machine's cluster"
            raise SystemExit(f"Ray could not join {where}: {str(error).strip().partition(chr(10))[0]}") from None
    say("waiting until Ray has started here: there is no cluster")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own 15 lets whatever else is busy here go before the ranks.
    os.environ.setdefault("RAY_worker_niceness", "0")
    small: dict[str, Any] = {"num_cpus": agents, "num_gpus": 0, "object_store_memory": 80_000_000}
    end = time.monotonic() + START_S
    while True:
        try:
            ray.init("local", include_dashboard=False, resources={REHEARSAL: 1}, _temp_dir=folder, **small, **quiet)
        except Exception as error:  # noqa: BLE001 - Ray gives itself 30 s, which a busy machine may exceed; it has no name for this
            ray.shutdown()
            if time.monotonic() > end:
                raise SystemExit(f"Ray did not start here within {START_S:g} s: {error}") from None
        else:
            return False


def bundles_of(machine: int, agents: int, share: float, *, joined: bool) -> list[dict[str, float]]:
    """What each agent needs, pinned to its machine. Machines are counted by address, so that several Worlds count alike."""
    own = ray.get_runtime_context().get_node_id()
    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1]
    if not joined:
        others = [next(node for node in able if node["NodeID"] == own)] * (machine - 1 + agents)
    else:
        others = [node for node in able if node["NodeID"] != own]
        others.sort(key=lambda node: (str(node["NodeManagerAddress"]), str(node["NodeID"])))
    if len(others) < machine - 1 + agents:
        raise SystemExit(
            f"the Ray cluster has {len(others)} machines with a CPU beside this one, and the World needs {machine - 1 + agents}"
        )
    bundles = []
    for node in others[machine - 1 : machine - 1 + agents]:
        gpus = round(node["Resources"].get("GPU", 0.0) * share, 3)
        need = {f"node:{node['NodeManagerAddress']}": 0.001, "CPU": 1.0}
        if gpus:  # Ray gives parts of one GPU, or whole ones
            need["GPU"] = float(int(gpus)) if gpus >= 1 else gpus
        bundles.append(need)
    return bundles


def launch(options: argparse.Namespace, key: str, folder: str) -> int:
    joined = join_cluster(folder, len(options.command))
    bundles = bundles_of(options.machine, len(options.command), options.share, joined=joined)
    if not joined:
        machines = ", ".join(str(options.machine + index) for index in range(len(bundles)))
        say(f"{NOTE}there is no Ray cluster here: this machine plays machine {machines}")
    needs = [
        [f"{amount:g} {name}" if amount >= 0.01 else name for name, amount in bundle.items()] for bundle in bundles
    ]
    needed = ", ".join(" with ".join(need) for need in needs)
    say(f"waiting until the Ray cluster has room for {needed}; `ray status` shows its use")
    group = placement_group(bundles)
    if not group.wait(ROOM_S):
        raise SystemExit(f"the Ray cluster has had no room for {needed} for {ROOM_S:g} s; `ray status` shows its use")
    say("waiting for Ray to start the agent")
    tasks = []
    for index, (bundle, command) in enumerate(zip(bundles, options.command, strict=True)):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        how: dict[str, Any] = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0.0), "max_retries": 0}
        how |= {"scheduling_strategy": place, "runtime_env": {"env_vars": ALL_GPUS}}
        tasks.append(ray.remote(run_agent).options(**how).remote(command, key))
    ended, _ = ray.wait(tasks)
    try:
        status, output = ray.get(ended[0])
    except RayError as error:
        raise SystemExit(f"Ray lost the task of an agent: {str(error).partition(chr(10))[0]}") from None
    ray.wait(tasks, num_returns=len(tasks), timeout=END_S)
    say(output)
    return int(128 - status if status < 0 else status)


def hold_cluster(folder: str) -> int:
    os.environ.update(ALL_GPUS)  # for the workers of a cluster that starts here
    joined = join_cluster(folder, HELD_CPUS)
    context = ray.get_runtime_context()
    own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    facts = {"address": context.gcs_address, "joined": joined, "gpus": own["Resources"].get("GPU", 0.0)}
    say(json.dumps({**facts, "auth": os.environ.get("RAY_AUTH_MODE", "")}))  # Ray sets it when it starts a cluster
    sys.stdin.readline()
    return 0


def end_with_the_notebook(notebook: int, folder: str, signals: int) -> None:
    """Or on SIGTERM: the main thread may be inside Ray, where it handles no signal."""
    while os.getppid() == notebook:
        readable, _, _ = select.select([signals], [], [], 1.0)
        if readable and signal.SIGTERM in os.read(signals, 64):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)  # what Ray runs for this process ends with it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--notebook", type=int, required=True, help="process that starts this one, and ends it by its own end"
    )
    parser.add_argument("--hold", action="store_true", help="hold the cluster, and start no agent")
    parser.add_argument("--machine", type=int, default=1, help="number of the first agent's machine, from 1 on")
    parser.add_argument("--share", type=float, default=1.0, help="part of a machine's GPUs that the World uses")
    parser.add_argument("command", nargs="*", help="the agent's command, for each machine")
    options = parser.parse_args()
    key = "" if options.hold else sys.stdin.readline().strip()
    root = tempfile.gettempdir()
    if len(root) > SHORT:
        root = "/tmp"  # noqa: S108 - the folder in it gets a name of its own
    with tempfile.TemporaryDirectory(prefix="kit-ray-", dir=root, ignore_cleanup_errors=True) as folder:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # so `kit clean` sees that it is in use
        signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=end_with_the_notebook, args=(options.notebook, folder, signals), daemon=True).start()
        try:
            return hold_cluster(folder) if options.hold else launch(options, key, folder)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
