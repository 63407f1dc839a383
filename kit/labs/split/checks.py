"""The checks of the split lab: the split step gives the numbers of the plain step, for any number of chunks."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.growth import at_most
from kit.labs.split import parity
from kit.labs.split.config import KIT_MODEL, cases_of
from kit.labs.split.parity import promised
from kit.results import Check, Measured, NotMeasured, incomplete, select, with_ids
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured | Sequence[Measured]]

COMMON = 1e-3  # a limit in common use for losses and gradient norms; shown beside the kit's
COARSE = 1e-2  # bfloat16 keeps 8 bits
FIELDS = ("grad_norm", "lr", "wd", "updated", "global_valid_seqs", "global_valid_toks")


def beside(value: float) -> str:
    """How the error compares with the limit in common use."""
    return f"; {'within' if value <= COMMON else 'above'} the 1e-3 in common use"


def of_every_case(frame: pd.DataFrame, config: Mapping[str, Any], phase: str, metric: str) -> pd.DataFrame:
    """A metric of every case; the check cannot pass if any is missing."""
    rows = select(frame, phase=phase, metric=metric)
    if missing := len(cases_of(config)) - rows["cycle"].nunique():
        incomplete(f"{metric} is missing for {missing} of {len(cases_of(config))} cases (level and number of chunks)")
    return rows


def loss(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The loss of the first step, where the error is largest: both steps start from the same weights."""
    table = parity.paired(frame, config)
    row = parity.worst(table[(table["metric"] == "global_loss") & (table["step"] == 1)], "error")
    if not row["error"]:
        return Measured(0, f"identical bit for bit in step 1 ({parity.scope(config)})")
    why = f"worst: {parity.against(row)}, step 1, {parity.where(config, row['cycle'])}"
    return Measured(row["error"], why + beside(row["error"]))


def later(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Loss, metrics, norms and gradients of the steps after the first, whose weights differ by rounding."""
    table = parity.paired(frame, config)
    row = parity.worst(table[(table["step"] > 1) & ~table["metric"].isin(["lr", "wd", "updated"])], "error")
    steps = with_ids(of_every_case(frame, config, "compare", "gradient_error"), "step")
    gradients = parity.worst(steps[steps["step"] > 1], "value")
    why = f"worst number: {row['metric']}, {parity.against(row)}, step {row['step']}, {parity.where(config, row['cycle'])}"
    return Measured(
        max(row["error"], gradients["value"]),
        f"{why}; worst gradients: ||dg||/||g|| {gradients['value']:.2g} in step {gradients['step']}",
    )


def fields(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The numbers of the result that are no metrics. Norms of later steps contain rounding of the weights; the others do not.

    A norm may be summed in float32 in any order, tensor by tensor or shard by shard. The rounding that this allows
    (`oracle.norm_rounding`: about sqrt(n) times EPS with n elements in the largest tensor, 1.5e-5 in the tiny model) is excluded.
    """
    table = parity.paired(frame, config)
    table = table[table["metric"].isin(FIELDS) & ((table["metric"] != "grad_norm") | (table["step"] == 1))]
    allowed = frame[(frame["metric"] == "norm_rounding") & (frame["phase"] == "sync")]["value"]
    rounding = float(allowed.max()) if len(allowed) else 0.0
    error = parity.error(table["split"], table["sync"], parity.FLOOR)
    beyond = error.where(table["metric"] != "grad_norm", (error - rounding).clip(lower=0))
    row = parity.worst(table.assign(error=error, beyond=beyond).sort_values("error", ascending=False), "beyond")
    if not row["error"]:
        return Measured(0, f"{', '.join(FIELDS)}: identical bit for bit ({parity.scope(config)})")
    why = f"worst: {row['metric']}, {parity.against(row)}, step {row['step']}, {parity.where(config, row['cycle'])}"
    rounded = row["error"] > row["beyond"]
    excused = f"rounding of a float32 norm is excluded, up to {rounding:.2g}"
    return Measured(row["beyond"], why, if_passed=excused if rounded else "")


def ranks(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Numbers of the result that differ between ranks."""
    results = parity.results(frame, "split")
    whole = results.groupby("cycle")["rank"].transform("nunique") == config["ranks"]  # no rank raised in the phase
    if not whole.any():
        raise NotMeasured("no case has results of every rank")
    results = results[whole]
    keys = ["cycle", "step", "name"]
    sides = results.pivot_table(index=keys, columns="rank", values="value", aggfunc="first", dropna=False)
    sides = sides.reindex(columns=range(config["ranks"]))
    first = sides[0]
    differing = sides[~sides.apply(lambda one: (one == first) | (one.isna() & first.isna())).all(axis=1)]
    if differing.empty:
        numbers = len(results[["step", "name"]].drop_duplicates())
        return Measured(0, f"{numbers} numbers are identical bit for bit on {config['ranks']} ranks")
    cycle, step, name = differing.index[0]
    row = differing.iloc[0]
    odd = next(rank for rank in row.index[1:] if row[rank] != row[0] and not (isnan(row[rank]) and isnan(row[0])))
    why = f"{name} differs between ranks in step {step}: {row[0]:.9g} on rank 0, {row[odd]:.9g} on rank {odd}"
    return Measured(len(differing), f"{why}; {parity.where(config, cycle)}")


def every_metric(frame: pd.DataFrame, config: Mapping[str, Any]) -> list[Measured]:
    """A row for every metric: its largest error, and the error that one scalar for all metrics would cause."""
    table = parity.metrics(frame, config)
    table = table[table["step"] == 1]
    found = []
    for name, rows in table.groupby("metric", sort=False):
        row = parity.worst(rows, "error")
        scalar = rows["one_scalar_error"].max()
        per = "not divided" if row["normalizer"] == "none" else f"per {parity.singular(row['normalizer'])}"
        case = f"loss per {parity.singular(row['level'])}, {parity.chunks_of(row['chunks'])}"
        why = f"{name} ({per}), {parity.against(row)}, {case if row['error'] else 'bit for bit'}"
        why += f"; one scalar for all metrics would give an error of {scalar:.2g}" if scalar else ""
        found.append(Measured(row["error"], why, of=str(name)))
    return found


def coverage(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    table = parity.paired(frame, config)
    wrong = table[table["seen"] != "both"]
    names = sorted(set(wrong["metric"]))
    if names:
        return Measured(len(names), f"only one of the two steps reports {', '.join(names)}")
    return Measured(0, f"both steps report the same {table['metric'].nunique()} numbers ({parity.scope(config)})")


def gradient(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    table = with_ids(of_every_case(frame, config, "compare", "gradient_error"), "step")
    row = parity.worst(table[table["step"] == 1], "value")
    worst = parity.worst(parity.tensors(frame, config), "gradient_error")
    why = f"||dg||/||g|| over the model in step 1, worst: {parity.where(config, row['cycle'])}"
    why += f"; worst tensor: {worst['tensor']}, {worst['gradient_error']:.3g}, element {worst['gradient_index']:.0f}"
    return Measured(row["value"], why + beside(row["value"]))


def parameters(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    rows = of_every_case(frame, config, "compare", "parameter_error")
    row, tensors = parity.worst(rows, "value"), parity.tensors(frame, config)
    worst = parity.worst(tensors, "parameter_error")
    uncertain = tensors["uncertain_worst"].max()
    share = select(frame, phase="compare", metric="uncertain_elements")["value"].max()
    share /= select(frame, phase="compare", metric="elements")["value"].max()
    return Measured(
        row["value"],
        f"||dp||/||p|| after {counted(config['steps'], 'step')}, worst: {parity.where(config, row['cycle'])}; "
        f"worst tensor: {worst['tensor']}, {worst['parameter_error']:.3g}; "
        f"excluded: {share:.1%} of the elements, whose gradient is below rounding (largest difference {uncertain:.2g})",
    )


def chunks(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    rows = of_every_case(frame, config, "compare", "chunk_error")
    row = parity.worst(rows, "value")
    if not row["value"]:
        return Measured(0, f"gradients are identical bit for bit for {parity.every_chunks(config)}")
    first = parity.chunks_of(config["chunks"][0])
    return Measured(row["value"], f"||dg||/||g|| against {first}, worst: {parity.where(config, row['cycle'])}")


def reductions(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    most = of_every_case(frame, config, "split", "reductions_most")["value"].max()
    least = of_every_case(frame, config, "split", "reductions_least")["value"].min()
    off = max(abs(most - 1), abs(least - 1))
    times = "exactly once" if not off else f"{least:g} to {most:g} times instead of once"
    return Measured(off, f"each gradient bucket was reduced {times} per step ({parity.scope(config)})")


def rate(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    off = of_every_case(frame, config, "split", "rate_off")["value"].max()
    if not off:
        return Measured(0, "lr in the result equals the learning rate of the optimizer in every step")
    return Measured(off, f"lr in the result differs from the optimizer's learning rate by {off:.2g} (relative)")


def fine(exact: float, coarse: float) -> Callable[[Mapping[str, Any]], float]:
    return lambda config: coarse if config.get("dtype") == "bfloat16" else exact


def unless(can: Callable[[Mapping[str, Any]], bool], why: str) -> Callable[[Mapping[str, Any]], str]:
    """The reason why a config cannot have a check."""
    return lambda config: "" if can(config) else why


def no_oracle(config: Mapping[str, Any]) -> str:
    if config["experts"]:
        return "the float64 model does not support experts"
    return "" if config["model"] == KIT_MODEL else f"model={config['model']} has no float64 model to compare with"


def ratio(
    name: str, question: str, measure: Measure, tolerance: str, *, exact: float, coarse: float = COARSE, **given: Any
) -> Check:
    return at_most(name, question, tolerance, measure, limit=fine(exact, coarse), unit="ratio", **given)


CHECKS = (
    ratio("loss_parity", "Does the loss match the plain step's?", loss, "loss_rel", exact=1e-6),
    ratio("grad_parity", "Do the gradients match the plain step's?", gradient, "grad_rel", exact=1e-6),
    ratio("params_parity", "Do the weights match the plain step's at the end?", parameters, "params_rel", exact=1e-5),
    ratio(
        "later_steps",
        "Do later steps match the plain ones?",
        later,
        "later_rel",
        exact=1e-4,
        coarse=0.1,
        cannot=unless(lambda config: config["steps"] > 1, "steps=1: no step after the first"),
    ),
    ratio("metric_parity", "Does every metric match the plain step's?", every_metric, "metric_rel", exact=1e-6),
    ratio("result_parity", "Do norm, learning rate, decay and counts match?", fields, "result_rel", exact=1e-6),
    at_most("ranks_agree", "Do all ranks report the same result?", "numbers_apart", ranks),
    at_most("metric_coverage", "Do split and plain step report the same metrics?", "metrics_missing", coverage),
    ratio(
        "chunk_invariance",
        "Are gradients independent of the number of chunks?",
        chunks,
        "chunk_rel",
        exact=1e-6,
        cannot=unless(
            lambda config: len(config["chunks"]) > 1,
            "only one number of chunks was run; use at least two, such as chunks=[1, 5]",
        ),
    ),
    at_most("one_reduction", "Is each gradient reduced exactly once per step?", "reductions_off", reductions),
    at_most(
        "hooks_restored",
        "Are the job's hooks restored after finish, abort and errors?",
        "hooks_lost",
        promised(
            "hooks_lost",
            phases=("sync", "split", "rehearse"),
            right="all hooks are restored after finish, abort and errors",
        ),
    ),
    at_most("lr_of_this_step", "Is the reported learning rate the one that the update used?", "rate_off", rate),
    at_most(
        "abort_is_clean",
        "Does abort restore the state before begin, bit for bit?",
        "abort_changed",
        promised(
            "abort_changed",
            "abort_gradients",
            "abort_next_differs",
            "error_changed",
            "misuse_changed",
            "state_unseen",
            right="abort restores weights, optimizer, schedule and random state bit for bit and leaves no gradient; "
            "the next step equals one without the abort",
        ),
    ),
    at_most(
        "version_ticks",
        "Does the version grow by one with each finish, and only then?",
        "versions_wrong",
        promised(
            "wrong_versions",
            "abort_ticked",
            "error_ticked",
            phases=("split", "rehearse"),
            right="version grew by 1 with each finish and never otherwise",
        ),
    ),
    at_most(
        "misuse_raises",
        "Does a call in the wrong state raise an error that names the state?",
        "misuse_silent",
        promised(
            "misuse_silent",
            "misuse_other_words",
            "error_swallowed",
            "abort_raised",
            right="begin, microbatch and finish raise in the wrong state and name it; "
            "abort on a closed step does nothing; no row is dropped",
            uncounted=["misuse_other_type"],
        ),
    ),
    at_most(
        "groups_return_to_baseline",
        "Does a step leave no process group behind?",
        "groups_more",
        promised("groups_kept", right="no new group remains after two rounds of one finished and one aborted step"),
    ),
    at_most(
        "nonfinite_skipped",
        "Is the update skipped if a loss or gradient is not finite?",
        "nonfinite_changed",
        promised(
            "nonfinite_updated",
            "nonfinite_changed",
            "nonfinite_ticks_off",
            "nonfinite_next_differs",
            right="no update; weights, optimizer and schedule are unchanged bit for bit; the next step equals one without it",
        ),
    ),
    at_most("replicas_counted_once", "Do all ranks together count each row once?", "replicas_off", parity.replicas),
    ratio(
        "oracle",
        "Does the plain step match a float64 computation?",
        parity.oracle,
        "oracle_rel",
        exact=1e-5,
        coarse=0.05,
        cannot=no_oracle,
    ),
    ratio(
        "experts_balance",
        "Does the load-balancing loss match a float64 computation?",
        parity.balance,
        "balance_rel",
        exact=1e-5,
        coarse=0.05,
        when=lambda config: bool(config["experts"] and config["aux_loss"]),
    ),
    ratio(
        "update",
        "Do clipping, AdamW and schedule match a float64 computation?",
        parity.update,
        "update_rel",
        exact=1e-5,
        coarse=0.1,
    ),
    ratio(
        "extreme_gaps",
        "Is the loss correct if the log-probabilities of trainer and engine are far apart?",
        parity.gaps,
        "gap_rel",
        exact=1e-5,
        coarse=1e-5,
    ),
    at_most(
        "masked_places",
        "Does the loss ignore NaN and infinities in masked places?",
        "masked_reach",
        promised(
            "masked_reach",
            phases=("oracle",),
            right="loss, metrics and gradient are unchanged bit for bit by NaN and infinities in masked places",
        ),
    ),
    ratio(
        "backends_agree",
        "Do Megatron and FSDP2 give the same gradients?",
        parity.backends,
        "backends_rel",
        exact=1e-5,
        cannot=unless(
            lambda config: config["backend"] == "fsdp2",
            "backend=megatron runs Megatron only; use backend=fsdp2 to compare both backends",
        ),
    ),
)


# Sets of tolerances for the split lab. A tolerance that a set does not name keeps the lab's default. Both sets are for float32. For
# bfloat16, which has 8 bits of precision, start from the defaults.
PRESETS = {
    "strict": {
        "loss_rel": 1e-12,  # losses are summed in float64; only the order of the sum differs
        "metric_rel": 1e-12,
        "chunk_rel": 0.0,  # the same sum for any number of chunks
        "grad_rel": 5e-7,  # four roundings of float32
        "result_rel": 5e-7,  # the norm of the gradients is float32
        "params_rel": 1e-6,
        "later_rel": 1e-5,
        "oracle_rel": 1e-6,
        "backends_rel": 1e-6,
    },
    "common practice": {
        "loss_rel": 1e-3,  # usual in tests of training stacks for losses and gradient norms
        "result_rel": 1e-3,
        "metric_rel": 1e-3,
        "grad_rel": 1e-5,  # float32 gradients, per tensor
        "chunk_rel": 1e-5,
        "params_rel": 1e-4,  # after some steps
        "later_rel": 1e-2,
        "oracle_rel": 1e-3,
        "backends_rel": 1e-3,
    },
}
