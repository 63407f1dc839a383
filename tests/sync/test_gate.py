"""Readers never meet a writer, writers never starve, nobody waits forever; without the gate the invariant breaks."""

import contextlib
import threading
import time

import pytest

from kit.errors import BadInput, KitError
from kit.sync.serving import Gate, GateTimeout

LIMIT = 20.0


def start(work, name):
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def hammer(reading, writing, seconds):
    """Writers increment all cells one by one; readers look for unequal cells. Return counts of torn reads, reads and writes, and the
    cells."""
    cells, torn, reads, writes = [0] * 64, [], [], []
    end = time.monotonic() + seconds

    def write():
        while time.monotonic() < end:
            with writing():
                value = cells[0] + 1
                for place in range(len(cells)):
                    cells[place] = value
                    if place % 16 == 0:
                        time.sleep(0)  # let other threads run
            writes.append(1)

    def read():
        while time.monotonic() < end:
            with reading():
                seen = []
                for place in range(len(cells)):
                    seen.append(cells[place])
                    if place % 16 == 0:
                        time.sleep(0)
            reads.append(1)
            if len(set(seen)) > 1:
                torn.append(seen)

    threads = [start(write, f"writer {n}") for n in range(2)] + [start(read, f"reader {n}") for n in range(4)]
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return len(torn), len(reads), len(writes), cells


def test_a_second_of_hammering_tears_nothing():
    gate = Gate(timeout_s=LIMIT)
    torn, reads, writes, cells = hammer(gate.reading, gate.writing, 1.0)
    assert torn == 0
    assert reads > 0
    assert writes > 0
    assert cells == [writes] * len(cells)  # no write was lost: each writer was alone, too


def test_the_same_without_the_gate_is_torn():
    torn, _, _, _ = hammer(contextlib.nullcontext, contextlib.nullcontext, 0.5)
    assert torn > 0


def test_readers_are_inside_together():
    gate, both = Gate(timeout_s=LIMIT), threading.Barrier(2)

    def read():
        with gate.reading():
            both.wait(LIMIT)

    threads = [start(read, f"reader {n}") for n in range(2)]
    for thread in threads:
        thread.join(LIMIT)
    assert not both.broken


def test_a_writer_goes_before_readers_who_come_later():
    gate, order = Gate(timeout_s=LIMIT), []

    def write():
        with gate.writing():
            order.append("writer")

    def read():
        with gate.reading():
            order.append("reader")

    with gate.reading():
        writer = start(write, "the writer")
        while not gate._waiting_writers:
            time.sleep(0)
        gate.timeout_s = 0.0
        with pytest.raises(GateTimeout, match="a reader waited 0 s") as caught:
            from_another_thread(gate.reading)
        gate.timeout_s = LIMIT
        assert caught.value.waiting == "reader"
        later = start(read, "the later reader")
        assert order == []
    for thread in (writer, later):
        thread.join(LIMIT)
    assert order == ["writer", "reader"]


def from_another_thread(enter):
    raised = []

    def work():
        try:
            with enter():
                pass
        except KitError as error:
            raised.append(error)

    start(work, "another").join(LIMIT)
    if raised:
        raise raised[0]


@pytest.mark.parametrize(
    ("inside", "outside", "sentence"),
    [
        ("reading", "writing", r"a writer waited 0\.01 s at the gate: MainThread inside"),
        ("writing", "writing", r"a writer waited 0\.01 s at the gate: MainThread inside"),
        ("writing", "reading", r"a reader waited 0\.01 s at the gate: MainThread inside"),
    ],
)
def test_deadlines_name_who_was_inside(inside, outside, sentence):
    gate = Gate(timeout_s=0.01)
    with getattr(gate, inside)():
        with pytest.raises(GateTimeout, match=sentence) as caught:
            from_another_thread(getattr(gate, outside))
        assert caught.value.inside == ("MainThread",)
    # A caller that gave up blocks nobody.
    for way in (gate.reading, gate.writing):
        from_another_thread(way)


def test_who_waits_for_itself_is_reported_at_once():
    gate = Gate(timeout_s=LIMIT)
    for enter in (gate.reading, gate.writing):
        with enter():
            for way in (gate.reading, gate.writing):
                with pytest.raises(BadInput, match="wait for itself"), way():
                    pass
    with gate.writing():
        pass


@pytest.mark.parametrize("way", ["reading", "writing"])
def test_an_error_inside_opens_the_gate_again(way):
    gate = Gate(timeout_s=0.01)
    with pytest.raises(ZeroDivisionError), getattr(gate, way)():
        _ = 1 / 0
    with gate.writing():
        pass
