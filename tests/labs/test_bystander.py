"""The bystander answers, sees its own block, and ends with its input. On a CPU here; the driver has nothing to list."""

from __future__ import annotations

from pathlib import Path

from kit.labs.bystander import BLOCK, Bystander


def test_it_answers_and_ends() -> None:
    bystander = Bystander("cpu")
    try:
        for _ in range(2):
            told = bystander.ask()
            assert told == {"bystander_driver": 0.0, "bystander_bytes": 4.0 * BLOCK, "bystander_damaged": 0.0}
        pid = bystander._process.pid
        assert Path(f"/proc/{pid}").exists()
    finally:
        bystander.close()
    assert not Path(f"/proc/{pid}").exists()
