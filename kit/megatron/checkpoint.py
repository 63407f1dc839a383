"""Weights of a Hugging Face checkpoint folder into a live job of any layout, and out again into a folder like it.

`load` and `export` are collective over the job. A rank that loads reads the bytes of its own shards; an export passes one
parameter at a time to rank 0, which writes. An export straight after a load gives the folder's files byte for byte;
docs/checkpoint.md says when not. The package safetensors reads and checks the files. Limits: dense Qwen2 with a tied head; every rank
must reach the folder that it loads, or that an export is to be like; a rank 0 that is killed while it exports leaves a hidden
`.NAME.PID.partial` beside the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.megatron import shards
from kit.megatron.config import read_geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Made = TypeVar("Made")
WEIGHTS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH_BYTES = 8  # of the header, at the beginning of a file
BESIDE = (".json", ".txt", ".jinja", ".model")  # config, tokenizer and index; no weights of other formats


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint folder: of model.safetensors, or of the files that model.safetensors.index.json lists. Only the bytes of
    tensors that are asked for are read."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        single, index = self.path / SINGLE, self.path / INDEX
        if single.exists() == index.exists():
            have = "both" if single.exists() else "neither"
            raise BadInput(f"{self.path} has {have} of {SINGLE} and {INDEX}: a checkpoint folder has one of them")
        listed = {} if single.exists() else _read_index(index)
        self.files = {name: _opened(self.path / name) for name in sorted(set(listed.values()) or {SINGLE})}
        # The file that each tensor is in.
        self.home = {tensor: name for name, file in self.files.items() for tensor in file.keys()}  # noqa: SIM118
        if listed and (unlike := sorted(name for name, _ in listed.items() ^ self.home.items())):
            raise BadInput(f"{index} is damaged: it and the files beside it do not agree about {unlike[0]}")

    def kind(self, name: str) -> str:
        """The format's name of a tensor's dtype."""
        return str(self.files[self.home[name]].get_slice(name).get_dtype())

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.files[self.home[name]].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.home)

    def __len__(self) -> int:
        return len(self.home)


def _read_index(path: Path) -> dict[str, str]:
    listed = None
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        listed = json.loads(path.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise BadInput(f"{path} is damaged: it has no weight_map of tensors to files")
    for name in sorted(set(listed.values())):
        if Path(name).name != name:
            raise BadInput(f"{path} is damaged: {json.dumps(name)} is not the name of a file beside it")
        if not (path.parent / name).is_file():
            raise BadInput(f"{path.parent} is not complete: {INDEX} lists {name}, which is missing")
    return listed


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise BadInput(
            f"{path} cannot be read: the ranks' Python lacks the package safetensors. Install it there: pip install safetensors"
        ) from None
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise BadInput(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None


class Writer:
    """A copy of a file's header, and room for its tensors, which come in any order; leaving the context without an error asks that none
    was left out."""

    def __init__(self, path: Path, like: Path) -> None:
        self.path = path
        with like.open("rb") as file:
            first = file.read(LENGTH_BYTES)
            raw = first + file.read(int.from_bytes(first, "little"))
        places = json.loads(raw[LENGTH_BYTES:])
        places.pop("__metadata__", None)
        self.left = {name: len(raw) + entry["data_offsets"][0] for name, entry in places.items()}
        self._file = path.open("xb")
        try:
            os.posix_fallocate(self._file.fileno(), 0, like.stat().st_size)  # a full disk says so now
            self._file.write(raw)
        except OSError as error:
            self._file.close()
            raise KitError(f"{path} cannot be written: {error.strerror}") from None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._file.seek(self.left.pop(name))
        if tensor.numel():
            self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if kind is None and self.left:
            raise KitError(f"{self.path} is not complete: {min(self.left)} was never written")


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
    theirs = dataclasses.asdict(geometry)
    if unlike := [f"{name} {theirs[name]} and the job {has}" for name, has in job.items() if theirs[name] != has]:
        raise BadInput(f"{folder} has {', '.join(unlike)}: build the job with its geometry")
    source = Folder(folder)
    for name in source:
        if source.kind(name) not in WEIGHTS:
            raise BadInput(f"{folder} has {name} in {source.kind(name)}: weights are one of {', '.join(WEIGHTS)}")
    return source


def _prepared(files: contextlib.ExitStack, source: Folder, target: Path, partial: Path) -> dict[str, Writer]:
    """The new folder under a name that nobody looks for, with all but the weights in it; the file of each tensor."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} is there and not empty: an export goes to a new folder")
    partial.mkdir(parents=True)
    for path in source.path.iterdir():
        if path.suffix in BESIDE and path.is_file():
            shutil.copyfile(path, partial / path.name)
    writers = {name: files.enter_context(Writer(partial / name, source.path / name)) for name in source.files}
    return {name: writers[source.home[name]] for name in source}


def _receive(arriving: Iterator[tuple[str, torch.Tensor]], source: Folder, writers: Mapping[str, Writer]) -> None:
    """Write all that arrives, in the folder's dtypes. After an error the rest is still taken in: its senders wait."""
    failed: OSError | KitError | None = None
    for name, value in arriving:
        try:
            if failed is None:
                # A copy: the writer's numpy() would mark a live storage as never to be resized again.
                writers[name].put(name, value.to(WEIGHTS[source.kind(name)], copy=True))
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
