"""The bench of weight transfer: each limit is compared with the right measurement; sizes and names are those of the weights."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import kit
from kit.errors import BadInput
from kit.labs.bench_sync import lab, parts
from kit.labs.bench_sync.lab import HOST, LAB, BenchSyncConfig, Shape, shape_of
from kit.labs.bench_sync.ranks import stalls
from kit.labs.bench_sync.ranks import ways as onranks
from kit.labs.sync.lab import SyncConfig

CONFIG = BenchSyncConfig()
SHAPES = {key: shape_of(CONFIG, key) for key in ("model", "small", "large")}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: str(shape.name))
def test_sizes_are_those_of_the_weights(shape: Shape) -> None:
    elements = sum(torch.Size(shape_).numel() for shape_ in onranks.shapes_of(shape.arguments()))
    assert shape.size() == 2 * elements


def test_noise_differs_from_tensor_to_tensor() -> None:
    made = onranks.populated_tensors({"count": 3, "size": 4096}, filled=True)
    first, second, third = made.values()
    assert first.numel() == 2048
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert not any(
        tensor.any() for tensor in onranks.populated_tensors({"count": 3, "size": 4096}, filled=False).values()
    )


def test_ways_are_reported_in_words() -> None:
    assert parts.way_title("broadcast@16") == "broadcast, buckets of 16 MiB"
    assert parts.way_title("shm+cache") == "shm, by way of the cache"
    assert parts.way_title("shm+sha256") == "shm, verified by sha256"
    assert parts.way_title("shm+expand+one") == "shm, from the cache, to the first alone"
    assert parts.way_title("file:dcp") == "dcp"


def reported(**seconds: list[float]) -> dict[str, Any]:
    return {"bytes": 10**9, "automatic": 2**22, "seconds": seconds}


def test_ratios_are_taken_turn_by_turn_against_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' samples are made up."""
    made = reported(
        memcpy=[1.0, 2.0],
        copies=[1.5, 2.5],
        shm=[2.0, 2.0],
        serialize=[9.0, 9.0],
        broadcast=[12.0, 10.0],
        rendezvous=[20.0, 20.0],
    )
    made["seconds"] |= {
        "shm+cache": [4.0, 4.0],
        "shm+whole": [1.0, 1.0],
        "shm+whole+fresh": [3.0, 3.0],
        "shm+expand": [1.0, 3.0],
        "per-tensor": [8.0, 8.0],
        "broadcast@4": [10.0, 10.0],
    }
    monkeypatch.setattr(parts, "ask_rates", lambda *_, **__: made)
    bench: Any = SimpleNamespace(config=SimpleNamespace(buckets_mib=[4]))
    rows = {row.what.partition(": ")[2]: row for row in parts.compare_transports(bench, SHAPES["small"])}
    over = rows["shm, time over memcpy's"]
    assert (list(over.values), over.metric) == ([2.0, 1.0], "small_shm_over_memcpy")
    group = rows["shm over the best by a group, time"]
    assert (group.median, group.metric, group.note) == (0.25, "shm_over_group", "that is per-tensor")
    automatic = rows["broadcast over the best of per-tensor and fixed sizes, time"]
    assert (automatic.median, automatic.metric) == (1.375, "automatic_over_fixed")
    assert automatic.note == "that is per-tensor; automatic buckets are of 4 MiB"
    assert not {"shm_over_copies", "expand_over_memcpy"} & {row.metric for row in rows.values()}
    large = {row.metric: row for row in parts.compare_transports(bench, SHAPES["large"])}
    assert list(large["shm_over_copies"].values) == pytest.approx([4 / 3, 0.8])
    assert list(large["expand_over_memcpy"].values) == [1.0, 1.5]


def test_two_receivers_are_compared_with_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reported(memcpy=[1.0], shm=[3.0], broadcast=[9.0], serialize=[8.0])
    made["seconds"]["shm+one"] = [2.0]
    monkeypatch.setattr(parts, "ask_rates", lambda *_, **__: made)
    bench: Any = None
    rows = {row.metric: row for row in parts.two_receivers(bench, SHAPES["large"])}
    assert rows["two_over_one"].values == [1.5]


@pytest.mark.parametrize(("cores", "values"), [(5, ()), (6, [1.5])])
def test_a_row_for_free_cores_has_values_only_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, cores: int, values: Any
) -> None:
    monkeypatch.setattr(parts, "ask_rates", lambda *_, **__: reported(**{"shm": [2.0], "shm+xxh3": [3.0]}))
    monkeypatch.setattr(parts.os, "sched_getaffinity", lambda _: set(range(cores)))
    rows = {row.metric: row for row in parts.cost_of_digests(made_up({"xxh3": []}, verify="xxh3"), SHAPES["large"])}
    assert (rows["verified"].values, rows["verified_beside"].values) == ([1.5], values)
    assert bool(rows["verified_beside"].note) == (cores == 5)


def made_up(*answers: Any, **config: Any) -> Any:
    """A bench with a World whose ranks answer this."""

    @contextlib.contextmanager
    def world(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(call=lambda *_, **__: list(answers))

    return SimpleNamespace(world=world, config=BenchSyncConfig(**config))


def test_two_terms_give_both_times() -> None:
    first, last = Shape(name="", count=4096, bytes=4096), Shape(name="", count=64, bytes=2**22)
    times = [shape.count * 3e-6 + shape.size() * 2e-10 for shape in (first, last)]
    assert parts.terms_of(*times, first, last) == pytest.approx((3e-6, 2e-10))


def test_two_terms_predict_a_third_size_turn_by_turn() -> None:
    first, between, last = 16 * 2**20, 64 * 2**20, 256 * 2**20
    counts = {first: 4096, between: 1024, last: 64}
    times = {size: counts[size] * 2e-6 + size * 1e-10 for size in counts}
    taken = {first: [1.0, 1.0], between: [1.0, 3.0], last: [1.0, 1.0]}
    ways = ("memcpy", *parts.TERM_WAYS)
    answer = [{way: [times[size] * factor for factor in taken[size]] for way in ways} for size in counts]
    rows = {row.what: row for row in parts.two_terms(made_up(answer))}
    assert list(rows["two terms: shm, for each tensor"].values) == pytest.approx([2e-6, 2e-6])
    assert list(rows["two terms: shm, for each GB"].values) == pytest.approx([0.1, 0.1])
    assert "10.00 GB/s, and memcpy" in rows["two terms: shm, for each GB"].note
    off = rows["two terms: shm, 64 MiB in tensors of 64 KiB predicted, off by"]
    assert (off.metric, list(off.values)) == ("terms_predict", pytest.approx([1.0, 3.0]))


def test_a_pause_is_the_longest_time_without_a_forward() -> None:
    spans = [(0.0, 1.0), (5.0, 6.0), (6.5, 7.0), (9.0, 9.5), (20.0, 21.0)]
    assert stalls.longest_gap(spans, 5.5, 9.2) == 2.0
    assert stalls.longest_gap(spans, 0.5, 9.2) == 4.0
    assert stalls.longest_gap(spans, 9.6, 12.0) == 10.5  # it began before the sync and ended after it
    assert stalls.longest_gap([], 1.0, 4.0) == 3.0


def test_pauses_are_shares_of_the_time_of_a_sync() -> None:
    sender = {
        "staged": [[2.0, 0.5, 7, 0.1], [4.0, 0.4, 9, 0.3]],
        "expansion": [[3.0, 1.0, 3, 1.0], [3.0, 1.0, 3, 1.0]],
        "adopted expansion": [[1.5, 1.5, 3, 0.5], [3.0, 1.5, 3, 1.0]],
        HOST: [],
    }
    rows = {row.what: row for row in parts.pauses(made_up(sender, {HOST: [1.0, 2.0]}))}
    staged = rows["a sync of 256 MiB, staged: share without a forward"]
    assert (staged.metric, list(staged.values)) == ("staged_pause", [25.0, 10.0])
    assert staged.note == "8 forwards meanwhile by the same replica"
    other = rows["a sync of 256 MiB, expansion: share without a forward"]
    assert (other.metric, other.note) == ("pause", "3 forwards meanwhile by another replica")
    assert list(next(row for row in rows.values() if row.metric == "adopted_over_copied").values) == [0.5, 1.0]


def test_copies_of_an_offloaded_trainer_are_those_that_the_lab_counted() -> None:
    counted = {"own": [1.0, 1.1, 1.2], "cache": [0.0, 0.25, 0.1]}

    def run(name: str, out: str, *, arena: Any, **settings: Any) -> Any:
        SyncConfig(arena=arena, **settings)  # the lab has all of them
        rows = [{"metric": "host_copies", "value": value} for value in counted[arena]]
        frame = pd.DataFrame([*rows, {"metric": "offloaded_left", "value": 7.0}])
        assert (name, out) == ("sync", arena)
        return SimpleNamespace(frame=lambda: frame)

    bench: Any = SimpleNamespace(config=CONFIG, lab=run)
    own, cache = parts.host_copies(bench)
    assert (own.metric, list(own.values)) == ("copies", counted["own"])
    assert (cache.metric, list(cache.values)) == ("cached_once", counted["cache"])
    assert cache.note == "on the host 1.10 times"


@pytest.mark.slow
def test_ranks_measure_pauses_and_shapes(nothing_left: None) -> None:
    with kit.World(3, device="cpu") as world:
        made = world.call(
            f"{parts.STALLS}:stalls", mib=8, each_mib=4, meeting=f"bench-{secrets.token_hex(8)}", rounds=1
        )
        shapes = [{"size": 4096, "count": 4}, {"size": 8192, "count": 2}]
        asked = {"meeting": f"bench-{secrets.token_hex(8)}", "ways": ["memcpy", "shm+expand", "shm+cache"], "rounds": 2}
        seconds = world.call(f"{parts.WAYS}:seconds_by_shape", shapes=shapes, **asked)[0]
    assert made[0].pop(HOST)
    for total, paused, served, read in (turns[0] for turns in made[0].values()):
        assert min(paused, total) > 0  # each is of another rank, which a busy machine may hold up
        assert served >= 0
        assert read > 0
    assert made[0]["staged"][0][2] > 0
    assert [len(by_way["shm+expand"]) for by_way in seconds] == [2, 2]


@pytest.mark.slow
def test_turns_do_not_map_memory_again(nothing_left: None) -> None:
    """A new mapping costs as much as a copy, and only the row about it may have one."""
    with kit.World(3, device="cpu") as world:
        asked = {"meeting": f"bench-{secrets.token_hex(8)}", "rounds": 4}
        _, receiver, sleeper = world.call("tests.sync.ranks.mappings:count_mappings", **asked)
    assert receiver == {"ways": 3, "stalls": 3}  # a cache of which a version is active has two
    assert sleeper == {"ways": 0, "stalls": 2}


@pytest.mark.parametrize(("device", "first"), [("cuda", "gpus.ipc"), ("cpu", "model.transports")])
def test_gpu_rows_come_first_where_there_is_a_gpu(device: Any, first: str) -> None:
    phases = [step.phase for step in LAB.plan(BenchSyncConfig(device=device))]
    assert phases[0] == first
    assert {"gpus.ipc", "gpus.shm", "gpus.broadcast", "digests", "growth.bytes"} < set(phases)


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "free_memory", lambda: 2**30)
    bench: Any = None
    with pytest.raises(BadInput, match=r"64 x 4 MiB needs 1\.8 GiB here, but only 1\.0 GiB are free"):
        parts.ask_rates(bench, SHAPES["large"], ["shm"], receivers=2)


def test_files_lie_in_memory_where_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lab, "IN_MEMORY", tmp_path)
    monkeypatch.setattr(lab.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert lab.place_for(799) == tmp_path
    assert lab.place_for(800) is None
