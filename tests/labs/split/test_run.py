"""A right run passes every check; what cannot be measured says why; records match the documentation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kit
from kit.errors import BadInput
from kit.labs.discover import find
from kit.labs.split import rules
from kit.labs.split.ranks.phases import SplitSide as Phases
from kit.results import with_ids
from tests.labs.parts import failed, failing_parts, logged_steps, rows_of_metric, unanswered, why

Split = Callable[..., kit.Run]
LEVELS = ("tokens", "sequences")
CASES = [("tokens", 1), ("tokens", 2), ("tokens", 0), ("sequences", 1), ("sequences", 2), ("sequences", 0)]
METRICS = 17  # of a clipped policy gradient


def test_every_check_passes_or_says_why_not(split: Split) -> None:
    verdict = split().verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) == {"backends_agree"}
    assert "use backend=fsdp2" in why(verdict, "backends_agree")
    names = [row.check for row in verdict]
    assert len(set(names)) == len(names)
    asked = [check.name for check in find("split").all_rules() if check.asked(split().config)]
    assert [name for name in names if "/" not in name] == asked
    assert {name.partition("/")[0] for name in names if "/" in name} == {"metric_parity"}
    assert {row.measured for row in verdict if row.unit == "1"} == {0.0}


def test_each_rank_logs_a_line_per_training_step(split: Split, world: kit.World) -> None:
    """The log has the plain step of each level, then its split steps for each number of chunks, among other runs of the module."""
    run = split()
    ways = [[f"plain step, level {level}", *(f"level {level}, chunks {n}" for n in (1, 2, 0))] for level in LEVELS]
    expected = [(step, what) for way in ways for what in way for step in range(1, run.config["steps"] + 1)]
    for rank in range(run.config["ranks"]):
        lines = logged_steps(world.logs, rank)
        starts = range(len(lines) - len(expected) + 1)
        assert any([line[:2] for line in lines[start : start + len(expected)]] == expected for start in starts), lines


@pytest.mark.slow
def test_a_run_that_breaks_is_not_blamed_for_what_it_did_not_get_to(split: Split) -> None:
    assert failing_parts(split()) == []


def test_a_metric_is_a_row(split: Split) -> None:
    whole, *rows = [row for row in split().verdict() if row.check.startswith("metric_parity")]
    table = rules.metrics(split().frame(), split().config)
    assert [row.check for row in rows] == [f"metric_parity/{name}" for name in sorted(table["metric"].unique())]
    assert len(rows) == METRICS
    assert whole.check == "metric_parity"
    assert whole.measured == max(row.measured for row in rows if row.measured is not None)
    reasons = {row.check.partition("/")[2]: row.why for row in rows}
    assert "num_valid_samples (not divided)" in reasons["num_valid_samples"]
    assert "one scalar for all metrics would give an error of 0.9" in reasons["num_valid_samples"]
    assert "one scalar" not in reasons["probs_ratio_max"]


def test_reasons_name_what_was_compared(split: Split) -> None:
    verdict = split().verdict()
    every_chunks = "chunks 1, 2, one per microbatch"
    assert every_chunks in why(verdict, "chunk_invariance")
    assert f"exactly once per step (2 steps, loss per token and per sequence, {every_chunks})" in why(
        verdict, "one_reduction"
    )
    assert "within the 1e-3 in common use" in why(verdict, "grad_parity")
    assert "worst tensor: model." in why(verdict, "grad_parity")
    assert "identical bit for bit on 2 ranks" in why(verdict, "ranks_agree")
    assert "the same 24 numbers" in why(verdict, "metric_coverage")
    assert "worst of 17 metrics" in why(verdict, "oracle")


def test_the_table_of_metrics(split: Split) -> None:
    run = split()
    table = rules.metrics(run.frame(), run.config)
    assert len(table) == len(CASES) * 2 * METRICS
    assert set(zip(table["level"], table["chunks"], strict=True)) == set(CASES)
    assert set(table["normalizer"]) == {"tokens", "sequences", "none"}
    first = table[table["step"] == 1]
    assert first["error"].max() <= 1e-6
    assert table["sync"].notna().all()
    ratio = first[first["metric"] == "probs_ratio"].set_index("level")["one_scalar_error"]
    assert ratio["tokens"].max() == 0
    assert ratio["sequences"].min() > 1  # a token metric, divided by sequences
    count = first[first["metric"] == "num_valid_samples"]
    assert count["one_scalar"].max() <= 1 < count["sync"].min()


def test_the_table_of_tensors(split: Split) -> None:
    run = split()
    table = rules.tensors(run.frame(), run.config)
    assert set(zip(table["level"], table["chunks"], strict=True)) == set(CASES)
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.bias"} <= set(table["tensor"])
    assert table.notna().all(axis=None)
    by = table.groupby("tensor")["gradient_error"].max()
    assert by.nunique() > len(by) / 2  # errors differ by tensor


def test_records_of_every_rank_and_call(split: Split) -> None:
    run = split()
    results = rules.results(run.frame(), "split").set_index(["step", "name"])
    reported = [results.loc[key] for key in ((1, "global_loss"), (2, "grad_norm"), (1, "probs_ratio"))]
    reported += [rows_of_metric(run, "split", metric) for metric in ("reductions_most", "wrong_versions")]
    for rows in reported:
        assert sorted(zip(rows["cycle"], rows["rank"], strict=True)) == [(c, r) for c in range(1, 7) for r in (0, 1)]
    assert set(rows_of_metric(run, "compare", "parameter_error")["rank"]) == {0, 1}
    rows = with_ids(rows_of_metric(run, "split", "call_seconds").query("rank == 1"), "call", "order")
    calls = [len(each) for _, each in rows.groupby("cycle")]
    assert calls == [3, 4, 6] * 2  # begin, the cuts of four microbatches, finish
    assert rows["call"].tolist()[:3] == ["begin", "microbatch", "finish"]
    assert (rows["value"] > 0).all()
    assert float(rows_of_metric(run, "prepare", "ratios_off_one")["value"].min()) > 0.5  # most ratios differ from 1


def test_the_rate_moves_and_every_step_differs(split: Split) -> None:
    reported = rules.values(split().frame(), "split").query("cycle == 1").set_index(["metric", "step"])["value"]
    assert reported["lr", 1] != reported["lr", 2]
    assert reported["global_loss", 1] != reported["global_loss", 2]
    assert reported["updated", 1] == 1


def test_limits_move_without_a_rerun(split: Split) -> None:
    run = split()
    assert failed(run.verdict(grad_parity=0, oracle=0)) == {"grad_parity", "oracle"}
    assert "metric_parity" in failed(run.verdict(metric_parity=-1))
    assert {row.limit for row in run.verdict(metric_parity=0.5) if row.check.startswith("metric_parity")} == {0.5}
    with pytest.raises(BadInput, match="unknown tolerance 'grad_abs'"):
        run.verdict(grad_abs=1)


@pytest.mark.parametrize("ending", ["csv", "parquet", "json", "md", "html", "tex"])
def test_exports(split: Split, ending: str, tmp_path) -> None:
    path = tmp_path / f"table.{ending}"
    split().save(path)
    assert path.stat().st_size > 1000


def test_from_disk_the_same_verdict(split: Split) -> None:
    run = split()
    assert kit.load(run.dir).verdict() == run.verdict()


@pytest.mark.slow
def test_step_by_step(world: kit.World, split: Split) -> None:
    """Steps by hand and a run at once record the same; the ranks stay alive, and a World of another size is refused."""
    pids = world.pids
    config = {"steps": 1, "layers": 1, "microbatches": 2, "chunks": [2], "level": "tokens"}
    with kit.lab("split", world=world, **config) as lab:
        while lab.phases[-1].status != "done":
            shown = lab.step()
            assert callable(getattr(Phases, shown.phase))
        by_hand = lab.run()
    assert failed(by_hand.verdict()) == set()
    assert unanswered(by_hand.verdict()) == {"backends_agree", "chunk_invariance", "later_steps"}
    assert "use at least two" in why(by_hand.verdict(), "chunk_invariance")
    at_once = split(**config)
    keys = ["cycle", "phase", "rank", "metric", "ids", "text", "unit"]
    # Ranks record in their own order; which rank is first depends on the machine.
    rows = [run.frame()[keys].sort_values(["cycle", "phase", "rank"], kind="stable") for run in (by_hand, at_once)]
    assert rows[0].to_dict("records") == rows[1].to_dict("records")
    reported = [rules.values(run.frame(), "split") for run in (by_hand, at_once)]
    assert reported[0].reset_index(drop=True).equals(reported[1].reset_index(drop=True))  # the same seed, the same bits
    assert world.pids == pids
    assert world.eval("dist.get_world_size()") == [2, 2]
    with pytest.raises(BadInput, match="ranks=4, but the given World has 2"):
        kit.run("split", world=world, ranks=4)


@pytest.mark.slow
def test_both_backends_are_compared(split: Split) -> None:
    verdict = split(backend="fsdp2").verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) == set()
    assert "between Megatron and FSDP2 in step 1" in why(verdict, "backends_agree")


@pytest.mark.parametrize(
    "batching", ["packed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fixed", "dynamic"))]
)
def test_ranks_that_share_columns_train_as_one(split: Split, batching: str) -> None:
    small = {"steps": 2, "layers": 1, "microbatches": 2, "chunks": [1, 2], "level": "tokens"}
    verdict = split(backend="fsdp2", cp=2, batching=batching, length=27, **small).verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) == (set() if batching == "fixed" else {"means_averaged", "one_pass"})
    assert {row.measured for row in verdict if row.check in ("ranks_agree", "replicas_counted_once")} == {0.0}


@pytest.mark.slow
@pytest.mark.drawn(1, of="other configs")
@pytest.mark.parametrize(
    "config",
    [
        {"tp": 2},
        {"pp": 2},
        {"overlap_grad_reduce": True, "distributed_optimizer": True},
        {"ep": 2, "experts": 4, "reduce": "mean"},
        {"masks": "empty-rank"},
        {"masks": "full"},
        {"dtype": "bfloat16", "tp": 2},
        {"dtype": "bfloat16", "steps": 5, "layers": 1, "microbatches": 5},
        {"dtype": "bfloat16", "backend": "fsdp2", "batching": "packed"},
        {"dtype": "bfloat16", "ep": 2, "experts": 4, "reduce": "mean"},
        {"backend": "fsdp2", "batching": "packed"},
        {"dtype": "bfloat16", "backend": "fsdp2", "cp": 2},
        *({"recipe": recipe} for recipe in ("dapo", "cispo", "tis", "icepop", "seq-mask-tis", "on-policy", "nll")),
        {"recipe": "gspo", "level": "sequences"},
    ],
    ids=lambda config: "-".join(f"{k}={v}" for k, v in config.items()),
)
def test_other_configs_pass_too(split: Split, config: dict[str, object]) -> None:
    assert failed(split(**config).verdict()) == set()
