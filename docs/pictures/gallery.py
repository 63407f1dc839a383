"""Pictures for the README, from real runs: `python -m docs.pictures.gallery --out docs/images`.

Each picture is drawn twice, for light and for dark pages. The runs are not kept. The picture of the panel needs a browser and is made
only with `--only panel`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from kit.draw.picture import Picture
from kit.draw.style import THEMES
from kit.labs.offload.charts import plot_modes
from kit.view.named import plot_run

if TYPE_CHECKING:
    from kit.results import Run


class Shot(NamedTuple):
    """A picture of the gallery: a lab, a config for each of its runs, and the function that draws them."""

    lab: str
    configs: Sequence[Mapping[str, Any]]
    draw: Callable[[Sequence[Run], str], Picture]


def one(runs: Sequence[Run], theme_name: str) -> Picture:
    return plot_run(runs[0], theme=theme_name)


def side_by_side(runs: Sequence[Run], theme_name: str) -> Picture:
    return plot_modes(runs, theme_name=theme_name)


# Large enough to stand out from the interpreter's own memory.
SEEN = {"size": "125m", "layers": 1, "seq": 16, "steps": 1, "microbatches": 1, "cycles": 5}
GALLERY = {
    "smoke": Shot("smoke", [{"cycles": 5}], one),
    "offload": Shot("offload", [SEEN], one),
    "split": Shot("split", [{}], one),
    "split-fault": Shot("split", [{"fault": "one-scalar-metrics", "level": "both"}], one),
    "sync": Shot("sync", [{}], one),
    "stream": Shot("stream", [{}], one),
    "share": Shot("share", [{"rehearse": False}], one),
    "sync-fault": Shot("sync", [{"fault": "permuted-rows"}], one),
    "offload-modes": Shot(
        "offload", [{"mode": mode, "cycles": 3} for mode in ("exact", "manual", "official")], side_by_side
    ),
}


def make(out: Path, names: Sequence[str] = tuple(GALLERY)) -> list[Path]:
    """Run the labs of the named pictures and draw them."""
    import kit

    made = []
    with tempfile.TemporaryDirectory(prefix="kit-gallery-") as folder:
        for name in names:
            shot = GALLERY[name]
            runs = [
                kit.run(shot.lab, out=Path(folder) / f"{name}-{index}", **config)
                for index, config in enumerate(shot.configs)
            ]
            for theme_name in THEMES:
                suffix = "" if theme_name == "light" else f"-{theme_name}"
                made.append(shrink(shot.draw(runs, theme_name).save(out / f"{name}{suffix}.png")))
    return made


def shrink(path: Path, colours: int = 128) -> Path:
    """Reduce the number of colours for a smaller file; the difference is not visible."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m docs.pictures.gallery", description="Draw the pictures of the README."
    )
    parser.add_argument(
        "--only", choices=[*GALLERY, "panel"], action="append", help="draw only this picture; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    arguments = parser.parse_args()
    names = arguments.only or list(GALLERY)
    made = make(arguments.out, [name for name in names if name != "panel"])
    if "panel" in names:
        from docs.pictures.panel import panel_pictures

        made += [shrink(path, 256) for path in panel_pictures(arguments.out)]
    for path in made:
        print(f"{path} {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
