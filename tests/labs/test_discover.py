"""Labs of this house and of other packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.errors import BadInput
from kit.labs.definition import Definition
from kit.labs.discover import checks_of, discover, find


@pytest.fixture
def fresh() -> Iterator[None]:
    discover.cache_clear()
    yield
    discover.cache_clear()


def offer(folder: Path, *lines: str) -> None:
    """An installed package's entry points, as pip leaves them."""
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kit.labs]\n" + "".join(f"{line}\n" for line in lines))


def test_smoke_is_there() -> None:
    lab = find("smoke")
    assert next(check.name for check in lab.load_checks()) == "groups_return_to_baseline"
    assert {fault.check for fault in lab.faults} <= {check.name for check in lab.load_checks()}


def test_an_unknown_lab() -> None:
    with pytest.raises(BadInput, match="there is no lab 'smok'; did you mean 'smoke'"):
        find("smok")
    with pytest.raises(BadInput, match="there is no lab 3; allowed are"):
        find(3)  # type: ignore[arg-type]
    assert tuple(checks_of("somebody's own script")) == ()


def test_another_packages_lab(own: Definition, tmp_path: Path, fresh: None) -> None:
    offer(tmp_path, "own = own_lab:LAB")
    assert find("own") is own
    assert "smoke" in discover().labs
    assert [check.name for check in checks_of("own")] == ["seen_often", "routing_effective"]


def test_broken_packages_are_told_and_harm_nobody(own: Definition, tmp_path: Path, fresh: None) -> None:
    (tmp_path / "copycat.py").write_text(
        "import dataclasses, own_lab\nLAB = dataclasses.replace(own_lab.LAB, name='smoke')\n"
    )
    offer(tmp_path, "gone = no_such_module:LAB", "odd = own_lab:Config", "copy = copycat:LAB")
    labs, broken = discover()
    assert labs["smoke"].phases.startswith("kit.labs.smoke")
    assert "ModuleNotFoundError" in broken["gone"]
    assert "is not a" in broken["odd"]
    assert "takes the name 'smoke'" in broken["copy"]
    with pytest.raises(BadInput, match="lab 'gone': no_such_module:LAB cannot be loaded"):
        find("gone")


def test_every_fault_can_be_caught_by_its_check() -> None:
    for lab in discover().labs.values():
        names = {check.name for check in lab.load_checks()}
        for fault in lab.faults:
            assert fault.exit in {1, 3}
            assert fault.check in names or fault.exit == 3
