"""Files of the safetensors format, read and written with torch alone, and folders of them with their index.

A file is eight bytes with the length of the header, the header (JSON: type, shape and place of each tensor), and the bytes of the tensors
without a hole. `File` maps a file into memory and checks all of its header first: a tensor costs nothing until its bytes are used.
`Folder` reads the files of a checkpoint as one. `write` gives the bytes that the format's own library gives, for metadata of at most one
entry (of more, the library leaves the order to chance). `Writer` fills a file in any order, under a header that may be another
file's. Limits: little-endian machines; a file that is cut short while it is mapped ends the process that reads there; a map stays open
while a tensor of it lives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from kit.errors import BadInput, KitError

if TYPE_CHECKING:
    from types import TracebackType

# Every type that both the format and torch have, in the order in which files are laid out: the widest first.
DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.float4_e2m1fn_x2,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAIRED = torch.float4_e2m1fn_x2  # torch counts pairs, the format single values
METADATA = "__metadata__"
FIELDS = {"dtype", "shape", "data_offsets"}
LENGTH = struct.Struct("<Q")
LONGEST_HEADER = 100_000_000  # the format's own limit
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Entry(NamedTuple):
    """A tensor of a file, in torch's words, and where its bytes begin and end behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """`raw` is how the file begins, the eight bytes of the length too; `entries` are in the order of their bytes."""

    raw: bytes
    entries: dict[str, Entry]
    metadata: dict[str, str]

    @property
    def file_bytes(self) -> int:
        return len(self.raw) + max((entry.end for entry in self.entries.values()), default=0)


class File(Mapping[str, torch.Tensor]):
    """A file's tensors by name, in the order of their bytes. They lie in a private map: writing into one reaches no file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.header = _read_header(file.read, size, self.path)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {error.strerror}") from None

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape, start, end = self.header.entries[name]
        if start == end:
            return torch.empty(shape, dtype=dtype)
        place = len(self.header.raw) + start
        found = torch.frombuffer(self._map, dtype=torch.uint8, count=end - start, offset=place)
        if place % dtype.itemsize:  # files of some writers; torch reads numbers at their own multiples only
            found = found.clone()
        return found.view(dtype).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.entries)

    def __len__(self) -> int:
        return len(self.header.entries)


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint folder: of model.safetensors, or of the files that model.safetensors.index.json lists."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        single, index = self.path / SINGLE, self.path / INDEX
        if single.exists() == index.exists():
            have = "both" if single.exists() else "neither"
            raise BadInput(f"{self.path} has {have} of {SINGLE} and {INDEX}: a checkpoint folder has one of them")
        if single.exists():
            self.files = [File(single)]
            self._home = dict.fromkeys(self.files[0], self.files[0])
            return
        listed = _read_index(index)
        self.files = []
        self._home = {}
        for name in sorted(set(listed.values())):
            if not (self.path / name).is_file():
                raise BadInput(f"{self.path} is not complete: {INDEX} lists {name}, which is missing")
            file = File(self.path / name)
            wrong = {tensor for tensor, home in listed.items() if home == name} ^ file.keys()
            if wrong:
                raise BadInput(f"{index} is damaged: it and {name} do not agree about {min(wrong)}")
            self.files.append(file)
            self._home |= dict.fromkeys(file, file)

    def entry(self, name: str) -> Entry:
        return self._home[name].header.entries[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._home[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


class Writer:
    """A file that is filled tensor by tensor, in any order; leaving the context without an error asks that none was left out."""

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = Path(path)
        self.header = header
        self.left = set(header.entries)
        self._file = self.path.open("xb")
        try:
            os.posix_fallocate(self._file.fileno(), 0, header.file_bytes)  # a full disk says so now
            self._file.write(header.raw)
        except OSError as error:
            self._file.close()
            raise KitError(f"{self.path} cannot be written: {error.strerror}") from None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        entry = self.header.entries[name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise BadInput(
                f"{name} is {tuple(tensor.shape)} of {tensor.dtype} and must be {entry.shape} of {entry.dtype} in {self.path}"
            )
        self._file.seek(len(self.header.raw) + entry.start)
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            self._file.write(raw.numpy().data)
        self.left.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self.left:
            raise KitError(f"{self.path} is not complete: {min(self.left)} was never written")


def write(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A file of these tensors, which must not be there yet."""
    header = make_header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, metadata)
    try:
        with Writer(path, header) as writer:
            for name in header.entries:
                writer.put(name, tensors[name])
    except FileExistsError:
        raise BadInput(f"{path} exists already: use another name") from None
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> Header:
    """The header of a new file: wide types first, then by name, padded so that the tensors' bytes begin at a multiple of eight."""
    order = {dtype: place for place, dtype in enumerate(DTYPES.values())}
    for name, (dtype, shape) in tensors.items():
        if dtype not in NAMES or (dtype == PAIRED and not shape):
            raise BadInput(f"{name} is {shape} of {dtype}, which the format does not have: it has {', '.join(DTYPES)}")
        if name == METADATA:
            raise BadInput(f"a tensor cannot be named {METADATA}: the format reserves that name")
    text: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    entries, start = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (order[item[1][0]], item[0])):
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(dtype, shape, start, end)
        said = [*shape[:-1], shape[-1] * 2] if dtype == PAIRED else list(shape)
        text[name] = {"dtype": NAMES[dtype], "shape": said, "data_offsets": [start, end]}
        start = end
    body = json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % LENGTH.size)
    return Header(LENGTH.pack(len(body)) + body, entries, dict(metadata or {}))


def _read_header(read: Any, size: int, path: Path) -> Header:
    def damaged(why: str) -> BadInput:
        return BadInput(f"{path} is damaged: {why}")

    first = read(LENGTH.size)
    if len(first) < LENGTH.size:
        raise damaged(f"it has {size} bytes, and a safetensors file has at least {LENGTH.size}")
    (length,) = LENGTH.unpack(first)
    if length > min(size - LENGTH.size, LONGEST_HEADER):
        raise damaged(f"its header would be {length} bytes long, in a file of {size}")
    body = read(length)
    try:
        text = json.loads(body.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        twice = f": {error}" if isinstance(error, _TwiceError) else ""
        raise damaged(f"its header is not a JSON object{twice}") from None
    metadata = text.pop(METADATA, {}) if isinstance(text, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(f"its header is not a JSON object with strings in {METADATA}")
    entries = {}
    for name, said in text.items():
        try:
            entries[name] = _entry(said)
        except ValueError as error:
            raise damaged(f"{name} {error}") from None
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = 0
    for (before, _), (name, entry) in itertools.pairwise([("the header", None), *entries.items()]):
        if entry is not None and entry.start != end:
            what = "overlaps with" if entry.start < end else "leaves a hole behind"
            raise damaged(f"{name} begins at byte {entry.start} and {what} {before}, which ends at {end}")
        end = entry.end if entry is not None else end
    if size != LENGTH.size + length + end:
        raise damaged(f"it has {size} bytes, and by its header {LENGTH.size + length + end}")
    return Header(first + body, entries, metadata)


def _entry(said: Any) -> Entry:
    """A tensor by the header's words; `ValueError` with the rest of a sentence where they make none."""
    if not isinstance(said, dict) or said.keys() != FIELDS:
        raise ValueError("must have dtype, shape and data_offsets, and nothing else")
    kind, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"has the type {json.dumps(kind)}, which is not one of {', '.join(DTYPES)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("has a shape or data_offsets that are not a list of whole numbers")
    dtype = DTYPES[kind]
    if dtype == PAIRED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"is {tuple(shape)} of {kind}, which makes no whole bytes in a row")
        shape = [*shape[:-1], shape[-1] // 2]
    wanted = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != wanted:
        raise ValueError(f"has data_offsets {offsets}, and {tuple(said['shape'])} of {kind} are {wanted} bytes")
    return Entry(dtype, tuple(shape), *offsets)


def _read_index(path: Path) -> dict[str, str]:
    listed = None
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        listed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()) or not listed:
        raise BadInput(f"{path} is damaged: it has no weight_map of tensors to files")
    for name in listed.values():
        if Path(name).name != name:
            raise BadInput(f"{path} is damaged: {json.dumps(name)} is not the name of a file beside it")
    return listed


class _TwiceError(ValueError):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _TwiceError("a name appears twice")
    return made
