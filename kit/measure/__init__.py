"""Clocks, memory sources, a census of groups, files and threads, provenance, and the recorder.

Runs on Linux with the standard library alone and imports nothing heavy; torch is used where the process has loaded
it. The names are bound here at once, not when first asked for: `census` and `provenance` are also modules, and the
functions must win.
"""

from kit.measure.census import census, counts
from kit.measure.cgroup import cgroup_limits, free_memory
from kit.measure.clock import now
from kit.measure.memory import device_memory, host_memory, pss, reset_peaks
from kit.measure.phase import Metric, PhaseMeter, measure_overhead, measure_phase
from kit.measure.provenance import provenance
from kit.measure.recorder import Recorder

__all__ = [
    "Metric",
    "PhaseMeter",
    "Recorder",
    "census",
    "cgroup_limits",
    "counts",
    "device_memory",
    "free_memory",
    "host_memory",
    "measure_overhead",
    "measure_phase",
    "now",
    "provenance",
    "pss",
    "reset_peaks",
]
