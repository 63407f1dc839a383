"""Observers of objects made here: each detects its kind of object and leaves nothing behind."""

from __future__ import annotations

import ctypes
import datetime as dt
import gc
import mmap
import os
import random
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.measure import phase
from kit.measure.observers import births, tensors
from kit.measure.observers.births import Births
from kit.measure.observers.tensors import TensorState, held_bytes, live_bytes, tensor_differences
from kit.results.records import ZEROS


@pytest.fixture
def world() -> Iterator[None]:
    """A default group with only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Wrapper(dist.ProcessGroup):
    """A wrapper in none of torch's tables; forwards to a group inside."""

    def __init__(self, inside: Any) -> None:
        super().__init__(0, 1)
        self.__dict__["inside"] = inside

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(self.__dict__["inside"], name)


class Duck:
    """A wrapper that is not even a subclass of ProcessGroup."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inside"], name)


class Holder(torch.nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group


def test_groups_are_followed_however_they_are_made(world: None) -> None:
    with Births() as made:
        plain = dist.new_group([0])
        raw = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dt.timedelta(seconds=5))
        wrapper = Wrapper(plain)
        alive = made.alive()
        assert any(one is plain for one in alive)
        assert any(one is raw for one in alive)
        assert not any(one is wrapper for one in alive)
        dist.destroy_process_group(plain)
        del plain, raw, wrapper, alive
        gc.collect()
        assert made.alive() == []


def test_watching_births_leaves_the_constructors_as_they_were(world: None) -> None:
    before = [vars(kind)["__init__"] for kind in births._classes()]
    with Births():
        assert vars(dist.ProcessGroup)["__init__"] is not before[0]
    assert [vars(kind)["__init__"] for kind in births._classes()] == before
    dist.destroy_process_group(dist.new_group([0]))


def test_what_a_collective_reaches(world: None) -> None:
    group = dist.new_group([0], timeout=dt.timedelta(minutes=7), group_desc="mine")
    with births.doors():
        assert births.reach(group) is group
        assert births.reach(Wrapper(group)) is group
        assert births.reach(Duck(group)) is group
        raw = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dt.timedelta(seconds=5))
        assert births.reach(raw) is raw
        assert births.reach(None) is dist.group.WORLD  # the result when a destroyed wrapper passes None on
        with pytest.raises((AttributeError, ValueError)) as caught:
            births.reach(Wrapper(None))
        assert any(isinstance(one, AttributeError) for one in births.chain(caught.value))
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert value.item() == 1
    assert births.group_facts(group)["description"] == "mine"
    assert births.group_facts(group)["backends"]["cpu"]["timeout_s"] == 420.0
    dist.destroy_process_group(group)


def test_a_name_that_a_later_group_could_not_have(world: None) -> None:
    group = dist.new_group([0])
    assert births.names_ahead() == []
    tables = births._c10d()._world
    count, tables.group_count = tables.group_count, int(group.group_name)
    assert births.names_ahead() == [group.group_name]
    with pytest.raises((RuntimeError, ValueError)):
        dist.new_group([0])
    tables.group_count = count
    dist.destroy_process_group(group)


def test_what_stands_for_a_group(world: None) -> None:
    group = dist.group.WORLD
    assert births.is_group(group)
    assert births.is_group(Wrapper(group))
    assert births.is_group(Duck(group))
    assert not births.is_group(Duck({"a": 1}))
    assert not births.is_group(Holder(group))


@pytest.fixture
def watched() -> Iterator[None]:
    phase.watch_files()
    yield
    phase.watch_files()


def more(before: dict[str, int]) -> dict[str, int]:
    now = phase.holdings()
    return {name: now[name] - before[name] for name in before if name not in phase.BYTES and now[name] != before[name]}


def test_shared_memory_of_three_kinds(watched: None) -> None:
    before = phase.holdings()
    fd = os.memfd_create("of-a-test")
    assert more(before) == {"memfds": 1}
    os.ftruncate(fd, 8192)
    mapped = mmap.mmap(fd, 8192)
    os.close(fd)
    assert more(before) == {"memfds": 1, "shared_maps": 1}  # Python's mmap duplicates the descriptor
    assert phase.holdings()["shared_bytes"] - before["shared_bytes"] == 8192
    mapped.close()
    assert more(before) == {}


def test_a_name_in_shared_memory_outlives_its_map(watched: None) -> None:
    before = phase.holdings()
    segment = shared_memory.SharedMemory(create=True, size=4096)
    segment.close()
    left = more(before)
    segment.unlink()
    assert left["shm_files"] == 1
    assert "shared_maps" not in left


def test_shared_memory_is_one_thing_by_descriptor_and_by_mapping() -> None:
    """It counts once, also after its name or its descriptor is gone."""
    before = phase.shared_memory()
    fd = os.memfd_create("of-a-test")
    os.ftruncate(fd, 8192)
    named = shared_memory.SharedMemory("of-a-test", create=True, size=4096)
    private = mmap.mmap(fd, 8192, access=mmap.ACCESS_COPY)  # mmap duplicates the descriptor
    os.close(fd)
    named.unlink()
    new = {place: one for place, one in phase.shared_memory().items() if place not in before}
    assert sorted(new.values()) == [(4096, "/dev/shm/of-a-test"), (8192, "/memfd:of-a-test")]
    view = memoryview(private)
    assert phase.shared_at(ctypes.addressof(ctypes.c_char.from_buffer(view))) in new
    assert phase.shared_at(id(view)) is None
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        anonymous, mapped = mmap.mmap(-1, 4096), mmap.mmap(file.fileno(), 4096)
        read = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
        assert len(phase.shared_memory().keys() - before.keys()) == 4
        anonymous.close()
        mapped.close()
        read.close()
    del view
    private.close()
    named.close()
    assert phase.shared_memory() == before


def test_files_that_stay_in_a_temporary_folder(watched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "_made", type(phase._made)())  # files of earlier tests may disappear at any time
    before = phase.holdings()
    folder = tempfile.mkdtemp()
    (Path(folder) / "one").write_text("1")
    (Path(folder) / "two").write_text("2")
    assert more(before) == {"temp_files": 1}
    (Path(folder) / "one").unlink()
    (Path(folder) / "two").unlink()
    Path(folder).rmdir()
    assert more(before) == {}
    with tempfile.TemporaryFile():
        pass
    assert more(before) == {}


def test_a_file_without_a_name_does_not_make_its_folder_one(
    watched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python opens the folder for an unnamed file, and one temporary folder may lie inside another."""
    monkeypatch.setattr(phase, "_made", set())
    monkeypatch.setattr(phase, "_places", ["/tmp/", f"{tmp_path}/"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tempfile.TemporaryFile():
        assert phase.temp_files() == []
    (tmp_path / "one").write_text("1")
    assert phase.temp_files() == [str(tmp_path / "one")]


def test_child_processes_are_counted(watched: None) -> None:
    import subprocess

    before = phase.holdings()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert more(before)["children"] == 1
    child.communicate(b"\n")
    assert more(before) == {}


class Strange:
    number = 1

    def method(self) -> int:
        return 1


def test_names_that_were_replaced() -> None:
    module: Any = types.ModuleType("stranger")
    module.function, module.number, module.Class = lambda: 1, 3, type("Class", (Strange,), {"own": lambda self: 2})
    module.Class.__module__ = "stranger"
    sys.modules["stranger"] = module
    try:
        before = births.take_names("stranger")
        assert births.replaced_names(before) == []
        module.number, module.Class.number = 4, 5
        assert births.replaced_names(before) == []
        for owner, name, title in ((module, "function", "function"), (module.Class, "own", "Class.own")):
            plain = vars(owner)[name]
            setattr(owner, name, lambda: 2)
            assert births.replaced_names(before) == [f"stranger.{title}"]
            setattr(owner, name, plain)
            assert births.replaced_names(before) == []
        del module.function
        assert births.replaced_names(before) == ["stranger.function"]
    finally:
        del sys.modules["stranger"]


def test_random_numbers_that_were_drawn() -> None:
    before = tensors.generators()
    assert tensors.generators() == before
    torch.rand(1)
    assert [name for name, one in tensors.generators().items() if one != before[name]] == ["torch"]
    state = random.getstate()
    random.random()
    assert tensors.generators()["python"] != before["python"]
    random.setstate(state)
    assert tensors.generators()["python"] == before["python"]


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.flat = torch.zeros(64)
        weight: Any = self.net[0].weight
        weight.main_grad = self.flat.view(8, 8)
        self.net(torch.randn(4, 8)).sum().backward()
        self.optimizer.step()

    def state(self) -> TensorState:
        return TensorState(chunks=[self.net], optimizer=self.optimizer, job={"flat": self.flat})


def bytes_by_kind(job: Job) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for name, kind, size in job.state().resident("cpu"):
        assert name
        sizes[kind] += size
    return sizes


def test_a_state_is_all_of_it_by_kind() -> None:
    job = Job()
    kinds = {one.name: one.kind for one in job.state().tensors}
    assert kinds["chunks.0.0.weight"] == kinds["chunks.0.1.running_mean"] == "weights"
    assert kinds["chunks.0.0.weight.grad"] == kinds["chunks.0.0.weight.main_grad"] == kinds["job.flat"] == "grads"
    assert kinds["optimizer.state.0.exp_avg"] == kinds["optimizer.state.0.step"] == "optimizer"
    elements = sum(param.numel() for param in job.net.parameters())
    sizes = bytes_by_kind(job)
    assert sizes["grads"] == 4 * (elements + 64)
    assert sizes["optimizer"] == 4 * (2 * elements + len(list(job.net.parameters())))
    job.net[0].weight.untyped_storage().resize_(0)
    assert bytes_by_kind(job)["weights"] == sizes["weights"] - 4 * 64


def test_the_numbers_of_a_schedule_belong_to_the_state() -> None:
    job = Job()
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=2)
    before = TensorState(optimizer=job.optimizer, schedule=schedule).prints()
    schedule.last_epoch += 3
    (difference,) = tensor_differences(before, TensorState(optimizer=job.optimizer, schedule=schedule).prints())
    assert (difference.name, difference.what) == ("schedule.last_epoch", "other numbers")


def test_a_storage_has_every_name_that_leads_to_it() -> None:
    job = Job()
    names = job.state().names_by_storage()[job.net[0].weight.untyped_storage()._cdata]
    assert names == ["chunks.0.0.weight", "optimizer.param_groups.0.params.0"]


def test_held_bytes_count_shared_memory_once() -> None:
    before = held_bytes()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(2**21)
        memory = mmap.mmap(file.fileno(), 2**21)
        memory[: 2**20] = bytes(2**20)  # the other half is a peer's
        kept = [torch.zeros(2**18), torch.frombuffer(memory, dtype=torch.uint8)]
        assert held_bytes() - before == 2**21
        del kept
        memory.close()
    assert held_bytes() == before


def test_what_is_not_as_it_was_is_named() -> None:
    job = Job()
    before = job.state().prints()
    assert tensor_differences(before, job.state().prints()) == []
    job.net[0].weight.data[3, 4] += 0.5
    (one,) = tensor_differences(before, job.state().prints())
    assert (one.name, one.kind, one.what) == ("chunks.0.0.weight", "weights", "other numbers")
    assert one.largest == pytest.approx(0.5)
    job.net[0].weight.data[3, 4] -= 0.5
    job.optimizer.state[job.net[0].weight]["exp_avg"] = torch.zeros(8, 8, dtype=torch.float64)
    assert [str(one) for one in tensor_differences(before, job.state().prints()) if one.kind == "optimizer"] == [
        "optimizer optimizer.state.0.exp_avg: type torch.float32 became torch.float64"
    ]


def test_a_tensor_that_came_back_as_zeros_is_said_to_be_that() -> None:
    job = Job()
    before = job.state().prints()
    gradient: Any = job.net[0].weight.grad
    gradient.zero_()
    job.optimizer.param_groups[0]["lr"] = 0.0  # a plain value is no tensor
    value, zeros = sorted(tensor_differences(before, job.state().prints()), key=lambda one: one.kind, reverse=True)
    assert (value.kind, value.what) == ("optimizer", "other numbers")
    assert (zeros.kind, zeros.what) == ("grads", ZEROS)
    assert zeros.largest
    assert str(zeros).endswith(f".grad: came back as zeros, largest difference {zeros.largest:.3g}")
    gradient[0, 3] = 1e-20
    (other,) = [one for one in tensor_differences(before, job.state().prints()) if one.kind == "grads"]
    assert other.what == "other numbers"


def test_a_tensor_that_became_another_one_is_not_called_gone() -> None:
    job = Job()
    before = job.state().prints()
    moments = job.optimizer.state
    moments[job.net[0].weight]["exp_avg_sq"] = moments[job.net[0].weight]["exp_avg"]
    del moments[job.net[0].bias]["exp_avg"]
    state = job.state()
    texts = [difference.what for difference in tensor_differences(before, state.prints(), shared=state.shared)]
    assert texts == [
        "is the same tensor as optimizer.state.0.exp_avg now",
        "is gone, or became part of another tensor",
    ]


def test_the_numbers_of_an_optimizer_belong_to_the_state() -> None:
    job = Job()
    before = job.state().prints()
    group = job.optimizer.param_groups[0]
    group["lr"], group["betas"] = group["lr"] / 2, (0.9, 0.99)
    group["amsgrad"] = True
    assert [str(difference) for difference in tensor_differences(before, job.state().prints())] == [
        "optimizer optimizer.param_groups.0.lr: other numbers, largest difference 0.0005",
        "optimizer optimizer.param_groups.0.betas: other numbers",
        "optimizer optimizer.param_groups.0.amsgrad: other numbers",
    ]
    group["weight_decay"] = int(group["weight_decay"]) + 1e-2  # equal numbers of another type are equal
    group["eps"] = float(group["eps"])
    assert len(tensor_differences(before, job.state().prints())) == 3


def test_bytes_that_come_after_a_moment_are_late() -> None:
    job = Job()
    before = job.state().prints()
    assert tensors.late(before, job.state().samples()) == []
    weight = job.net[0].weight.data
    there = weight.clone()
    weight.zero_()
    arrived = job.state().samples()
    weight.copy_(there)
    assert tensor_differences(before, job.state().prints()) == []
    assert tensors.late(before, arrived) == ["chunks.0.0.weight"]
    weight.untyped_storage().resize_(0)  # a moment without memory is no crash
    arrived = job.state().samples()
    weight.untyped_storage().resize_(there.nbytes)
    weight.copy_(there)
    assert tensors.late(before, arrived) == ["chunks.0.0.weight"]


def test_a_view_that_is_no_view_any_more_is_seen_though_its_numbers_are_right() -> None:
    job = Job()
    before = job.state().prints()
    weight: Any = job.net[0].weight
    weight.main_grad = weight.main_grad.clone()
    assert [one.what for one in tensor_differences(before, job.state().prints()) if one.name.endswith("main_grad")] == [
        "was a part of job.flat and lies in other memory now"
    ]


def test_gradients_that_may_be_dropped() -> None:
    job = Job()
    before = job.state().prints()
    for param in job.net.parameters():
        param.grad = None
    dropped = job.state().prints()
    assert {one.kind for one in tensor_differences(before, dropped)} == {"grads"}
    assert tensor_differences(before, dropped, zeroed=True) == []
    for param in job.net.parameters():
        param.grad = torch.zeros_like(param)
    assert tensor_differences(before, job.state().prints(), zeroed=True) == []
    job.net[0].bias.grad = torch.full((8,), 1e-9)
    assert [one.name for one in tensor_differences(before, job.state().prints(), zeroed=True)] == [
        "chunks.0.0.bias.grad"
    ]
    job.net[0].bias.data += 1
    assert len(tensor_differences(before, job.state().prints(), zeroed=True)) == 2


def test_tensors_that_somebody_keeps() -> None:
    gc.collect()
    before = live_bytes()
    kept = [torch.zeros(1000), torch.zeros(1000)[:10]]
    assert live_bytes() - before == 8000
    del kept
    assert live_bytes() == before


class Tombstone:
    """In the place of a released group: every use raises, also of a name that it does not have."""

    __slots__ = ("name", "unset")

    def __init__(self, name: str, kept: torch.Tensor) -> None:
        self.name = [name, kept]

    def __getattr__(self, what: str) -> Any:
        raise RuntimeError(f"{self.name[0]} is released; {what} needs a reload first")


def test_tensors_are_found_past_an_object_whose_every_use_raises() -> None:
    state = TensorState(job={"group": Tombstone("tp", torch.ones(3)), "weight": torch.zeros(5)})
    assert sorted(tensor.tensor.numel() for tensor in state.tensors) == [3, 5]
