"""How fast a machine is at the few things that labs and benches are made of, from which their times are predicted."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kit.bench.onranks import REDUCED
from kit.errors import BadInput, KitError
from kit.preflight import times
from kit.results.files import read_json, write_json
from kit.world import World

if TYPE_CHECKING:
    from pathlib import Path

FILE = "pace.json"  # in a reference's folder
LOAD = "import warnings\nwith warnings.catch_warnings(action='ignore'):\n    import megatron.core"
START = "import kit.public, kit.view.named, kit.bench.session"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds of each primitive, with two ranks on `device`. `source` is who measured them, `host` where."""

    device: str
    process_s: float  # a `kit` process, until it could start ranks
    world_s: float  # a World, to its first all-reduce
    megatron_s: float  # the same with megatron.core loaded
    job_s: float  # a tiny job on fresh ranks: Megatron's groups, the model, a first step
    step_s: float  # one more step of it
    group_s: float  # one group made, used once and destroyed
    copy_s: float  # 2**30 bytes from the device to host memory and back
    source: str
    host: str


# What one H200 with two ranks on it may take: guesses on the slow side, for a plan that is made before such a machine is rented.
ASSUMED = Pace(
    device="cuda",
    process_s=1.5,
    world_s=4.0,
    megatron_s=7.0,
    job_s=4.0,
    step_s=0.15,
    group_s=0.2,
    copy_s=0.25,
    source="assumed for one H200 with two ranks on it",
    host="",
)


OF_DOCTOR = {  # what `kit doctor --deep` measures of each, to be added up
    "world_s": ("world", "all_reduce"),
    "megatron_s": ("world_megatron", "all_reduce"),
    "job_s": ("layout", "job", "step"),
    "step_s": ("step",),
    "group_s": ("group", "group_destroy"),
    "copy_s": ("host_to_device", "device_to_host"),
}


def find(out: Path | None, device: str) -> Pace:
    """This machine's: as kept in the reference's folder, else from what `kit doctor --deep` measured, else measured now and kept."""
    if out is not None and (kept := read(out / FILE, device)):
        return kept
    pace = from_doctor(times.load(), device) or measure(device)
    if out is not None:
        write_json(out / FILE, asdict(pace))
    return pace


def read(path: Path, device: str) -> Pace | None:
    """None where there is none, or one of another machine, device or version of the kit."""
    try:
        pace = Pace(**read_json(path))
    except (BadInput, TypeError):
        return None
    return pace if (pace.device, pace.host) == (device, platform.node()) else None


def from_doctor(told: times.Times | None, device: str) -> Pace | None:
    """None where `kit doctor --deep` did not measure everything, or measured another machine or device."""
    if told is None or (told.device, told.host) != (device, platform.node()):
        return None
    times_ = {**asdict(told), "group_destroy": told.group_destroy or 0}
    parts = {
        name: [times_[part] for part in OF_DOCTOR[name]] for name in OF_DOCTOR if device == "cuda" or name != "copy_s"
    }
    if None in itertools.chain(*parts.values()):
        return None
    seconds = {name: sum(some) for name, some in parts.items()}
    if device != "cuda":
        seconds["copy_s"] = copy_seconds()
    source = "measured by kit doctor --deep"
    return Pace(device=device, process_s=process_seconds(), **seconds, source=source, host=told.host)


def measure(device: str) -> Pace:
    """Under 10 s on two idle cores, with one process and one World."""
    process = process_seconds()
    began = time.perf_counter()
    with World(2, device=device) as world:
        if (sums := world.call("kit.bench.onranks:first_all_reduce")) != [REDUCED] * 2:
            raise KitError(f"the first all-reduce came to {sums} on the ranks and not to {REDUCED}")
        bare = time.perf_counter() - began
        world.run(LOAD)  # on both at once; a preload does it once for both, and takes about as long
        loaded = time.perf_counter() - began
        told = world.call("kit.bench.onranks:primitives")
    return Pace(
        device=device,
        process_s=process,
        world_s=bare,
        megatron_s=loaded,
        **{name: max(rank[name] for rank in told) for name in told[0]},
        source="measured by kit reference",
        host=platform.node(),
    )


def process_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", START], check=True, capture_output=True)
    return time.perf_counter() - began


def copy_seconds() -> float:
    """Of host memory alone, for doctor, which measures copies only where there is a GPU."""
    with World(1, device="cpu") as world:
        return float(world.call("kit.bench.onranks:copy")[0])
