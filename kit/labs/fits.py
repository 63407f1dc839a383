"""Does a job fit this machine? Arithmetic on the notebook's side, before any rank starts."""

from __future__ import annotations

from kit.errors import BadInput
from kit.gpu import free_bytes
from kit.machine import free_memory
from kit.world.capacity import RANK_BYTES

GIB = 2**30
JOB = "weights, gradients and optimizer"


def check_fits(size: str, ranks: int, device: str, *, job: int, host: int, kept: str) -> None:
    """Refuse a job that does not fit. `job`: bytes of a rank on its device; `host`: other bytes in host memory, which `kept` describes."""
    gpus = [] if device == "cpu" else free_bytes()
    if gpus:
        sharing = -(-ranks // len(gpus))  # ranks on the fullest GPU
        least = min(gpus[:ranks])
        if sharing * job > least:
            many = f" on each of {sharing} ranks that share a GPU" if sharing > 1 else " for each rank"
            raise BadInput(
                f"size={size} does not fit: {job / GIB:.2f} GiB of {JOB}{many}, "
                f"but {least / GIB:.1f} GiB are free on a GPU; use a smaller size, fewer layers, or more tp or pp"
            )
    here = 0 if gpus else job
    needed = (here + host + RANK_BYTES) * ranks
    free = free_memory()
    if needed > free:
        raise BadInput(
            f"size={size} does not fit: {ranks} ranks x ({here / GIB:.2f} GiB of {JOB} + {host / GIB:.2f} GiB {kept} "
            f"+ {RANK_BYTES / GIB:.2f} GiB per process) = "
            f"{needed / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free; use a smaller size, fewer layers, or fewer ranks"
        )
