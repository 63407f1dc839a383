"""The description of a config's fields."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Annotated

import pytest

from kit.labs.definition import LabConfig, Option, fields
from kit.labs.discover import discover


def test_every_field_of_every_lab_can_be_shown() -> None:
    for lab in discover().labs.values():
        for field in fields(lab.config):
            assert field.option.help, f"{lab.name}: {field.name} needs a help text"
            assert field.allowed()


def test_fields_in_words() -> None:
    known = {field.name: field for field in fields(LabConfig)}
    assert known["ranks"].allowed() == "a whole number from 1 to 4096"
    assert known["ranks"].default == 2
    assert known["device"].choices == ("auto", "cpu", "cuda")
    assert known["python"].allowed() == "text"
    assert known["timeout_s"].option.unit == "s"


def test_a_field_without_a_word_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(LabConfig):
        mute: int = 1

    with pytest.raises(TypeError, match="'mute' has no Option"):
        fields(Config)


def test_ranges() -> None:
    assert Option("", low=1).range() == "of at least 1"
    assert Option("", high=2.5).range() == "of at most 2.5"
    assert Option("").range() == ""
    assert Option("", low=1, high=2).check(2) == 2
    assert Option("", low=1).check(None) is None
    with pytest.raises(ValueError, match="of at least 1"):
        Option("", low=1).check(float("nan"))


def test_names_beside_code_in_words() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(LabConfig):
        way: Annotated[str, Option("how", target=True, names=("auto", "shm"))] = "auto"
        other: Annotated[str | None, Option("how else", target=True, names=("shm",))] = None

    known = {field.name: field for field in fields(Config)}
    assert known["way"].allowed() == "one of auto, shm, or module:attr"
    assert known["other"].allowed() == "one of shm, or module:attr or null"


def test_configs_are_plain_values() -> None:
    config = LabConfig(ranks=3)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ranks = 4  # type: ignore[misc]
    assert Annotated  # the marker is read through typing's own names
