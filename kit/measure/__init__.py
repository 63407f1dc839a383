"""Clocks, memory sources, counts of groups, files and threads, provenance, and the recorder.

Runs on Linux with the standard library alone and imports nothing heavy; torch is used where the process has loaded it.
"""

from kit.machine import pss
from kit.measure.phase import Metric, PhaseMeter, resource_counts
from kit.measure.recorder import Recorder, provenance

__all__ = [
    "Metric",
    "PhaseMeter",
    "Recorder",
    "provenance",
    "pss",
    "resource_counts",
]
