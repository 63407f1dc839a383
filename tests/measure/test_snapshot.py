"""The file of a memory snapshot. PyTorch's two calls are stand-ins here, since they need a CUDA build and a GPU."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from kit.measure.phase import History

Calls = list[object]


@pytest.fixture
def calls(monkeypatch) -> Calls:
    """Stand-ins for the two calls: one records its arguments; the other writes a file directly to its final path, as torch does."""
    seen: Calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: seen.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"a snapshot"))
    return seen


def test_a_history_is_kept_and_the_last_one_written_stays(calls, tmp_path):
    history = History(tmp_path / "memory" / "rank3.pickle")
    history.start()
    assert history.write()
    assert history.write()
    history.stop()
    assert [path.name for path in history.file.parent.iterdir()] == ["rank3.pickle"]
    assert history.file.read_bytes() == b"a snapshot"
    assert calls == [{"max_entries": 100_000, "stacks": "python"}, {"enabled": None}]


def test_one_that_cannot_be_written_is_reported_and_leaves_no_half(calls, tmp_path, monkeypatch, capsys):
    def full(path: str) -> None:
        Path(path).write_bytes(b"a sna")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    assert not History(tmp_path / "rank0.pickle").write()
    assert not list(tmp_path.iterdir())
    assert "No space left on device" in capsys.readouterr().out


def test_torch_takes_what_is_asked_of_it():
    """Checks signatures only, since torch refuses any call without a GPU."""
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("file")
    recorded = inspect.signature(torch.cuda.memory._record_memory_history)
    recorded.bind(max_entries=1, stacks="python")
    recorded.bind(enabled=None)
    assert {"max_entries", "stacks", "enabled"} <= set(recorded.parameters)
