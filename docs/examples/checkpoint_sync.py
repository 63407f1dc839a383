"""A synchroniser over torch.distributed.checkpoint: every version is a folder that the trainer writes and replicas read.
kit run sync --set implementation=docs.examples.checkpoint_sync:Folders"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint


class Folders:
    """Of torch.distributed.checkpoint. The last two stay: a slow replica may still read the one before.
    They do not wait for each other, so one may fail alone: there is no `retries`."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        name = [tempfile.mkdtemp(prefix="versions-")] if ctx.rank == 0 else [""]
        dist.broadcast_object_list(name, src=0)
        self.home = Path(name[0])

    def sync(self, version: int, *_: Any) -> None:
        tensors = dict(self.ctx.full_tensors()) if self.ctx.role == "trainer" else {}
        if self.ctx.rank == 0:
            for old in sorted(self.home.iterdir(), key=lambda folder: int(folder.name))[:-1]:
                shutil.rmtree(old)
            checkpoint.save(tensors, checkpoint_id=self.home / f"{version}.part", no_dist=True)
            (self.home / f"{version}.part").rename(self.home / str(version))  # complete
        self.expand(version)

    def expand(self, version: int, *_: Any) -> None:
        folder, end = self.home / str(version), time.monotonic() + self.ctx.timeout_s
        if self.ctx.role == "replica":
            while not folder.exists() and time.monotonic() < end:
                time.sleep(0.005)
            about = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
            tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in about.items()}
            checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
            self.write(version, tensors)

    def write(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        with self.ctx.writing():
            for name, tensor in tensors.items():
                self.ctx.load(name, tensor)
            self.ctx.publish(version)

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


class FoldersThatArePublishedFirst(Folders):
    """The label says the new version before the first tensor is written."""

    def write(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        self.ctx.publish(version)
        super().write(version, tensors)
