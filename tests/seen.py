"""What a picture shows, for tests: its texts, its drawings by title, and the bars and boxes in them."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import pytest


def words(picture: Any) -> set[str]:
    return {text.get_text().strip() for text in picture.findobj(mpl.text.Text)}


def colours(picture: Any) -> dict[str, str]:
    """The colour of each text."""
    return {text.get_text(): text.get_color() for text in picture.findobj(mpl.text.Text)}


def titles(picture: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in picture.axes if axes.get_title(loc="left")]


def axes_of(picture: Any, title: str) -> Any:
    return next(axes for axes in picture.axes if axes.get_title(loc="left").startswith(title))


def bars(axes: Any) -> list[Any]:
    return [bar for drawn in axes.containers for bar in drawn]


def boxes(axes: Any, name: str) -> list[Any]:
    """Left and right ends of the boxes with this name."""
    drawn = [path.get_extents() for part in axes.collections if part.get_gid() == name for path in part.get_paths()]
    return [(pytest.approx(box.x0), pytest.approx(box.x1)) for box in drawn]
