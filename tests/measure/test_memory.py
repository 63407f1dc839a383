"""Host memory is the kernel's value, and its peak can be reset."""

import os
import subprocess
import sys
from pathlib import Path

from kit.machine import pss
from kit.measure.phase import host_memory_metrics, reset_peaks

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def test_levels_agree_with_each_other():
    memory = host_memory_metrics()
    assert memory["rss"] > MIB
    assert memory["peak_rss"] >= memory["anon_rss"]
    assert abs(memory["rss"] - memory["anon_rss"] - memory["shared_rss"]) < MIB
    assert 0 < pss() < 2 * memory["rss"]


def test_anonymous_memory_follows_an_allocation():
    before = host_memory_metrics()["anon_rss"]
    held = b"x" * (64 * MIB)
    assert host_memory_metrics()["anon_rss"] - before > 60 * MIB
    del held
    assert host_memory_metrics()["anon_rss"] - before < 32 * MIB


def test_peak_remembers_until_reset():
    assert reset_peaks() is None
    before = host_memory_metrics()["peak_rss"]
    b"x" * (64 * MIB)
    assert host_memory_metrics()["peak_rss"] - before > 60 * MIB
    assert reset_peaks() is None
    assert host_memory_metrics()["peak_rss"] - before < 32 * MIB


def test_a_refused_reset_says_why_and_gives_no_peak():
    """A process that is not dumpable does not own its files in /proc, so the kernel refuses the reset."""
    script = """
import ctypes, os
from kit.measure import PhaseMeter
from kit.measure.phase import reset_peaks
if os.getuid() == 0:
    os.setuid(65534)
ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
assert reset_peaks() == "/proc/self/clear_refs: Permission denied", reset_peaks()
with PhaseMeter() as meter:
    pass
names = [m.metric for m in meter.metrics]
assert "peak_rss" not in names and "rss" in names and "fds" in names, names
assert meter.peak_refused == "/proc/self/clear_refs: Permission denied"
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
