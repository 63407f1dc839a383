"""Generate docs/api.md, the reference of World, Recorder and every lab's settings: `python -m docs.api`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.labs.definition import NAMES, Field, LabConfig, fields, holder, nested_fields
from kit.labs.discover import tagged
from kit.measure import Recorder
from kit.public import World
from kit.world.calls import Pending, wait

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Reference of the Python interface and the settings

`python -m docs.api` generates this page from the code. Edit the docstrings, not the page."""
# Public for other modules of the kit, not for users.
INTERNAL = {"share_lock", "launch", "prepare", "ready", "die", "advance"}


def text() -> str:
    common = [field.name for field in fields(LabConfig)]
    parts = [
        HEAD,
        *described(World),
        *described(Pending),
        "### `kit.wait`",
        *member("kit.wait", wait),
        *described(Recorder),
    ]
    parts += ["## Settings of every lab", settings(LabConfig, set())]
    for name, lab in sorted(tagged().items()):
        parts += [
            f"## Settings of {name}",
            f"`kit run {name} --set name=value`: {lab.summary}.",
            settings(lab.config, set(common)),
        ]
        if (held := holder(lab.config)) is not None:
            parts += [
                f"`a.NAME`, `b.NAME`, ...: {held.option.help}. `NAME` alone sets it for all of them.",
                nested(lab.config),
            ]
    return "\n\n".join(parts) + "\n"


def described(kind: type[Any]) -> Iterator[str]:
    """Describe a class: its constructor, then its public members in the order of the code."""
    yield f"## `{kind.__name__}`"
    yield from member(kind.__name__, kind)
    names = [name for base in reversed(kind.__mro__) for name in vars(base) if base.__module__.startswith("kit.")]
    for name in dict.fromkeys(names):
        one = inspect.getattr_static(kind, name)
        if name.startswith("_") or name in INTERNAL or not inspect.getdoc(one):
            continue
        if isinstance(one, property):
            yield f"**`.{name}`**: {prose(one)}"
        elif inspect.isfunction(one):
            yield from member(f".{name}", one)


def member(name: str, one: Any) -> Iterator[str]:
    """Describe a member by signature and docstring."""
    words, star = [], False
    for part in inspect.signature(one).parameters.values():
        if part.name == "self":
            continue
        if part.kind is part.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or part.kind in (part.KEYWORD_ONLY, part.VAR_POSITIONAL)
        mark = {part.VAR_POSITIONAL: "*", part.VAR_KEYWORD: "**"}.get(part.kind, "")
        default = "" if part.default is part.empty else f" = {part.default!r}"
        words.append(f"{mark}{part.name}: {part.annotation}{default}")
    yield f"```python\n{name}({', '.join(words)})\n```"
    yield prose(one)


def prose(one: Any) -> str:
    return inspect.getdoc(one) or ""


def settings(config: type[LabConfig], without: set[str]) -> str:
    return table([field for field in fields(config) if field.name not in without])


def nested(config: type[LabConfig]) -> str:
    return table(nested_fields(config, NAMES[0]))


def table(listed: list[Field]) -> str:
    rows = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for field in listed:
        unit = f" [{field.option.unit}]" if field.option.unit else ""
        cells = (f"`{field.name}`", f"`{field.default!r}`", field.allowed(), f"{field.option.help}{unit}")
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(text())
