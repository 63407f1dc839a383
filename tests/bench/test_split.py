"""`kit bench split`: a small run of every part on real ranks, a part of the grid config by config, and how rows are made of samples."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kit.bench import split
from kit.bench.session import Book, Session, conduct, order, read_rows
from kit.bench.split import QUICK, Job, Sizes, onranks
from kit.errors import KitError
from kit.labs.configure import configure
from kit.labs.split import LAB
from kit.labs.split.config import RECIPES
from kit.train.batch import counts, cuts
from kit.world import World

TINY = Job(size="tiny", length=24, microbatches=5)
ONE = {"only": {"ranks": 2, "chunks": [1, 5], "level": "tokens"}}


def covering() -> list[str]:
    """As few configs as a greedy choice takes for every layout to meet every mask, switch and batching."""
    left = {pair for name in GRID for pair in pairs(name)}
    chosen: list[str] = []
    while left:
        chosen.append(max(GRID, key=lambda name: len(pairs(name) & left)))
        left -= pairs(chosen[-1])
    return [name for name in GRID if name in chosen]


def pairs(name: str) -> set[tuple[str, str]]:
    """A config as pairs of its layout and one thing more; switches that are off count too."""
    layout, *words = name.split(", ")
    words += [f"no {switch}" for switch in split.SWITCHES if switch not in words]
    return {(layout, word) for word in words}


GRID = split.every_config()
PART = covering()  # `kit bench split` runs all


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_small_run_has_every_row(tmp_path):
    few = Sizes(
        job=TINY,
        pipeline=replace(TINY, layers=2),
        rounds=2,
        trials=1,
        peak_steps=1,
        loss=(2, 64),
        loss_rounds=2,
        grid=ONE,
    )
    assert conduct("split", few, out=tmp_path / "rows.jsonl", device="cpu") == 0
    said = read_rows(tmp_path / "rows.jsonl")
    assert said["bench"] == "split"
    rows = said["rows"]
    assert not [row for row in rows if row["median"] is None]

    def named(*parts):
        (found,) = [row for row in rows if all(part in row["what"] for part in parts)]
        return found

    for backend in ("megatron dp2", "fsdp2 dp2"):
        for what, limit in (("1 call over", 1.02), ("5 calls over", 1.05), ("empty control", None)):
            row = named(backend, f": {what}" if limit else "24: plain over plain")
            assert (row["limit"], row["n"]) == (limit, 2)
        assert within(named(backend, "a step")) < 1e-5
        assert named(backend, "peak, 5 calls over")["limit"] == 1.01
        assert named(backend, "peak, 1 call over")["median"] == pytest.approx(1, abs=0.2)
    assert named("pp2", "1 call over")["ceiling"] == 1
    assert named("pp2", "every microbatch")["ceiling"] == pytest.approx(10 / 6)
    assert within(named("pp2", "a step")) < 1e-5
    assert named("ep2", "corrected over uncorrected")["note"].startswith("10 forward passes of a microbatch against 5")
    assert [named(f", {recipe}: with metrics")["limit"] for recipe in RECIPES] == [1.15] * len(RECIPES)
    assert named("grid: only")["median"] == 0


def within(row):
    return float(row["note"].partition("are within ")[2].partition(" ")[0])


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    with World(request.param, logs=tmp_path_factory.mktemp("logs"), preload=("megatron.core",)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.drawn(6, of="grid")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "name"), [(GRID[name]["ranks"], name) for name in PART], indirect=["world"])
def test_no_check_fails_on_the_grid(world, name, tmp_path):
    row = split.judged(Session("cpu", tmp_path, Book("split")), name, GRID[name], world, tmp_path / "run")
    assert row.met is True, row.note
    silent = row.note.partition("not measured: ")[2]
    assert silent == ("" if "fsdp2" in name else "backends_agree, oracle" if "ep2" in name else "backends_agree")


def test_the_part_that_is_run_here_has_every_pair():
    assert set().union(*map(pairs, PART)) == set().union(*map(pairs, GRID))
    assert len(PART) < len(GRID) / 2


def test_the_grid_is_every_combination():
    assert len(GRID) == 3 * 3 * 4 + 3 * 2 * 4 + 2 * 3 * 3
    configs = [configure(LAB, {**split.COMMON, **config}, None) for config in GRID.values()]
    assert len(set(configs)) == len(GRID)
    assert {config.chunks for config in configs} == {(1, 2, 5, 0)}
    assert {config.levels for config in configs} == {("tokens", "sequences")}
    megatron = [config for config in configs if config.backend == "megatron"]
    switches = Counter((config.overlap_grad_reduce, config.distributed_optimizer) for config in megatron)
    assert switches == dict.fromkeys(itertools.product((False, True), repeat=2), 15)


class FakeWorld:
    """Has nothing but a way to start anew."""

    restarts = 0

    def restart(self):
        self.restarts += 1


def test_a_config_that_breaks_is_a_row_that_says_so_and_costs_the_ranks(tmp_path):
    def breaks(*_, **__):
        raise KitError("rank 1 died\nand more")

    world = FakeWorld()
    row = split.judged(SimpleNamespace(lab=breaks), "a", {}, world, tmp_path)
    assert (row.median, row.note, world.restarts) == (None, "broke: rank 1 died", 1)


def test_a_row_of_the_grid_counts_what_failed_and_names_the_worst(tmp_path):
    def one(check, measured, passed):
        return SimpleNamespace(check=check, measured=measured, passed=passed)

    class Verdict(list):
        failed = property(lambda self: [each for each in self if each.passed is False])

    verdict = Verdict(
        [
            one("grad_parity", 0.5, passed=False),
            one("metric_parity", 1e-9, passed=True),
            one("metric_parity", 3e-8, passed=True),
            one("oracle", None, passed=None),
        ]
    )
    session = SimpleNamespace(lab=lambda *_, **__: SimpleNamespace(verdict=lambda: verdict))
    row = split.judged(session, "a", {}, FakeWorld(), tmp_path)
    assert (row.median, row.met) == (1, False)
    assert row.note == "2 passed; FAILED grad_parity 0.5; gradients 5.0e-01 off, metrics 3.0e-08; not measured: oracle"


def test_a_quick_bench_has_both_backends_and_a_larger_job_on_a_gpu():
    assert {config.get("backend", "megatron") for config in QUICK.grid.values()} == {"megatron", "fsdp2"}
    assert len(QUICK.grid) == len(split.FEW)
    assert QUICK.on("cpu")[0].size == "tiny"
    assert QUICK.on("cuda")[0].size == "125m"


@pytest.mark.parametrize("count", [2, 4, 6])
def test_turns_are_dealt_evenly(count):
    orders = [order(count, turn) for turn in range(count)]
    for place in range(count):
        assert sorted(one[place] for one in orders) == list(range(count))
    following = Counter(pair for one in orders for pair in itertools.pairwise(one))
    assert following == dict.fromkeys(itertools.permutations(range(count), 2), 1)


@pytest.mark.parametrize("chunks", [1, 2, 5, 10])
def test_theory_of_bubbles(chunks):
    assert split.theory(10, chunks) == pytest.approx((10 + chunks) / 11)
    assert 1 <= split.theory(10, chunks, 0.1) <= split.theory(10, chunks)
    assert split.theory(10, chunks, 0.1) == pytest.approx(split.theory(10, chunks, 0.9))


def test_the_vocabulary_weighs_on_the_last_stage():
    assert split.share_of_first_stage(Job(layers=4)) == pytest.approx(2 * 7.08 / (4 * 7.08 + 38.63), rel=0.01)


def test_a_step_takes_what_its_slowest_rank_takes():
    answers = [{"seconds": {"plain": [1.0, 2.0]}}, {"seconds": {"plain": [3.0, 1.0]}}]
    assert split.slowest(answers) == {"plain": [3.0, 2.0]}


def test_ratios_are_taken_turn_by_turn_and_short_steps_are_owned_up_to():
    seconds = {"plain": [0.1, 0.2], "plain again": [0.2, 0.2]}
    step, control = split.plain_rows("a", seconds, 1e-8)
    assert (control.low, control.median, control.high) == (1, 1.5, 2)
    assert step.note.endswith("of little worth")
    longer, _ = split.plain_rows("a", {name: [10 * each for each in taken] for name, taken in seconds.items()}, 1e-8)
    assert longer.note.endswith("of each other")


def test_steps_that_differ_are_seen_and_steps_without_an_update_are_no_steps():
    def told(loss, *, updated=True):
        return {"global_loss": loss, "grad_norm": 2.0, "updated": updated}

    bench = SimpleNamespace(told={"a": [told(1.0)], "b": [told(0.9)], "c": [told(1.0, updated=False)]})
    assert onranks.Bench.apart(bench, "a", "b") == pytest.approx(0.1)
    with pytest.raises(KitError, match="no update"):
        onranks.Bench.apart(bench, "a", "c")


@pytest.mark.parametrize(("full", "alike"), [(True, True), (False, False)])
def test_rows_are_alike_or_ragged(full, alike):
    tokens = {counts(one)[1].item() for one in cuts(onranks.noise(10, 64, 1000, 0, full=full), 1)}
    assert (len(tokens) == 1) is alike
