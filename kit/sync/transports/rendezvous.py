"""Over a process group that lives for one sync, for a sender and receivers of different Worlds: they meet at a fresh store."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kit.sync.transports.groups import Grouped


class Rendezvous(Grouped):
    """The sender keeps the store. `host` of the config is where receivers reach it. torch's registry does not know the group."""

    store: Any = None

    def offer(self) -> dict[str, Any]:
        host = self.ctx.config.get("host", "127.0.0.1")
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.wait)
        return {"host": host, "port": self.store.port}

    def join(self, offer: dict[str, Any]) -> None:
        if self.store is None:
            self.store = TCPStore(
                offer["host"], offer["port"], is_master=False, wait_for_workers=False, timeout=self.wait
            )
        made: Any = dist.ProcessGroupNCCL if self.ctx.device.type == "cuda" else dist.ProcessGroupGloo
        self.group = made(PrefixStore(offer["name"], self.store), self.ctx.place, offer["size"], self.wait)

    def leave(self, group: Any) -> None:
        group.shutdown()

    def close(self) -> None:
        super().close()
        self.store = None
