"""A bystander: a process of its own with some memory on the card, which must not notice what a lab does there. CUDA only.

Run as a script it holds a block of known numbers and answers each line on its input with one line of JSON, until the input ends:
when the rank that started it is gone, so is it. Its bytes are the driver's, as nvidia-smi lists them by process; where that does not
list it (containers hide processes from each other), they are its own allocator's, and `driver` is 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

BLOCK = 16 * 2**20  # numbers; 64 MiB
QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


class Bystander:
    """`ask()` it how many bytes it has; `close()` ends it."""

    def __init__(self, device: str) -> None:
        # -P: this file's neighbours must not stand in for libraries of the same names.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self) -> dict[str, float]:
        """bystander_driver and bystander_bytes (bytes), and bystander_damaged: bytes of its block that changed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bystander process on the card ended with status {self._process.wait()}")
        return {f"bystander_{name}": float(value) for name, value in json.loads(line).items()}

    def close(self) -> None:
        self._process.communicate()  # ends its input, and waits


def driver_bytes() -> int:
    """What the driver says this process has, on all cards; 0 where it does not say."""
    try:
        listed = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    rows = [line.replace(" ", "").partition(",") for line in listed.splitlines()]
    return sum(int(mib) << 20 for pid, _, mib in rows if pid == str(os.getpid()) and mib.isdigit())


def stand_by(device: str) -> None:
    import torch

    block = torch.arange(BLOCK, dtype=torch.int32, device=device)
    right = torch.arange(BLOCK, dtype=torch.int32)
    for _ in sys.stdin:
        damaged = int((block.cpu() != right).sum()) * block.element_size()
        held = torch.cuda.memory_reserved(block.device) if block.is_cuda else block.nbytes
        print(json.dumps({"driver": driver_bytes(), "bytes": held, "damaged": damaged}), flush=True)


if __name__ == "__main__":
    stand_by(sys.argv[1])
