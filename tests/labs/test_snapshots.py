"""Memory snapshots of a lab on real ranks. PyTorch's two calls are stand-ins, and the ranks' GPUs are made up: there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.errors import RankError
from kit.labs.definition import Definition
from kit.labs.lab import Lab
from kit.world import World

STAND_INS = """
seen = []
torch.cuda.memory._record_memory_history = lambda **how: seen.append(how.get("enabled", "all"))
torch.cuda.memory._dump_snapshot = lambda path: open(path, "wb").close()
"""


@pytest.mark.slow
def test_every_rank_writes_one_at_the_end_and_when_a_phase_raises(
    own: Definition, runs: Path, nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(lab: Lab) -> list[str]:
        return sorted(path.name for path in (lab.dir / "memory").glob("*"))

    with World(2, device="cpu", logs=tmp_path / "logs") as world:
        world.run(STAND_INS)
        without = Lab(own, {}, world=world)
        without.run()
        on_cpu = Lab(own, {"memory_snapshot": True}, world=world)
        on_cpu.run()
        assert world.eval("seen") == [[], []]
        assert (written(without), written(on_cpu)) == ([], [])

        monkeypatch.setattr(Lab, "_snapshots", property(lambda lab: lab.started))
        fine = Lab(own, {}, world=world)
        fine.run()
        assert written(fine) == ["rank0.pickle", "rank1.pickle"]
        broken = Lab(own, {"do": "raise"}, world=world)
        with pytest.raises(RankError, match="rank 1 is told to raise"):
            broken.run()
        assert written(broken) == ["rank0.pickle", "rank1.pickle"]  # rank 0 had finished; it is asked for its snapshot
        assert world.eval("seen") == [["all", None] * 2] * 2
