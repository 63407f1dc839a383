"""Labs of the kit and of other packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.draw.picture import Picture
from kit.errors import BadInput
from kit.labs.definition import Definition
from kit.labs.discover import discover, find, rules_of
from kit.results import Row, create_run
from kit.view import named
from kit.view.report import report_page


@pytest.fixture
def fresh() -> Iterator[None]:
    discover.cache_clear()
    yield
    discover.cache_clear()


def offer(folder: Path, *lines: str) -> None:
    """Write an installed package's entry points, as pip does."""
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kit.labs]\n" + "".join(f"{line}\n" for line in lines))


def test_smoke_is_there() -> None:
    lab = find("smoke")
    assert next(check.name for check in lab.load_rules()) == "groups_return_to_baseline"
    assert {fault.caught_by for fault in lab.faults} <= {check.name for check in lab.load_rules()}


def test_an_unknown_lab() -> None:
    with pytest.raises(BadInput, match="unknown lab 'smok'; did you mean 'smoke'"):
        find("smok")
    with pytest.raises(BadInput, match="unknown lab 3; allowed are"):
        find(3)  # type: ignore[arg-type]
    observers = rules_of("somebody's own script")
    assert [check.name for check in observers] == ["nothing_piles_up", "memory_slope"]
    assert not any(check.asked({}) for check in observers)  # they are asked only where a phase was observed


def test_another_packages_lab(own: Definition, tmp_path: Path, fresh: None) -> None:
    offer(tmp_path, "own = own_lab:LAB")
    assert find("own") is own
    assert "smoke" in discover().labs
    assert [check.name for check in rules_of("own")] == ["seen_often", "routing_effective", "nothing_piles_up"]


def test_broken_packages_are_reported_and_harm_nobody(own: Definition, tmp_path: Path, fresh: None) -> None:
    (tmp_path / "copycat.py").write_text(
        "import dataclasses, own_lab\nLAB = dataclasses.replace(own_lab.LAB, name='smoke')\n"
    )
    offer(tmp_path, "gone = no_such_module:LAB", "odd = own_lab:Config", "copy = copycat:LAB")
    labs, broken = discover()
    assert labs["smoke"].phases.startswith("kit.labs.smoke")
    assert "ModuleNotFoundError" in broken["gone"]
    assert "is not a" in broken["odd"]
    assert "has the name 'smoke'" in broken["copy"]
    with pytest.raises(BadInput, match="lab 'gone': no_such_module:LAB cannot be loaded"):
        find("gone")


def test_every_fault_can_be_caught_by_its_check() -> None:
    for lab in discover().labs.values():
        names = {check.name for check in lab.all_rules()}
        for fault in lab.faults:
            assert fault.exit in {1, 3}
            assert fault.caught_by in names or fault.exit == 3


OWN_CHARTS = """
from kit.draw.album import Charts, Table
from kit.draw.lines import Lines

def sights(data):
    return data.of("seen").rename(columns={"cycle": "x"})

CHARTS = Charts(
    plots={"sights": Lines(rows=sights, title="Sights by cycle", heading="What the stranger saw", height=2.0)},
    overview=(("sights",),),
    words=lambda data: ["from elsewhere"],
    tables={"sights": Table("Every sight", lambda data: data.of("seen")[["cycle", "value"]], "value")},
)
"""


def test_another_packages_lab_has_its_own_charts_tables_and_panel(
    own: Definition, tmp_path: Path, fresh: None, runs: Path
) -> None:
    (tmp_path / "own_charts.py").write_text(OWN_CHARTS)
    (tmp_path / "own_shown.py").write_text(
        "import dataclasses, own_lab\n"
        "LAB = dataclasses.replace(own_lab.LAB, charts='own_charts:CHARTS', first=('low', 'high'))\n"
    )
    offer(tmp_path, "own = own_shown:LAB")
    writer = create_run(runs, "own", {"ranks": 1, "low": 1}, {})
    for cycle in (1, 2):
        about: dict[str, Any] = {
            "run": writer.id,
            "lab": "own",
            "cycle": cycle,
            "phase": "second",
            "rank": 0,
            "time": cycle,
        }
        rows = [("seconds", 0.5, "s"), ("seen", 3.0 * cycle, "1")]
        writer.append([Row(**about, metric=name, value=value, unit=unit) for name, value, unit in rows])
    writer.finish()
    run = kit.load(writer.dir)
    assert named.names(run)[:2] == ["overview", "sights"]
    for picture in (run.plot(), run.plot("sights")):
        assert isinstance(picture, Picture)
        assert picture.axes[0].get_title(loc="left") == "What the stranger saw"
        assert picture.get_suptitle() == "own · 1 rank · from elsewhere · finished"
    assert "Every sight" in report_page([run])
    panel = kit.panel("own")
    first = panel.parameters.form.children[0].children
    assert [control.description for control in first] == ["low", "high", "fault"]
    panel.tab.selected_index = list(panel.tabs).index("Tables")
    tables = panel.tabs["Tables"]
    tables.choice.value = "sights"
    assert tables.grid.found["value"].tolist() == [6, 3]


def test_a_copy_of_a_lab_under_another_name_is_one_folder(tmp_path: Path) -> None:
    shutil.copytree(Path(kit.__file__).parent, tmp_path / "kit", ignore=shutil.ignore_patterns("__pycache__"))
    home = tmp_path / "kit" / "labs"
    shutil.copytree(home / "smoke", home / "echo")
    for file in (home / "echo").glob("*.py"):
        file.write_text(file.read_text().replace("kit.labs.smoke", "kit.labs.echo").replace('"smoke"', '"echo"'))
    script = "from kit.cli import main\nmain(['labs'])\nmain(['faults', '--json'])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    )
    assert done.stdout.startswith("echo ")
    assert '"lab": "echo"' in done.stdout
