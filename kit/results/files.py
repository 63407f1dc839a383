"""Files that are either complete or absent: a temporary beside the target, then a rename. And strict JSON.

JSON has no NaN and no infinity, so such numbers are written as the words "NaN", "Infinity" and "-Infinity" (Python's
float() and JavaScript's Number() both read them back); null is kept for "there is no value".
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput, KitError
from kit.results.records import finite, spell, without_escapes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ROOM = f"{' ' * 512}\n"


def spelled(value: Any) -> Any:
    if isinstance(value, float):
        return spell(value)
    if isinstance(value, Mapping):
        return {key: spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spelled(item) for item in value]
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(spelled(value), ensure_ascii=False, allow_nan=False, indent=indent)


def make_folder(folder: Path) -> None:
    """The one rule for missing folders, wherever a person names a file or a folder: they are made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {folder}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it is renamed to `path` when the block succeeds, and removed when it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        try:
            yield temporary
            temporary.replace(path)
        except OSError as error:
            raise KitError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # already renamed, or the folder itself is out of reach: nothing to remove
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(
        path
    ) as temporary:  # half a character, as in an odd file name, is spelled out, which JSON reads back
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=1) + "\n")


def rewrite_json(path: Path, value: Any) -> None:
    """Replace a file, and leave some room in it: on a full disk or in a read-only folder the new text is written over the old."""
    try:
        write_text(path, to_json(value, indent=1) + ROOM)
    except KitError:
        data = to_json(value).encode(errors="backslashreplace")
        if not path.is_file() or len(data) > path.stat().st_size:
            raise
        with path.open("r+b", buffering=0) as file:
            file.write(data.ljust(path.stat().st_size))


def read_json(path: Path) -> Any:
    """The file's JSON; a file that is missing or damaged is a `BadInput` that names it."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise BadInput(f"{path} is damaged: its brackets are nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"{path} is damaged: it is not valid JSON ({error})") from error


def loads(text: str) -> Any:
    """JSON in which every number fits into a float; its texts come without what a terminal would obey."""
    return without_escapes(json.loads(text, parse_float=finite, parse_int=_whole), text)


def _whole(digits: str) -> int:
    finite(digits)
    return int(digits)
