"""A reference as one file, for a box from which little can be copied."""

from __future__ import annotations

import io
import tarfile
import zlib
from typing import TYPE_CHECKING

from kit.results.files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST = 16 * 2**20
KEPT_FREE = 2**16  # for headers and the list of what is left out
LEFT_OUT = "LEFT-OUT.txt"


def pack(folder: Path, to: Path, *, most: int = MOST) -> list[str]:
    """Write as much of the folder as fits into a .tgz, the most telling files first; gives the names of what did not fit."""
    room, left = most - KEPT_FREE, []
    with replacing(to) as temporary, tarfile.open(temporary, "w:gz") as tar:
        for path in in_order(folder):
            size = len(zlib.compress(path.read_bytes())) + 1024
            name = str(path.relative_to(folder))
            if size > room:
                left.append(name)
                continue
            room -= size
            tar.add(path, f"{folder.name}/{name}")
        if left:
            text = "\n".join(left).encode()[: KEPT_FREE // 2]
            entry = tarfile.TarInfo(f"{folder.name}/{LEFT_OUT}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    return left


def in_order(folder: Path) -> Iterator[Path]:
    """The page, numbers, tables, light pictures, the rest; then the runs, verdicts before records."""
    ranks = {".md": 0, ".json": 1, ".jsonl": 2, ".txt": 2}

    def order(path: Path) -> tuple[bool, int, int, str]:
        in_runs = path.relative_to(folder).parts[0] == "runs"
        dark = path.stem.endswith("-dark")
        return in_runs, ranks.get(path.suffix, 3) + dark, path.stat().st_size if in_runs else 0, str(path)

    yield from sorted((path for path in folder.rglob("*") if path.is_file()), key=order)
