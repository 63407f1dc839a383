"""What the observer of Megatron's groups says of two moments."""

from __future__ import annotations

from kit.megatron.observe import Seen, moved


def test_groups_made_in_another_order_are_named() -> None:
    before = Seen(made=["tensor", "pipeline", "data"])
    assert moved(before, Seen(made=["tensor", "pipeline", "data"])) == []
    assert moved(before, Seen(made=["tensor", "data", "pipeline"])) == ["data was made where pipeline was made before"]
    assert (
        moved(before, Seen(made=["tensor", "data"])) == []
    )  # another number of groups is the question of another check
