"""Code that is replaced for a while, by the names of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kit.target import raised_in_words, refusal, replaced


class Base:
    def greet(self) -> str:
        return "hello"


class Heir(Base):
    limit = 3


def shout(self: Base) -> str:
    return greet(self).upper()


greet = Base.greet
LARGER = 4
HERE = __name__


def test_what_is_replaced_comes_back_and_may_call_the_original() -> None:
    with replaced({f"{HERE}:Base.greet": f"{HERE}:shout", f"{HERE}:Heir.limit": f"{HERE}:LARGER"}):
        assert (Heir().greet(), Heir.limit) == ("HELLO", 4)
    assert (Heir().greet(), Heir.limit) == ("hello", 3)


def test_an_inherited_method_is_overridden_in_that_class_alone() -> None:
    with replaced({f"{HERE}:Heir.greet": f"{HERE}:shout"}):
        assert (Heir().greet(), Base().greet()) == ("HELLO", "hello")
    assert "greet" not in vars(Heir)


@pytest.mark.parametrize(("place", "wrong"), [("Base.gone", "shout"), ("Base.greet", "gone")])
def test_a_name_that_is_gone_replaces_nothing(place: str, wrong: str) -> None:
    with (
        pytest.raises(AttributeError, match="gone"),
        replaced({f"{HERE}:Heir.limit": f"{HERE}:LARGER", f"{HERE}:{place}": f"{HERE}:{wrong}"}),
    ):
        pass
    assert Heir.limit == 3


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = (1,\n", "SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("import helper\n", "KeyError: 'cfg' (helper.py, line 2)"),
        ("import nowhere\n", "ModuleNotFoundError: No module named 'nowhere' (mine.py, line 1)"),
        ("raise SystemExit(2)\n", "SystemExit: 2 (mine.py, line 1)"),
        ("X = 3\n", "TypeError: mine:X is not callable"),
        ("X = print\n", ""),
    ],
)
def test_why_code_cannot_be_loaded(source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "helper.py").write_text("known = {}\nknown['cfg']\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert refusal("mine:X") == words
    for name in ("mine", "helper"):
        sys.modules.pop(name, None)


def test_a_missing_module_has_no_line() -> None:
    assert refusal("nowhere:X") == "ModuleNotFoundError: No module named 'nowhere'"


def test_an_error_within_a_library_names_the_line_that_called_it() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")
    assert raised_in_words(raised.value).endswith("(test_target.py, line 82)")
