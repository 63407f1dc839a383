"""Failing reloads of own code, rehearsed without ranks."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import torch

from kit.labs.discover import find
from kit.labs.offload.ranks.rehearsals import restore_fails, without_socket_warnings
from kit.measure.observers.tensors import TensorState
from kit.results import Row, VerdictRow, to_frame
from tests.labs.offload import moved
from tests.labs.offload.test_checks import CONFIG
from tests.labs.parts import Answers


def rehearsed(kind: type[Any]) -> VerdictRow:
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    ctx: Any = SimpleNamespace(chunks=[net], rank=0, world_size=1, device=torch.device("cpu"))
    findings = restore_fails(ctx, kind(ctx), lambda: TensorState(chunks=ctx.chunks))
    about: dict[str, Any] = {
        "run": "r",
        "lab": "offload",
        "cycle": 0,
        "phase": "rehearse_restore",
        "rank": 0,
        "unit": "1",
        "time": 0,
    }
    rows = [Row(metric=metric, value=value, text=text, **about) for metric, value, text in findings]
    rows.append(Row(metric="seconds", value=1.0, **about))
    config = {**CONFIG, "implementation": f"moved:{kind.__name__}"}
    return Answers(to_frame(rows), config, find("offload").load_rules())["restore_failure_is_clean"]


def test_a_reload_that_makes_new_tensors_can_fail_in_the_middle() -> None:
    right = rehearsed(moved.Remade)
    assert (right.passed, right.measured) == (True, 0)
    assert right.why.startswith("tensors are away again after 3 failing reloads")
    wrong = rehearsed(moved.KeepsPart)
    assert (wrong.passed, wrong.measured) == (False, 1)
    assert wrong.why == "bytes of tensors not freed again: 2176 (rank 0: the middle allocation failed)"


def test_the_first_and_the_last_allocation_fail_too() -> None:
    """Code that is right about the middle one alone fails the check."""
    first, last = rehearsed(moved.FirstUnguarded), rehearsed(moved.LastUnguarded)
    assert (first.passed, last.passed) == (False, False)
    assert first.why.startswith(
        "names missing in the error: 2 (rank 0: rank 0 and the tensor in: no memory for 1024 bytes"
    )
    assert "rank 0 and the tensor in: no memory for 64 bytes" in last.why


def test_a_reload_that_makes_fewer_allocations_than_before_is_not_called_silent() -> None:
    row = rehearsed(moved.WarmsUp)
    assert (row.passed, row.measured) == (True, 0)
    assert row.why.startswith("tensors are away again after 2 failing reloads")


def test_what_is_missing_in_the_error_is_counted() -> None:
    row = rehearsed(moved.NamesNoTensor)
    assert row.passed is False
    assert row.why.startswith("names missing in the error: 1 (rank 0: the tensor in: rank 0: no memory for")


def test_a_reload_whose_memory_cannot_be_refused_is_not_judged() -> None:
    row = rehearsed(moved.Unseen)
    assert (row.passed, row.measured) == (None, None)


def test_all_of_what_is_printed_during_a_rehearsal_reaches_a_slow_reader() -> None:
    text, got, stuck = b"a line of torch\n" * 20_000, bytearray(), threading.Event()
    reading, writing = os.pipe()

    def read() -> None:
        stuck.wait(10)  # the pipe is full, and a signal has cut the write
        while data := os.read(reading, 2**16):
            got.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    before, usual = os.dup(2), signal.signal(signal.SIGALRM, lambda *_: stuck.set())
    os.dup2(writing, 2)
    os.close(writing)
    try:
        with without_socket_warnings():
            os.write(2, b"[W] waitForInput\n" + text)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
    finally:
        os.dup2(before, 2)
        os.close(before)
        signal.signal(signal.SIGALRM, usual)
    reader.join(10)
    os.close(reading)
    assert bytes(got) == text
