"""Two jobs in one World, each with its own parallel state, train as they would alone."""

from __future__ import annotations

import pytest

from tests.megatron.conftest import Launch


@pytest.mark.slow
def test_two_jobs_of_other_layouts_in_one_world(launch: Launch) -> None:
    first, second, alone = launch("roles", 3)
    assert [each["inside"] for each in (first, second, alone)] == [[0, 2], [1, 2], [0, 1]]
    assert [each["outside"] for each in (first, second, alone)] == [[0, 3], [1, 3], [2, 3]]
    assert {each["total"] for each in (first, second, alone)} == {3.0}  # the World's default group is unchanged
    assert first["log"] == second["log"]
    assert [row["loss"] for row in alone["log"]] == pytest.approx([row["loss"] for row in first["log"]], abs=1e-5)
    assert len(alone["log"]) == 3
    assert all("as_world takes a process group that this rank belongs to" in each["other"] for each in (first, alone))
