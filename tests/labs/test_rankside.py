"""The rank side of a lab, in this process: when it writes its memory history. PyTorch's two calls are replaced, since there is no GPU."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from kit.errors import BadInput
from kit.labs import rankside
from kit.labs.definition import LabConfig
from kit.labs.share.lab import ShareConfig
from kit.world import channel
from tests.holdings import wait_for

Calls = list[Any]


class Phases:
    """A lab of this test."""

    def __init__(self, ctx: rankside.Context) -> None:
        self.ctx = ctx

    def fine(self, cycle: int) -> None:
        self.ctx.record("cycle", cycle)

    def broken(self, cycle: int) -> None:
        raise ValueError(f"broken in cycle {cycle}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    seen: Calls = []
    monkeypatch.setenv("KIT_RANK", "0")
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: seen.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text(str(len(seen))))
    yield seen
    rankside._session = None


class Typed(LabConfig):
    """A lab that fixes its dtype."""

    dtype = "float32"


def begin(
    config: type[LabConfig] = LabConfig,
    device: str = "cpu",
    phases: str = f"{__name__}:Phases",
    settings: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> None:
    role = {"name": "", "ranks": [0], "phases": phases}
    where: dict[str, Any] = {"devices": [device], "nodes": [0], "world_sizes": [1], "meeting": "here"}
    rankside.begin(
        roles=[role],
        config_type=f"{config.__module__}:{config.__qualname__}",
        config={**settings},
        fault=None,
        **where,
        **more,
    )


@pytest.mark.parametrize(("settings", "passes_over"), [({}, True), ({"scheduler": "mine:desk"}, False)])
def test_walks_over_all_objects_find_what_was_imported_where_own_code_runs(
    calls: Calls, settings: dict[str, str], passes_over: bool
) -> None:
    def frozen() -> int:
        gc.collect()  # moves immortal objects to the frozen ones in Python 3.12
        return gc.get_freeze_count()

    gc.unfreeze()
    before = frozen()
    begin(ShareConfig, phases="kit.labs.share.ranks.observer:FarObserver", settings=settings)
    assert (frozen() > before) is passes_over
    rankside.end()
    assert frozen() == before


def test_an_observer_of_another_machine_ends_with_the_step_of_a_loop_that_failed(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_FOLDER", str(tmp_path))
    begin(ShareConfig, phases="kit.labs.share.ranks.observer:FarObserver")
    rankside.open_step(name="shared")
    folder = Path(rankside.act(method="watch", args={"names": {}, "machine": 0, "on_gpus": False}))
    rankside.act(method="start", args={})
    assert any(thread.name == "kit-observer" for thread in threading.enumerate())
    rankside.close_step()
    assert wait_for(lambda: not any(thread.name == "kit-observer" for thread in threading.enumerate()))
    assert not folder.exists()


@pytest.mark.parametrize(("config", "device", "within"), [(Typed, "cuda:0", "highest"), (Typed, "cpu", "high")])
def test_float32_is_computed_as_float32_on_a_gpu_and_the_callers_choice_comes_back(
    calls: Calls, config: type[LabConfig], device: str, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        begin(config, device)
        assert torch.get_float32_matmul_precision() == within
        rankside.end()
        assert torch.get_float32_matmul_precision() == "high"
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
        if device == "cpu":
            begin(config, device)
            rankside.end()
        else:
            with pytest.raises(BadInput, match="NVIDIA_TF32_OVERRIDE=1 makes float32 products TF32"):
                begin(config, device)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_history_is_kept_until_the_end_and_written_then(calls: Calls, tmp_path: Path) -> None:
    begin(snapshots=str(tmp_path / "memory"))
    rankside.run_phase(cycle=1, name="fine")
    assert not (tmp_path / "memory").exists()
    rankside.end()
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["rank0.pickle"]
    assert [call.get("enabled", "all") for call in calls] == ["all", None]


def test_it_is_written_when_a_phase_raises(calls: Calls, tmp_path: Path) -> None:
    begin(snapshots=str(tmp_path))
    with pytest.raises(ValueError, match="broken in cycle 2"):
        rankside.run_phase(cycle=2, name="broken")
    at_once = (tmp_path / "rank0.pickle").stat().st_ino
    assert calls[-1] == {"enabled": None}
    rankside.memory_history()  # as the notebook side asks of every rank that still answers
    assert (tmp_path / "rank0.pickle").stat().st_ino == at_once  # the phase's snapshot is not overwritten
    assert len(calls) == 2


def test_an_error_is_not_hidden_by_a_snapshot_that_fails(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", refuse)
    begin(snapshots=str(tmp_path))
    with pytest.raises(ValueError, match="broken in cycle 2"):
        rankside.run_phase(cycle=2, name="broken")
    assert not list(tmp_path.iterdir())


def test_without_it_nothing_is_asked_of_torch(calls: Calls, tmp_path: Path) -> None:
    begin()
    rankside.run_phase(cycle=1, name="fine")
    with pytest.raises(ValueError, match="broken"):
        rankside.run_phase(cycle=2, name="broken")
    rankside.end()
    assert calls == []
    assert not list(tmp_path.iterdir())


def test_what_a_phase_measured_is_published_whatever_comes_after_it(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(rankside, "between_phases", refuse)
    begin()
    channel.take_reports()
    with pytest.raises(OSError, match="no descriptor"):
        rankside.run_phase(cycle=1, name="fine")
    assert "seconds" in {json.loads(row)["metric"] for row in channel.take_reports()}


def test_a_record_says_what_it_is_about(calls: Calls) -> None:
    begin()
    channel.take_reports()
    context = rankside._running().context
    context.record("error", 0.5, tensor="w", step=torch.tensor(3))
    context.record("digest", None, text="ab", start=1.0)
    error, digest = (json.loads(row) for row in channel.take_reports())
    assert (error["value"], error["ids"]) == (0.5, {"tensor": "w", "step": 3})
    assert not {"text", "start"} & set(error)
    assert (digest["value"], digest["text"], digest["start"]) == (None, "ab", 1.0)
    assert digest["time"] > digest["start"]
    with pytest.raises(BadInput, match=r"the id step=1\.5 is neither text, a whole number nor a list of whole numbers"):
        context.record("error", 0.5, step=1.5)  # type: ignore[arg-type]
