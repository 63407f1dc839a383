"""A bystander: a separate process with memory on the GPU, which a lab must not affect. CUDA only.

As a script it holds a block of known numbers and answers each line on its input with one line of JSON. It exits at the end of its input,
including when the rank that started it dies. It reports its bytes as NVML lists them per process. If NVML does not list it (containers
hide processes from each other), it reports those of its own allocator, and `driver` is 0.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 16 * 2**20  # numbers; 64 MiB
DEADLINE_S = 60.0  # the first answer includes importing torch and creating a CUDA context


class Bystander:
    """`ask()` returns its bytes; `close()` ends it."""

    def __init__(self, device: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        # -P: files in this folder must not shadow libraries of the same names.
        command, pipe = [sys.executable, "-P", __file__, device], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self) -> dict[str, float]:
        """`bystander_driver` and `bystander_bytes` in bytes, and `bystander_damaged`: bytes of its block that changed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], self.deadline_s)[0]:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(
                f"the bystander process on the GPU did not answer within {self.deadline_s:g} s and was ended"
            )
        line = self._process.stdout.readline()  # a complete line, because it is written at once
        if not line:
            raise RuntimeError(f"the bystander process on the GPU ended with status {self._process.wait()}")
        return {f"bystander_{name}": float(value) for name, value in json.loads(line).items()}

    def close(self) -> None:
        try:
            self._process.communicate(timeout=self.deadline_s)  # ends its input, and waits
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def bystander_memory(block: torch.Tensor, right: torch.Tensor) -> dict[str, int]:
    """Its bytes from the driver (0 if unknown) and from its own allocator, and the number of changed bytes in its block."""
    from kit.measure.phase import device_memory

    damaged = int((block.cpu() != right).sum()) * block.element_size()
    held = device_memory(str(block.device))
    if held is None:
        return {"driver": 0, "bytes": block.nbytes, "damaged": damaged}
    return {"driver": held.process_used or 0, "bytes": held.reserved, "damaged": damaged}


def stand_by(device: str) -> None:
    import torch

    block = torch.arange(BLOCK, dtype=torch.int32, device=device)
    right = torch.arange(BLOCK, dtype=torch.int32)
    for _ in sys.stdin:
        print(json.dumps(bystander_memory(block, right)), flush=True)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # the ranks' environment may lack the kit
    stand_by(sys.argv[1])
