"""Weights that go through Ray's object store: put whole by the sender, mapped and copied by receivers. Each end is a driver of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from kit.bench.sync.files import library

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.sync.link import Link

HERE = "127.0.0.1"
AUTH_MODE = "RAY_AUTH_MODE"
ROOM = 2.5  # objects that are let go are freed a moment later
LEAST = 256 * 2**20


class ObjectStore:
    """A cluster on this machine that the sender starts with its first use and ends with its close."""

    def __init__(
        self, tensors: Mapping[tuple[str, int], torch.Tensor], links: Mapping[str, Link], *, sends: bool
    ) -> None:
        self._bytes = {name: tensor.view(-1).view(torch.uint8) for (name, _), tensor in tensors.items()}
        self._links = links
        self._sends = sends
        self._ray: Any = None

    def bring(self) -> None:
        if self._ray is None:
            self._start()
        if self._sends:
            self._put()
        else:
            self._get()

    def _put(self) -> None:
        object_id = self._ray.put({name: each.numpy() for name, each in self._bytes.items()})
        told = self._ray.cloudpickle.dumps(object_id)
        for link in self._links.values():
            link.send({"kind": "put", "object": told.hex()})
        for link in self._links.values():
            link.expect("got")

    def _get(self) -> None:
        (link,) = self._links.values()
        said, _ = link.expect("put")
        found = self._ray.get(self._ray.cloudpickle.loads(bytes.fromhex(said["object"])))
        for name, into in self._bytes.items():
            into.numpy()[:] = found[name]
        del found  # it is a view of the store, which frees nothing that is looked at
        link.send({"kind": "got"})

    def _start(self) -> None:
        options = {"_node_ip_address": HERE, "log_to_driver": False, "logging_level": "ERROR"}
        if not self._sends:
            (link,) = self._links.values()
            said, _ = link.expect("cluster")
            if said["mode"]:  # Ray reads it when it is loaded; the token itself lies in its own file
                os.environ[AUTH_MODE] = said["mode"]
            self._ray = library("ray")
            self._ray.init(address=said["address"], **options)
            return
        self._ray = library("ray")
        room = max(LEAST, int(ROOM * sum(each.nbytes for each in self._bytes.values())))
        self._ray.init(num_cpus=1, include_dashboard=False, object_store_memory=room, **options)
        cluster = {"address": self._ray.get_runtime_context().gcs_address, "mode": os.environ.get(AUTH_MODE, "")}
        for link in self._links.values():
            link.send({"kind": "cluster", **cluster})

    def close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None
