"""Failing reloads of own code, rehearsed without ranks."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import torch

from kit.labs.offload.ranks.rehearsals import restore_fails, without_socket_warnings
from kit.measure.observers.tensors import TensorState
from kit.results import VerdictRow
from tests.labs.offload import moved
from tests.labs.offload.test_checks import answers


def rehearsed(kind: type[Any]) -> VerdictRow:
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    ctx: Any = SimpleNamespace(chunks=[net], rank=0, world_size=1, device=torch.device("cpu"))
    findings = restore_fails(ctx, kind(ctx), lambda: TensorState(chunks=ctx.chunks))
    rows = [(0, "rehearse_restore", finding.metric, finding.value) for finding in findings]
    rows.append((0, "rehearse_restore", "seconds", 1.0))
    return answers(rows, implementation=f"moved:{kind.__name__}")["restore_failure_is_clean"]


def test_a_reload_that_makes_new_tensors_can_fail_in_the_middle() -> None:
    right = rehearsed(moved.Remade)
    assert (right.passed, right.measured) == (True, 0)
    wrong = rehearsed(moved.KeepsPart)
    assert (wrong.passed, wrong.why) == (False, "bytes of tensors not freed again: 2176 (rank 0)")


def test_what_is_missing_in_the_error_is_counted() -> None:
    row = rehearsed(moved.NamesNoTensor)
    assert (row.passed, row.why) == (False, "names missing in the error: 1 (rank 0)")


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
