"""A synchroniser over checkpoints: every version is a folder that the trainer writes and replicas read.
kit run sync --set implementation=docs.examples.checkpoint_sync:Folders"""

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from kit.engines.hugging import served_config
from kit.labs.sync.lab import trainer_model
from kit.megatron import serve, shards

Tensors = dict[str, torch.Tensor]


class Folders:
    """Of torch.distributed.checkpoint. The last two stay: a slow replica may still read the one before.
    They do not wait for each other, so one may fail alone: there is no `retries`."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        name = [tempfile.mkdtemp(prefix="versions-")] if ctx.rank == 0 else [""]
        dist.broadcast_object_list(name, src=0)
        self.home = Path(name[0])

    def sync(self, version: int, *_: Any) -> None:
        if self.ctx.role == "trainer":
            self.make(self.home / str(version))
        self.expand(version)
        if self.ctx.rank == 0:
            for old in self.versions()[:-2]:
                shutil.rmtree(old)

    def versions(self) -> list[Path]:
        return sorted(self.home.iterdir(), key=lambda folder: int(folder.name))

    def make(self, folder: Path) -> None:
        tensors = dict(self.ctx.full_tensors())
        if self.ctx.rank == 0:
            partial = folder.with_suffix(".part")
            self.save(tensors, partial)
            partial.rename(folder)  # complete

    def save(self, tensors: Tensors, folder: Path) -> None:
        checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)

    def read(self, folder: Path) -> Tensors:
        about = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in about.items()}
        checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
        return tensors

    def expand(self, version: int, *_: Any) -> None:
        folder, end = self.home / str(version), time.monotonic() + self.ctx.timeout_s
        if self.ctx.role == "replica":
            while not folder.exists() and time.monotonic() < end:
                time.sleep(0.005)
            self.write(version, self.read(folder))

    def write(self, version: int, tensors: Tensors) -> None:
        with self.ctx.writing():
            for name, tensor in tensors.items():
                self.ctx.load(name, tensor)
            self.ctx.publish(version)

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


class FoldersThatArePublishedFirst(Folders):
    """The label says the new version before the first tensor is written."""

    def write(self, version: int, tensors: Tensors) -> None:
        self.ctx.publish(version)
        super().write(version, tensors)


class Exported(Folders):
    """Hugging Face folders, which engines load: the kit exports each like the one before, and safetensors reads it."""

    def make(self, folder: Path) -> None:
        if not self.versions():
            super().make(folder)
            return
        with serve.as_world(self.ctx.group):
            shards.export(self.ctx.chunks, like=self.versions()[-1], to=folder)

    def save(self, tensors: Tensors, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(served_config(trainer_model(self.ctx.config).geometry)))
        # Copies: the numpy array of a live tensor would fix the size of its memory.
        safetensors.torch.save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )

    def read(self, folder: Path) -> Tensors:
        return safetensors.torch.load_file(folder / "model.safetensors")
