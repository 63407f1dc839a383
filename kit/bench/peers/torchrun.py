"""torchrun alone, as a notebook starts a script with it: no steps; a death is told by its exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kit.bench.peers.trial import run

SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
os.write(1, f"{rank} {os.getpid()} {value.item()}\\n".encode())
if rank == 1:
    time.sleep(600)
dist.barrier()
"""


class Script:
    def start(self) -> list[float]:
        script = Path("script.py")  # in the trial's own folder
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = sorted(self.process.stdout.readline().split() for _ in range(2))
        return [float(value) for _, _, value in self.said]

    def can_step(self) -> bool:
        return False

    def step(self) -> None:
        raise NotImplementedError

    def pids(self) -> list[int]:
        return [int(pid) for _, pid, _ in self.said]

    def hang(self) -> None:
        """The script does so after its all-reduce."""

    def answer(self) -> None:
        _, errors = self.process.communicate()
        raise subprocess.SubprocessError(f"status {self.process.returncode}: {errors[errors.find('Root Cause') :]}")


if __name__ == "__main__":
    run(Script())
