"""Load code that is named as `module:attr`, here and on ranks; find the kit's own files. Standard library only."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

OWN_CODE = re.compile(r"(?!kit[.:])[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # module:attr from outside the kit


KIT = Path(__file__).resolve().parent
IMPORTING = [
    Path(importlib.__file__),
    *(Path(f"<frozen importlib.{name}>") for name in ("_bootstrap", "_bootstrap_external")),
]
LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def raised_in_words(error: BaseException) -> str:
    """An error in one line, with the line of own code that raised it; without one, that of the library."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:  # raised by the import, about this line
        frames.append((Path(error.filename), error.lineno))
    outside = [place for place in frames if not place[0].is_relative_to(KIT) and place[0] not in IMPORTING]
    own = [place for place in outside if not any(place[0].is_relative_to(library) for library in LIBRARIES)]
    where = "".join(f" ({file.name}, line {line})" for file, line in (own or outside)[-1:])
    message = error.msg if isinstance(error, SyntaxError) else str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def is_target(text: object) -> bool:
    module, colon, attribute = text.partition(":") if isinstance(text, str) else ("", "", "")
    return bool(module and colon and attribute)


def from_outside(text: object) -> bool:
    """Whether this names code from outside the kit."""
    return isinstance(text, str) and OWN_CODE.fullmatch(text) is not None


def load(target: str) -> Any:
    """Return the object that `module:attr` or `module:attr.attr` names."""
    module, _, attributes = target.partition(":")
    found: Any = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def load_callable(target: str) -> Callable[..., Any]:
    found = load(target)
    if not callable(found):
        raise TypeError(f"{target} is not callable")
    call: Callable[..., Any] = found
    return call


def refusal(target: str) -> str:
    """Why code cannot be loaded; empty if it can."""
    try:
        load_callable(target)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a person's module may raise anything, or be a script that ends itself
        return raised_in_words(error)
    return ""


@contextmanager
def replaced(patch: Mapping[str, object]) -> Iterator[None]:
    """Replace what each `module:attr` names by what its value names; as it was afterwards. All replacements are loaded before the first is
    put in place, so a module of them can bind the originals when it is imported. A value that is no text replaces it itself."""
    loaded = [(*owner_of(place), load(wrong) if isinstance(wrong, str) else wrong) for place, wrong in patch.items()]
    with ExitStack() as undo:
        for owner, name, wrong in loaded:
            absent = name not in vars(owner)  # inherited: the override goes away again
            before = vars(owner).get(name)
            setattr(owner, name, wrong)
            undo.callback(delattr, owner, name) if absent else undo.callback(setattr, owner, name, before)
        yield


def owner_of(target: str) -> tuple[Any, str]:
    """The module or class that holds what `module:attr` names, and its name there."""
    module, _, attributes = target.partition(":")
    *outer, name = attributes.split(".")
    owner = load(f"{module}:{'.'.join(outer)}") if outer else import_module(module)
    getattr(owner, name)  # a place that is gone is an error, not a new attribute
    return owner, name


# -- the kit's own version and files: ranks of another environment reach the kit by its path ---------------------------


def kit_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow enough to notice in `kit --help`

    try:
        return version("lifecycle-kit")
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        line = re.search(r'^version = "(.+)"$', project.read_text(), re.MULTILINE) if project.exists() else None
        return line[1] if line else "0+unknown"


def shipped(name: str) -> Path:
    """Return the folder `notebooks`, `docs` or `data`: beside the code in a checkout, otherwise where a wheel put it."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout / name
    from importlib.metadata import PackageNotFoundError, files

    try:
        known = files("lifecycle-kit") or []
    except PackageNotFoundError:
        known = []
    readme = [Path(str(file.locate())) for file in known if file.as_posix().endswith("share/lifecycle-kit/README.md")]
    home = readme[0].resolve().parent if readme else Path(sys.prefix) / "share" / "lifecycle-kit"
    return home / name
