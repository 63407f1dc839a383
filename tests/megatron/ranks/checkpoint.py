"""Functions that test_checkpoint.py calls: each runs on all ranks and returns JSON."""

from __future__ import annotations

import resource
from typing import Any

import torch
import torch.distributed as dist

from kit.megatron import model, ownership, shards
from kit.megatron.config import ModelConfig, read_geometry
from tests.megatron.ranks.common import attempt
from tests.megatron.ranks.shards import _logits, unequal


def job(folder: str, **settings: Any) -> model.Training:
    return model.build(ModelConfig(size=read_geometry(folder), seq=16, microbatches=1, **settings))


def there_and_back(folder: str, to: str, **settings: Any) -> list[str]:
    """Load and export a folder. Return the names of merged tensors that differ in any bit from the folder's in the job's dtype."""
    with ownership.as_found():
        made = job(folder, **settings)
        shards.load(made.chunks, folder)
        shards.export(made.chunks, like=folder, to=to)
        dtype = model.DTYPES[made.config.dtype]
        return unequal(
            {name: value.view(torch.uint8) for name, value in shards.merge(made.chunks).items()},
            {name: value.to(dtype).view(torch.uint8) for name, value in shards.Folder(folder).items()},
        )


def released(folder: str, to: str, **settings: Any) -> str:
    """Export, then release; return the error text of the release (empty if there is none)."""
    with ownership.as_found():
        made = job(folder, **settings)
        shards.export(made.chunks, like=folder, to=to)
        message = attempt(made.mover.release)
        made.mover.close()
        return message


def changed(folder: str, to: str, name: str, **settings: Any) -> None:
    """Load a folder, add 1 to the named weight, and export."""
    with ownership.as_found():
        made = job(folder, **settings)
        shards.load(made.chunks, folder)
        full = shards.merge(made.chunks)
        shards.load_full(made.chunks, full | {name: full[name] + 1})
        shards.export(made.chunks, like=folder, to=to)


def logits(folder: str, tokens: str, out: str, **settings: Any) -> None:
    """Load a folder, run the tokens from a file and save the logits to another file."""
    with ownership.as_found():
        made = job(folder, **settings)
        shards.load(made.chunks, folder)
        found = _logits(made, torch.load(tokens))
    if dist.get_rank() == 0:
        torch.save(found[0], out)


def refused(folder: str, others: list[str], to: str, limit: int = 0, **settings: Any) -> dict[str, Any]:
    """Return the errors of a load from this rank's entry in `others` and of an export like it, and the tensors that they changed."""
    with ownership.as_found():
        made = job(folder, **settings)
        shards.load(made.chunks, folder)
        before = shards.merge(made.chunks)
        other = others[dist.get_rank() % len(others)]
        loaded = attempt(lambda: shards.load(made.chunks, other))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit and dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        exported = attempt(lambda: shards.export(made.chunks, like=other, to=to))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return {"load": loaded, "export": exported, "changed": unequal(shards.merge(made.chunks), before)}
