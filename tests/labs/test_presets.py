"""The labs' sets of tolerances: their names exist, and their values match the set's name."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict

import pytest

from kit.labs.definition import Definition
from kit.labs.discover import configure, tagged

LABS = list(tagged().values())


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_every_preset_moves_tolerances_of_the_lab_in_the_direction_of_its_name(lab: Definition) -> None:
    presets = lab.load_presets()
    assert list(presets) == ["strict", "common practice"]
    config = asdict(configure(lab, {}, None))
    own = {check.name: (check.better, check.limit_for(config)) for check in lab.load_rules()}
    for name, tolerances in presets.items():
        assert set(tolerances) <= set(own)
        for tolerance, value in tolerances.items():
            better, limit = own[tolerance]
            looser = value > limit if better == "<=" else value < limit
            assert value == limit or looser == (name == "common practice"), (name, tolerance)


def test_a_lab_needs_no_presets() -> None:
    assert dataclasses.replace(LABS[0], presets="").load_presets() == {}
