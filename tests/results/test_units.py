"""Numbers with their units."""

from __future__ import annotations

import pytest

from kit.results.units import amount, duration, size


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9996, "s", "1 s"), (0.0123, "s", "12.3 ms"), (2.1e-5, "s", "21 µs"), (0.0, "s", "0 ms"),
        (2**21, "B", "2.0 MiB"), (2.5e9, "B/s", "2.5 GB/s"), (3.0, "1", "3"), (0.5, "ratio", "0.5"), (1e-6, "", "1e-06"),
        (4.93948e-16, "ratio", "4.94e-16"), (1450.4, "s", "1450 s"), (1234567.0, "1", "1234567"), (1234567.8, "MiB", "1234568 MiB"),
        (0.0429688, "MiB", "0.043 MiB"),
        (None, "s", "-"), (float("nan"), "s", "nan"), (float("inf"), "ratio", "inf"),
    ],
)  # fmt: skip
def test_amounts(value: float | None, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_times_that_still_run_have_two_digits_at_most() -> None:
    assert [duration(seconds) for seconds in (8.1e-6, 0.0022, 0.31, 12, 185)] == [
        "8.1 µs", "2.2 ms", "0.31 s", "12 s", "3 min 5 s",
    ]  # fmt: skip


def test_sizes_of_memory_are_reported_in_the_larger_unit():
    assert [size(512 * 2**20), size(31.25 * 2**30)] == ["512.0 MiB", "31.2 GiB"]
