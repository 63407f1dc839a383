"""Code that is replaced for a while, by the names of both."""

from __future__ import annotations

import pytest

from kit.target import replaced


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
