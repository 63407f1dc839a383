"""A phase reports its time, levels, peak and own cost, and an exception inside it still propagates."""

import os
import socket

import pytest
import torch

from kit.measure import PhaseMeter
from kit.measure.phase import memory_pages

MIB = 1 << 20
LEVELS = ("rss", "anon_rss", "shared_rss", "groups", "fds", "sockets", "threads")


def values(metrics):
    return {m.metric: m.value for m in metrics}


def test_every_metric_with_its_unit():
    with PhaseMeter("cpu") as meter:
        pass
    metrics = meter.metrics
    expected = {"seconds", "overhead_seconds", "peak_rss", *LEVELS, *(f"{name}_before" for name in LEVELS)}
    assert {m.metric for m in metrics} == expected
    assert len(metrics) == len(expected)
    units = {m.metric.removesuffix("_before"): m.unit for m in metrics}
    assert {name for name, unit in units.items() if unit == "s"} == {"seconds", "overhead_seconds"}
    assert {name for name, unit in units.items() if unit == "1"} == {"groups", "fds", "sockets", "threads"}
    assert {name for name, unit in units.items() if unit == "B"} == {"rss", "anon_rss", "shared_rss", "peak_rss"}


def test_a_peak_inside_is_seen_and_ends_with_the_phase():
    with PhaseMeter() as first:
        b"x" * (64 * MIB)
    with PhaseMeter() as second:
        pass
    seen = values(first.metrics)
    assert seen["peak_rss"] - seen["rss_before"] > 60 * MIB
    assert seen["rss"] - seen["rss_before"] < 32 * MIB
    assert values(second.metrics)["peak_rss"] < seen["peak_rss"] - 32 * MIB


def test_the_outer_meter_keeps_a_peak_that_an_inner_one_reset():
    with PhaseMeter() as outer:
        b"x" * (96 * MIB)
        with PhaseMeter() as inner:
            b"x" * (48 * MIB)
        with PhaseMeter() as quiet:
            pass
    peaks = [values(meter.metrics)["peak_rss"] for meter in (outer, inner, quiet)]
    assert peaks[0] > peaks[1] + 24 * MIB
    assert peaks[1] > peaks[2] + 24 * MIB


def test_what_a_phase_leaves_open_shows():
    with PhaseMeter() as meter:
        left, right = socket.socketpair()
    seen = values(meter.metrics)
    assert seen["sockets"] - seen["sockets_before"] == seen["fds"] - seen["fds_before"] == 2
    left.close()
    right.close()


def test_a_phase_that_raises_is_measured_and_raises_the_same():
    error = ValueError("mine")
    meter = PhaseMeter()
    with pytest.raises(ValueError, match="mine") as caught, meter:
        raise error
    assert caught.value is error
    assert values(meter.metrics)["seconds"] > 0
    assert meter.device_error is None


def test_its_own_cost_is_reported():
    with PhaseMeter() as meter:
        pass
    assert values(meter.metrics)["overhead_seconds"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_memory_on_a_gpu():
    torch.zeros(1, device="cuda")
    with PhaseMeter() as outer:
        kept = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        with PhaseMeter("cuda") as inner:
            pass
    seen, quiet = values(outer.metrics), values(inner.metrics)
    assert seen["allocated"] - seen["allocated_before"] == kept.numel()
    assert seen["peak_allocated"] - seen["allocated_before"] >= 80 * MIB
    assert quiet["peak_allocated"] == quiet["allocated"]
    assert seen["driver_used"] >= seen["reserved"] >= seen["allocated"]


def test_files_of_memory_count_by_the_pages_that_they_have():
    before = memory_pages()
    descriptor = os.memfd_create("kit-test")
    try:
        os.ftruncate(descriptor, 4 * MIB)
        (place,) = memory_pages().keys() - before.keys()
        assert memory_pages()[place] == 0
        os.pwrite(descriptor, b"x" * MIB, 0)
        assert memory_pages()[place] == MIB
    finally:
        os.close(descriptor)
    assert memory_pages() == before
