"""Pictures for the README, from real runs: `python -m kit.view.gallery --out docs/images`.

Each is drawn twice, for light and for dark pages. The runs themselves are not kept.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from kit.view.plots import plot_run
from kit.view.style import THEMES

RUNS: dict[str, dict[str, Any]] = {"smoke": {"cycles": 5}}


def make(out: Path) -> list[Path]:
    """Run each lab of the gallery and draw it."""
    import kit

    made = []
    with tempfile.TemporaryDirectory(prefix="kit-gallery-") as folder:
        for lab, config in RUNS.items():
            run = kit.run(lab, out=Path(folder) / lab, **config)
            for name in THEMES:
                suffix = "" if name == "light" else f"-{name}"
                made.append(plot_run(run, theme_name=name).save(out / f"{lab}{suffix}.png"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kit.view.gallery", description="Draw the pictures of the README.")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="the folder for them")
    for path in make(parser.parse_args().out):
        print(f"{path} {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
