"""Which World the magics use."""

from __future__ import annotations

import pytest

import kit
from kit.labs.lab import Lab


@pytest.fixture(autouse=True)
def closed_after(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    yield
    for value in list(shell.user_ns.values()):
        if isinstance(value, kit.World | Lab):
            value.close()


@pytest.mark.slow
def test_the_first_cell_starts_one_and_the_one_made_last_is_used(cell, shell):
    result, shown = cell("%ranks status")
    assert result.success
    assert "no World is open" in shown
    assert "no World is open" in cell("%ranks restart")[1]

    result, shown = cell("%%ranks\nworld_size")
    assert repr(result.result) == "[0-1] 2"
    assert "started a World of 2 ranks on cpu; its name is `world`" in shown

    assert cell("import kit\nsolo = kit.World(1, device='cpu')")[0].success
    assert repr(cell("%%ranks\nworld_size")[0].result) == "[0] 1"
    cell("solo.close()")
    assert repr(cell("%%ranks\nworld_size")[0].result) == "[0-1] 2"

    assert "closed" in cell("%ranks stop")[1]
    assert shell.user_ns["world"].state == "closed"

    shell.user_ns["world"] = "somebody's own"
    result, shown = cell("%%ranks\nworld_size")
    assert repr(result.result) == "[0-1] 2"
    assert "started a World of 2 ranks on cpu" in shown
    assert "its name" not in shown
    assert shell.user_ns["world"] == "somebody's own"
    cell("%ranks stop")
    assert "no World is open" in cell("%ranks stop")[1]


def test_the_ranks_of_a_lab_can_be_looked_at(cell):
    assert cell("import kit\nlab = kit.lab('smoke', ranks=1, cycles=1, device='cpu')")[0].success
    assert repr(cell("%%ranks\nworld_size, dist.get_world_size()")[0].result) == "[0] (1, 1)"
    cell("lab.step()")
    cell("lab.close()")
    assert "no World is open" in cell("%ranks")[1]
