"""Every mutant of the catalogue applies exactly once and compiles into the function that it names. No ranks."""

from __future__ import annotations

from collections import Counter

from kit.labs.discover import find
from tests.mutants.catalogue import CATALOGUE, SETUPS
from tests.mutants.mutant import NotApplicable, compiled


def test_every_mutant_applies_once_and_compiles() -> None:
    wrong = []
    for mutant in CATALOGUE:
        try:
            compiled(mutant)
        except NotApplicable as error:
            wrong.append(f"{mutant.id} ({mutant.bug}): {error}")
    assert not wrong, "these mutants do not fit the source:\n" + "\n".join(wrong)


def test_there_are_enough_and_none_twice() -> None:
    assert len(CATALOGUE) >= 180
    assert not [id_ for id_, times in Counter(mutant.id for mutant in CATALOGUE).items() if times > 1]


def test_checks_and_settings_are_those_of_the_labs() -> None:
    for mutant in CATALOGUE:
        setup = SETUPS[mutant.config].changed(mutant.set)
        definition = find(setup.lab)
        assert mutant.check in {check.name for check in definition.all_rules()}, mutant
        definition.config(**{"ranks": setup.ranks, **setup.config})
