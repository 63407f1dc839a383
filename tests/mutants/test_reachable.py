"""A result of a mutant holds as long as the sources that its lab can reach do not change. No ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.mutants import reachable
from tests.mutants.catalogue import CATALOGUE, SETUPS
from tests.mutants.table import LABS


def test_every_mutated_source_is_reached() -> None:
    for mutant in CATALOGUE:
        lab = SETUPS[mutant.config].lab
        places = {*reachable.files_of(mutant.module)}
        assert places <= {*reachable.sources(lab)}, mutant.place


@pytest.mark.drawn(1, of="labs")
@pytest.mark.parametrize("lab", LABS)
def test_what_an_import_of_the_lab_loads_is_reached(lab: str) -> None:
    """Asked of a process that imports the lab and its code on ranks."""
    code = f"import sys, kit.public, kit.labs.{lab}.lab, kit.labs.{lab}.ranks.phases as last; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100, env=os.environ.copy()
    )
    loaded = {path for name in done.stdout.split() for path in reachable.files_of(name)}
    missing = loaded - {*reachable.sources(lab)}
    assert [path for path in missing if not any(map(path.is_relative_to, reachable.LEFT_OUT))] == []


@pytest.mark.parametrize("lab", LABS)
def test_other_rooms_are_not_reached(lab: str) -> None:
    rooms = {path.relative_to(reachable.ROOT).parts[1] for path in reachable.sources(lab)}
    assert {"world", "measure", "results", "labs"} <= rooms
    assert not rooms & {"stream", "share", "draw", "view"}
