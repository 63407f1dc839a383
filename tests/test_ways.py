"""The path of a setting and of a record through the kit's modules, observed with Python's profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd
import pytest

import kit
from kit.cli import main
from kit.results import Row

ROOM = f"{Path(kit.__file__).parent}/"
SIZE = 977  # a number that occurs nowhere else in a run
# Not seen by this process's profiler: code on the ranks, and messages that the crew decodes as they arrive.
UNSEEN = {
    "measure/phase.py",
    "labs/rankside.py",
    "results/records.py",
    "world/rankside.py",
    "world/channel.py",
    "world/crew.py",
}
# Besides the path to a plot, the verdict is made, and it is read which memory source is drawn.
BESIDE = {"results/verdict.py", "results/frames.py"}


@contextlib.contextmanager
def entered(carries: Callable[[Any], bool], moment: str = "call", until: str = "") -> Iterator[list[str]]:
    """Record each call from another module with an argument for which `carries` holds; at "return", each call that ever held one.

    Recording stops at the call `until`.
    """
    seen: list[str] = []

    def module(frame: FrameType | None) -> str:
        while frame is not None and not frame.f_code.co_filename.startswith(ROOM):
            frame = frame.f_back
        return "" if frame is None else frame.f_code.co_filename.removeprefix(ROOM)

    def look(frame: FrameType, event: str, _: object) -> None:
        if event != moment or not frame.f_code.co_filename.startswith(ROOM):
            return
        here = module(frame)
        inside = moment == "return"
        if (inside or here != module(frame.f_back)) and any(map(carries, list(frame.f_locals.values()))):
            seen.append(here)
            if f"{here}:{frame.f_code.co_name}" == until:
                sys.setprofile(None)

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def has_setting(value: Any, deep: int = 0) -> bool:
    if type(value) is int:
        return value == SIZE
    if isinstance(value, str):
        return str(SIZE) in value
    if deep > 4:
        return False
    if isinstance(value, dict | list | tuple):
        return any(has_setting(one, deep + 1) for one in (value.values() if isinstance(value, dict) else value))
    if dataclasses.is_dataclass(value):
        return any(has_setting(getattr(value, field.name, None), deep + 1) for field in dataclasses.fields(value))
    return type(value).__module__.startswith("kit.labs") and has_setting(vars(value), deep + 1)


def has_record(value: Any, deep: int = 0) -> bool:
    if isinstance(value, Row | pd.DataFrame | pd.Series) or type(value).__name__ in {"RunData", "Scene"}:
        return True
    if isinstance(value, dict):
        return "metric" in value or any(has_record(one, deep + 1) for one in list(value.values())[:9] if deep < 3)
    if isinstance(value, list | tuple):
        return any(has_record(one, deep + 1) for one in value[:9] if deep < 3)
    return (
        '"metric"' in value if isinstance(value, str) else b'"metric"' in value if isinstance(value, bytes) else False
    )


@pytest.mark.usefixtures("nothing_left")
def test_a_setting_enters_no_module_five_times_on_its_way_to_a_rank(tmp_path: Path) -> None:
    words = ["run", "smoke", "--set", f"size={SIZE}", "--set", "cycles=1", "--out", str(tmp_path / "run")]
    with entered(has_setting, until="world/channel.py:encoded") as seen:
        assert main(words) == 0
    assert [seen[0], seen[-1]] == ["cli.py", "world/channel.py"]
    # In the definition of labs: layers are combined, the value is checked, roles are asked, and the config is written as settings.
    assert max(Counter(seen).values()) < 5, seen


@pytest.mark.usefixtures("nothing_left")
def test_a_row_passes_16_files_at_most_from_its_phase_to_a_chart(tmp_path: Path) -> None:
    with kit.lab("smoke", cycles=1, out=tmp_path / "run") as lab:
        with entered(has_record, "return") as measured:
            lab.step()
        run = kit.load(lab.dir)
        with entered(has_record, "return") as drawn:
            run.plot("times")
    passed = {*UNSEEN, *measured, *drawn} - BESIDE
    passed = {name for name in passed if not name.endswith(("rules.py", "growth.py"))}
    assert {"world/calls.py", "results/run.py", "draw/general.py"} <= passed
    assert len(passed) <= 16, sorted(passed)
