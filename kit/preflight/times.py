"""How long this box takes for one of each: a World, a step, a group. `kit doctor --deep` writes them, `kit reference` may read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from kit.results import runs_dir
from kit.results.files import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

FILE = "preflight.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one of each, with two ranks; None where it was not measured. `device` is what the ranks worked on.

    `host`, `gpu`, `torch` and `nccl` name the box: times of another one say nothing about this one.
    """

    device: str
    host: str
    gpu: str = ""
    torch: str | None = None
    nccl: str | None = None
    measured: str = ""  # when
    world: float | None = None  # two ranks, until WORLD is joined
    world_megatron: float | None = None  # the same with megatron.core loaded
    all_reduce: float | None = None  # a few bytes over WORLD on the ranks' device
    all_reduce_host: float | None = None
    group: float | None = None  # a group on the ranks' device, made and used once
    group_host: float | None = None  # a gloo group, made and used once
    group_destroy: float | None = None
    group_reload: float | None = None  # made anew inside its handle and used once
    job: float | None = None  # a tiny job on groups that are there
    step: float | None = None  # a tiny step, the second of a job
    layout: float | None = None  # Megatron's groups for one layout
    host_to_device: float | None = None  # 1 GiB from registered memory
    device_to_host: float | None = None

    def of_this_box(self, *, device: str, host: str, torch: str | None, nccl: str | None) -> bool:
        return (self.device, self.host, self.torch, self.nccl) == (device, host, torch, nccl)


def save(times: Times, folder: Path | None = None) -> Path:
    path = (folder or runs_dir()) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(times))
    return path


def load(folder: Path | None = None) -> Times | None:
    """The times that were measured last; None where none were, or where they cannot be read."""
    try:
        stored: dict[str, Any] = read_json((folder or runs_dir()) / FILE)
        known = {one.name for one in fields(Times)}
        return Times(**{name: value for name, value in stored.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
