"""A synchroniser over folders of weights as Hugging Face has them: the kit exports each version, and safetensors reads it.
kit run sync --set implementation=docs.examples.exported_sync:Exported"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import safetensors.torch

from docs.examples.checkpoint_sync import Folders
from kit.engines.hugging import served_config
from kit.labs.sync.lab import trainer_model
from kit.megatron import serve, shards


class Exported(Folders):
    """Folders that engines load. The base is written whole, and each later version exported like the one before."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.made: list[Path] = []

    def sync(self, version: int, *_: Any) -> None:
        folder = self.home / str(version)
        if self.ctx.role == "trainer":
            if self.made:
                with serve.as_world(self.ctx.group):
                    shards.export(self.ctx.chunks, like=self.made[-1], to=folder)
            else:
                self.save(folder)
            self.made.append(folder)
        if self.ctx.rank == 0:
            for old in self.made[:-2]:  # a slow replica may still read the one before
                shutil.rmtree(old, ignore_errors=True)
        self.expand(version)

    def save(self, folder: Path) -> None:
        # Copies: the numpy array of a live tensor would fix the size of its memory.
        tensors = {name: tensor.clone() for name, tensor in self.ctx.full_tensors()}
        if self.ctx.rank == 0:
            partial = folder.with_suffix(".part")
            partial.mkdir()
            (partial / "config.json").write_text(json.dumps(served_config(trainer_model(self.ctx.config).geometry)))
            safetensors.torch.save_file(tensors, partial / "model.safetensors")
            partial.rename(folder)  # complete

    def expand(self, version: int, *_: Any) -> None:
        folder, end = self.home / str(version), time.monotonic() + self.ctx.timeout_s
        if self.ctx.role == "replica":
            while not folder.exists() and time.monotonic() < end:
                time.sleep(0.005)
            self.write(version, safetensors.torch.load_file(folder / "model.safetensors"))
