"""What others do to bring weights: through files, written whole by the sender, read and copied by receivers, which lie in memory where
there is room.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import KitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kit.sync.link import Link

    Tensors = Mapping[tuple[str, int], torch.Tensor]
    Named = dict[str, torch.Tensor]

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - the place itself is what is measured
SPARE = 1.25  # a checkpoint is a little more than its tensors


def write_library(folder: Path, tensors: Named) -> None:
    library("safetensors.torch").save_file(tensors, folder / "model.safetensors")


def read_library(folder: Path, into: Named) -> None:
    with library("safetensors").safe_open(folder / "model.safetensors", framework="pt") as file:
        for name, tensor in into.items():
            tensor.copy_(file.get_tensor(name))


def write_dcp(folder: Path, tensors: Named) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it works alone, which was asked for
        library("torch.distributed.checkpoint").save(tensors, checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path, into: Named) -> None:
    with warnings.catch_warnings(action="ignore"):
        library("torch.distributed.checkpoint").load(into, checkpoint_id=folder, no_dist=True)


def library(name: str) -> Any:
    """What need not be installed, or is slow to load, or carries no types."""
    return import_module(name)


WAYS: dict[str, tuple[Callable[[Path, Named], None], Callable[[Path, Named], None]]] = {
    "safetensors": (write_library, read_library),
    "dcp": (write_dcp, read_dcp),
}


def missing(package: str) -> str:
    """Why a peer cannot be measured; empty where it can."""
    return "" if find_spec(package) else "not installed"


def place_for(size: int) -> Path | None:
    """Where so many bytes have room in memory; None where they do not, and go to the folder for temporary files."""
    return IN_MEMORY if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > SPARE * size else None


@contextmanager
def folder_for(size: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kit-bench-", dir=place_for(size)) as made:
        yield Path(made)


def bring(way: tuple[Any, Any], tensors: Tensors, links: Mapping[str, Link], *, sends: bool) -> None:
    """One sync: the sender's file lives until every receiver has read it."""
    write, read = way
    named = {name: tensor for (name, _), tensor in tensors.items()}
    if not sends:
        (link,) = links.values()
        read(Path(link.expect("written")[0]["folder"]), named)
        link.send({"kind": "read"})
        return
    size = sum(tensor.nbytes for tensor in named.values())
    if not size:
        raise KitError("there are no weights to write")
    with folder_for(size) as folder:
        write(folder, named)
        for link in links.values():
            link.send({"kind": "written", "folder": str(folder)})
        for link in links.values():
            link.expect("read")
