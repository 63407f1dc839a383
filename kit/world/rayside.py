"""Ranks as actors of Ray: the World's agent, a driver, starts them, and what runs in their processes.

An actor serves the notebook over the World's channel, as a rank of torchrun does. A request `lend` frees its main thread for calls by Ray,
until `serve` is called again.

Actors are pickled by value, since a worker of Ray need not have the kit: their methods import what they use. No method may name torch:
a name such as `config` in its code would pull in torch.distributed.config, which cannot be pickled.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import importlib
import os
import select
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import machine
from kit.world import agentside
from kit.world.channel import ChannelClosed, Message, WorldLink

RAY_DRIVER: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
# Ranks count all GPUs of their machine, as under torchrun.
EVERY_GPU = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(kw_only=True)
class ActorHost:
    """`RankHost` in an actor's process, and what else a fork of the agent would have from it."""

    key: bytes
    certificate: str
    node: int
    folder: Path
    order: Message
    env: Mapping[str, str]
    path: list[str]
    cwd: str


# -- in the agent ----------------------------------------------------------------------------------------------------------


def rank_actors() -> tuple[type, type]:
    """The actor of a rank, and an asynchronous one."""

    class Rank:
        def begin(self, entry: str, host: dict[str, Any]) -> int:
            import runpy
            import sys

            if "kit" not in sys.modules:
                runpy.run_path(entry)["make_kit_importable"]()
            from kit.world import rayside  # noqa: PLW0406 - in another process

            return rayside.begin(host)

        def serve(self) -> None:
            from kit.world import rayside  # noqa: PLW0406 - in another process

            rayside.serve()

        def act(self, phase: str, request: dict[str, Any]) -> dict[str, Any]:
            from kit.world import rayside  # noqa: PLW0406 - in another process

            return rayside.act(phase, request)

    class AsynchronousRank:
        async def begin(self, entry: str, host: dict[str, Any]) -> int:
            import asyncio
            import runpy
            import sys

            if "kit" not in sys.modules:
                runpy.run_path(entry)["make_kit_importable"]()
            from kit.world import rayside  # noqa: PLW0406 - in another process

            rayside.LOOP = asyncio.get_running_loop()
            return await asyncio.to_thread(rayside.begin, host)

        async def serve(self) -> None:
            import asyncio

            from kit.world import rayside  # noqa: PLW0406 - in another process

            await asyncio.to_thread(rayside.serve)

    return Rank, AsynchronousRank


def run_actors(agent: agentside.Node) -> None:
    """Have Ray start a generation of ranks, and wait until one has ended; then end the others, as torchrun does."""
    from torch._C._distributed_c10d import TCPStore

    order, size = agent.order, agent.order["ray"]["ranks"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    if order["ray"]["auth"]:
        os.environ["RAY_AUTH_MODE"] = order["ray"]["auth"]
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        print(f"waiting for the Ray cluster at {order['ray']['address']}", flush=True)
        ray.init(order["ray"]["address"], namespace=order["ray"]["namespace"], **RAY_DRIVER)
    door = agent.take_door()
    place = {"MASTER_ADDR": order["store"][0], "MASTER_PORT": str(door.getsockname()[1])}
    seconds = dt.timedelta(seconds=order["group_timeout_s"])
    store = TCPStore(place["MASTER_ADDR"], int(place["MASTER_PORT"]), 1, True, seconds, master_listen_fd=door.detach())
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    host = {name: getattr(agent, name) for name in ("key", "certificate", "node", "folder", "order")}
    host |= {"path": sys.path, "cwd": str(Path.cwd())}
    print(f"waiting until Ray has started {size} actors, {needs_of(order)}; `ray status` shows its use", flush=True)
    actors = []
    try:
        for rank in range(size):
            kind = rank_actors()[order["ray"]["asynchronous"]]
            actors.append(ray.remote(kind).options(**actor_options(ray, order, rank)).remote())
        begun = [
            actor.begin.remote(
                str(agentside.AGENT), {**host, "env": {**env, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}}
            )
            for rank, actor in enumerate(actors)
        ]
        left, pids = list(begun), []
        while left:
            ready, left = ray.wait(left)
            pids += ray.get(ready)
        for actor in actors:
            actor.serve.remote()
        wait_for_first_end(pids)
    finally:
        for actor in actors:
            ray.kill(actor)
        del store
    raise RuntimeError("an actor has ended")


def needs_of(order: Message) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in order["ray"]["needs"].items()) or "which need nothing"


def actor_options(ray: Any, order: Message, rank: int) -> dict[str, Any]:
    """On this machine. In a cluster that was there, with the World's mark in the environment that the kernel shows, for `kit clean`.
    Ray starts a fresh process for that. A cluster that ends with the notebook needs no mark, and has processes that wait."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    node = ray.get_runtime_context().get_node_id()
    marked = {machine.MARK: os.environ[machine.MARK], **EVERY_GPU}
    return {
        "name": f"{order['ray']['name']}-{order['first'] + rank}",
        "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        "num_cpus": order["ray"]["needs"].get("CPU", 0),
        "num_gpus": order["ray"]["needs"].get("GPU", 0),
        "max_restarts": 0,
        **({"runtime_env": {"env_vars": marked}} if order["ray"]["joined"] else {}),
    }


def wait_for_first_end(pids: list[int]) -> None:
    poll = select.poll()
    descriptors = []
    try:
        for pid in pids:
            descriptors.append(os.pidfd_open(pid))
            poll.register(descriptors[-1], select.POLLIN)
        poll.poll()
    except ProcessLookupError:  # it has ended
        pass
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


# -- in an actor's process ---------------------------------------------------------------------------------------------------

LOOP: asyncio.AbstractEventLoop  # of an asynchronous actor
_work: WorldLink


def begin(host: dict[str, Any]) -> int:
    """Become a rank, with the environment of the agent, as a fork of it would have."""
    global _work  # noqa: PLW0603 - one actor is one process
    os.environ.update(host["env"])
    sys.path[:] = [*host["path"], *(folder for folder in sys.path if folder not in host["path"])]
    os.chdir(host["cwd"])
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # what this rank starts can be ended with it
    rankside = importlib.import_module("kit.world.rankside")
    _work = rankside.join_notebook(ActorHost(**host))
    return os.getpid()


def serve() -> None:
    rankside = importlib.import_module("kit.world.rankside")
    try:
        rankside.RANK.serve(_work)
    except ChannelClosed:
        rankside.end_rank()


def is_interrupted() -> bool:
    """Whether the call that runs on this asynchronous actor should end."""
    rank = importlib.import_module("kit.world.rankside").RANK
    return bool(rank.interrupted == rank.call)


def act(phase: str, request: Message) -> Message:
    """Answer a call by Ray, as one of the notebook."""
    rank = importlib.import_module("kit.world.rankside").RANK
    rank.phase = phase
    reply: Message = rank.answer(request)
    if reply.get("exiting"):
        importlib.import_module("kit.world.rankside").end_rank()
    return reply
