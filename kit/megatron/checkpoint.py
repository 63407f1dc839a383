"""Weights of a Hugging Face checkpoint folder into a live job of any layout, and out again into a folder like it.

`load` and `export` are collective over the job. A rank that loads reads the bytes of its own shards; an export passes one
parameter at a time to rank 0, which writes. An export straight after a load gives the folder's files byte for byte;
docs/checkpoint.md says when not. Limits: dense Qwen2 with a tied head; every rank must reach the folder that it loads, or
that an export is to be like; a rank 0 that is killed while it exports leaves a hidden `.NAME.PID.partial` beside the target.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.megatron import shards
from kit.megatron.geometry import read_geometry
from kit.train.safetensors import DTYPES, Folder, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Made = TypeVar("Made")
WEIGHTS = ("F32", "BF16", "F16")
BESIDE = (".json", ".txt", ".jinja", ".model")  # config, tokenizer and index; no weights of other formats


def load(chunks: Sequence[Any], folder: str | Path) -> None:
    """Fill the job from a checkpoint folder, or refuse on every rank with nothing changed. Collective.

    Weights take the job's dtype. An optimizer's master copies are the caller's to refresh (`reload_model_params`).
    """
    shards.load_full(chunks, _together(lambda: _fitting(chunks, folder)))


def export(chunks: Sequence[Any], *, like: str | Path, to: str | Path) -> None:
    """Write the job's weights to a new folder: the same files as in `like`, with the same headers, dtypes and order. Collective.

    The folder `to` must be absent or empty. It appears at once, when it is complete.
    """
    source = _together(lambda: _fitting(chunks, like))
    shards.check_full(chunks, source)
    first, target = dist.get_rank() == 0, Path(to)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as files:
        writers: dict[str, Writer] = {}
        if first:
            cleanup.callback(shutil.rmtree, partial, ignore_errors=True)
        _together(lambda: writers.update(_prepared(files, source, target, partial)) if first else None)

        def finish() -> None:
            _receive(shards.full_tensors(chunks), source, writers)
            files.close()  # a file that lacks a tensor says so here
            if first:
                partial.rename(target)

        _together(finish)


def _fitting(chunks: Sequence[Any], folder: str | Path) -> Folder:
    """The folder, opened, if it holds a model like the job's."""
    geometry = read_geometry(folder)
    module = shards.bare(chunks[0])
    config = module.config
    if config.num_moe_experts:
        raise BadInput(f"{folder} has a dense model, and this job has {config.num_moe_experts} experts in a layer")
    job = {
        "hidden": config.hidden_size,
        "layers": config.num_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups,
        "ffn": config.ffn_hidden_size,
        "vocab": module.vocab_size,
        "rope_base": module.rotary_base,
        "qkv_bias": config.add_qkv_bias,
        "norm_eps": config.layernorm_epsilon,
    }
    unlike = [
        f"{name} {getattr(geometry, name)} and the job {has}"
        for name, has in job.items()
        if getattr(geometry, name) != has
    ]
    if unlike:
        raise BadInput(f"{folder} has {', '.join(unlike)}: build the job with its geometry")
    source = Folder(folder)
    for name in source:
        if source.entry(name).dtype not in [DTYPES[each] for each in WEIGHTS]:
            raise BadInput(
                f"{folder} has {name} in {source.entry(name).dtype}: weights are one of {', '.join(WEIGHTS)}"
            )
    return source


def _prepared(files: contextlib.ExitStack, source: Folder, target: Path, partial: Path) -> dict[str, Writer]:
    """The new folder under a name that nobody looks for, with all but the weights in it; the file of each tensor."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} is there and not empty: an export goes to a new folder")
    partial.mkdir(parents=True)
    for path in source.path.iterdir():
        if path.suffix in BESIDE and path.is_file():
            shutil.copyfile(path, partial / path.name)
    writers: dict[str, Writer] = {}
    for file in source.files:
        writers |= dict.fromkeys(file, files.enter_context(Writer(partial / file.path.name, file.header)))
    return writers


def _receive(arriving: Iterator[tuple[str, torch.Tensor]], source: Folder, writers: Mapping[str, Writer]) -> None:
    """Write all that arrives, in the folder's dtypes. After an error the rest is still taken in: its senders wait."""
    failed: OSError | KitError | None = None
    for name, value in arriving:
        try:
            if failed is None:
                # A copy: the writer's numpy() would mark a live storage as never to be resized again.
                writers[name].put(name, value.to(source.entry(name).dtype, copy=True))
        except (OSError, KitError) as error:
            failed = error
    if failed is not None:
        raise failed


def _together(work: Callable[[], Made]) -> Made:
    """What the work gives on this rank if it went well on all of them; else every rank raises the same sentence. Collective."""
    made: list[Made] = []
    error: KitError | None = None
    try:
        made.append(work())
    except KitError as refused:
        error = refused
    except OSError as failed:
        error = KitError(str(failed))
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, each in enumerate(errors):
        if each is not None:
            where = f"rank {rank}: " if len({str(other) for other in errors}) > 1 else ""
            raise type(each)(f"{where}{each}")
    return made[0]
