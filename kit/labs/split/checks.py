"""What the split lab asks of its records: that the piece-wise step is the plain one, number by number, however it is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.split import parity, truths
from kit.labs.split.config import KIT_MODEL, cases_of
from kit.labs.split.truths import promised
from kit.results import Check, Measured, NotMeasured, incomplete, select, with_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured | Sequence[Measured]]

COMMON = 1e-3  # what others allow for losses and gradient norms; shown beside ours
COARSE = 1e-2  # bfloat16 keeps 8 bits
FIELDS = ("grad_norm", "lr", "wd", "updated", "global_valid_seqs", "global_valid_toks")


def places(config: Mapping[str, Any]) -> str:
    cuts = ", ".join(str(count or "all") for count in config["chunks"])
    levels = {case.level for case in cases_of(config)}
    return f"{config['steps']} steps, {' and '.join(sorted(levels, reverse=True))}, cut in {cuts}"


def beside(value: float) -> str:
    """Whether the tolerance in common use would have let it through."""
    return f"; the 1e-3 in common use would {'let it through' if value <= COMMON else 'see it too'}"


def counted(frame: pd.DataFrame, config: Mapping[str, Any], phase: str, metric: str) -> pd.DataFrame:
    """A number of every case; with any missing the check cannot pass."""
    rows = select(frame, phase=phase, metric=metric)
    missing = len(cases_of(config)) - rows["cycle"].nunique()
    if missing:
        incomplete(f"{metric} is missing for {missing} of {len(cases_of(config))} ways to cut")
    return rows


def where(config: Mapping[str, Any], cycle: int) -> str:
    case = next(case for case in cases_of(config) if case.cycle == cycle)
    return f"{case.level}, cut in {case.chunks or 'all'}"


def loss(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The loss of the first step, at its worst: both ways start it from the same weights."""
    table = parity.paired(frame, config)
    row = parity.worst(table[(table["metric"] == "global_loss") & (table["step"] == 1)], "error")
    if not row["error"]:
        return Measured(0, f"bit for bit in step 1, {places(config)}")
    said = f"at worst {row['split']:.9g} against {row['sync']:.9g} in step 1, {where(config, row['cycle'])}"
    return Measured(row["error"], said + beside(row["error"]))


def later(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Loss, metrics, norms and gradients of the steps after the first, where the weights themselves differ by rounding."""
    table = parity.paired(frame, config)
    row = parity.worst(table[(table["step"] > 1) & ~table["metric"].isin(["lr", "wd", "updated"])], "error")
    steps = pd_steps(frame, config, "gradient_error")
    apart = parity.worst(steps[steps["step"] > 1], "value")
    said = f"at worst {row['metric']} in step {row['step']}, {where(config, row['cycle'])}: {row['split']:.9g} against {row['sync']:.9g}"
    return Measured(
        max(row["error"], apart["value"]), f"{said}; gradients {apart['value']:.2g} off in step {apart['step']}"
    )


def fields(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """What the result says beside its metrics. A norm of later steps has rounding of the weights in it; the rest has none.

    A norm may be summed up in float32 and in any order, tensor by tensor or shard by shard. What that may round
    (`updates.norm_rounding`: about sqrt(n) times EPS with n elements in the largest tensor, 1.5e-5 in the tiny model) is left out.
    """
    table = parity.paired(frame, config)
    table = table[table["metric"].isin(FIELDS) & ((table["metric"] != "grad_norm") | (table["step"] == 1))]
    said = frame[(frame["metric"] == "norm_rounding") & (frame["phase"] == "sync")]["value"]
    rounding = float(said.max()) if len(said) else 0.0
    error = parity.error(table["split"], table["sync"], parity.FLOOR)
    beyond = error.where(table["metric"] != "grad_norm", (error - rounding).clip(lower=0))
    row = parity.worst(table.assign(error=error, beyond=beyond).sort_values("error", ascending=False), "beyond")
    if not row["error"]:
        return Measured(0, f"{', '.join(FIELDS)}: bit for bit, {places(config)}")
    found = f"at worst {row['metric']} in step {row['step']}, {where(config, row['cycle'])}"
    found += f": {row['split']:.9g} against {row['sync']:.9g}"
    rounded = row["error"] > row["beyond"]
    return Measured(row["beyond"], found, if_passed=f"a float32 norm may be {rounding:.2g} off" if rounded else "")


def ranks(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Numbers of the result that are not the same on all ranks."""
    told = parity.results(frame, "split")
    told = told[
        told.groupby("cycle")["rank"].transform("nunique") == config["ranks"]
    ]  # not a phase in which a rank broke
    if told.empty:
        raise NotMeasured("in no case are there numbers of every rank")
    sides = told.pivot_table(
        index=["cycle", "step", "name"], columns="rank", values="value", aggfunc="first", dropna=False
    ).reindex(columns=range(config["ranks"]))
    first = sides[0]
    apart = sides[~sides.apply(lambda one: (one == first) | (one.isna() & first.isna())).all(axis=1)]
    if apart.empty:
        return Measured(
            0, f"{len(told[['step', 'name']].drop_duplicates())} numbers on {config['ranks']} ranks, bit for bit"
        )
    cycle, step, name = apart.index[0]
    values = ", ".join(f"{value:.9g}" for value in apart.iloc[0])
    return Measured(len(apart), f"{name} in step {step} by rank: {values}; {where(config, cycle)}")


def every_metric(frame: pd.DataFrame, config: Mapping[str, Any]) -> list[Measured]:
    """A row for every metric: its error at its worst, and what one scalar for all would have made of it."""
    table = parity.metrics(frame, config)
    table = table[table["step"] == 1]
    found = []
    for name, rows in table.groupby("metric", sort=False):
        row = parity.worst(rows, "error")
        scalar = rows["one_scalar_error"].max()
        said = f"{name} by {row['normalizer']}: {row['split']:.9g} against {row['sync']:.9g}"
        said += f", {row['level']}, cut in {row['chunks'] or 'all'}" if row["error"] else ", bit for bit"
        said += f"; one scalar for all: {scalar:.2g} off" if scalar else ""
        found.append(Measured(row["error"], said, of=str(name)))
    return found


def coverage(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    table = parity.paired(frame, config)
    wrong = table[table["seen"] != "both"]
    names = sorted(set(wrong["metric"]))
    if names:
        return Measured(len(names), f"in one of the two only: {', '.join(names)}")
    return Measured(0, f"the same {table['metric'].nunique()} keys in both, {places(config)}")


def gradient(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    table = pd_steps(frame, config, "gradient_error")
    table = table[table["step"] == 1]
    row = parity.worst(table, "value")
    tensors = parity.tensors(frame, config)
    worst = parity.worst(tensors, "gradient_error")
    said = f"||dg||/||g|| over the model in step 1, at worst {where(config, row['cycle'])}"
    said += f"; worst tensor {worst['tensor']} {worst['gradient_error']:.3g} at element {worst['gradient_index']:.0f}"
    return Measured(row["value"], said + beside(row["value"]))


def pd_steps(frame: pd.DataFrame, config: Mapping[str, Any], name: str) -> pd.DataFrame:
    """A number of every step of every case."""
    rows = with_ids(frame[(frame["phase"] == "compare") & (frame["metric"] == name)], "step")
    if rows["cycle"].nunique() < len(cases_of(config)):
        incomplete(f"{name} was not measured for every way to cut")
    return rows


def parameters(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    rows = counted(frame, config, "compare", "parameter_error")
    row = parity.worst(rows, "value")
    tensors = parity.tensors(frame, config)
    worst = parity.worst(tensors, "parameter_error")
    apart = tensors["uncertain_worst"].max()
    share = select(frame, phase="compare", metric="uncertain_elements")["value"].max()
    share /= select(frame, phase="compare", metric="elements")["value"].max()
    return Measured(
        row["value"],
        f"||dp||/||p|| after {config['steps']} steps, at worst {where(config, row['cycle'])}; worst tensor {worst['tensor']} "
        f"{worst['parameter_error']:.3g}; "
        f"apart from these {share:.1%} of elements, whose gradient is below rounding: at most {apart:.2g} off",
    )


def chunks(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    rows = counted(frame, config, "compare", "chunk_error")
    row = parity.worst(rows, "value")
    cuts = ", ".join(str(count or "all") for count in config["chunks"])
    if not row["value"]:
        return Measured(0, f"gradients are bit-identical, cut in {cuts}")
    return Measured(row["value"], f"||dg||/||g|| between cuts in {cuts}, at worst {where(config, row['cycle'])}")


def reductions(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    most = counted(frame, config, "split", "reductions_most")["value"].max()
    least = counted(frame, config, "split", "reductions_least")["value"].min()
    off = max(abs(most - 1), abs(least - 1))
    said = "exactly once" if not off else f"{least:g} to {most:g} times"
    return Measured(off, f"each bucket of gradients was reduced {said} in a step, {places(config)}")


def rate(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    told = counted(frame, config, "split", "rate_off")["value"].max()
    return Measured(
        told, "the rate of the result against the one that the optimizer used" + ("" if told else ": the same")
    )


def fine(exact: float, coarse: float) -> Callable[[Mapping[str, Any]], float]:
    return lambda config: coarse if config.get("dtype") == "bfloat16" else exact


def one_step(config: Mapping[str, Any]) -> str:
    return "" if config["steps"] > 1 else "steps=1: there is no later step"


def one_cut(config: Mapping[str, Any]) -> str:
    return "" if len(config["chunks"]) > 1 else "the step is cut in one way only; give two numbers of chunks or more"


def balanced(config: Mapping[str, Any]) -> bool:
    return bool(config["experts"] and config["aux_loss"])


def no_oracle(config: Mapping[str, Any]) -> str:
    if config["experts"]:
        return "the float64 model has no experts"
    return "" if config["model"] == KIT_MODEL else f"model={config['model']} has no float64 twin"


def one_backend(config: Mapping[str, Any]) -> str:
    return "" if config["backend"] == "fsdp2" else "backend=megatron; use backend=fsdp2 to compare both"


def zero(name: str, question: str, measure: Measure, tolerance: str) -> Check:
    return Check(name=name, question=question, tolerance=tolerance, limit=0, unit="1", better="<=", measure=measure)


def ratio(
    name: str,
    question: str,
    measure: Measure,
    tolerance: str,
    *,
    exact: float,
    coarse: float = COARSE,
    cannot: Callable[[Mapping[str, Any]], str] | None = None,
) -> Check:
    return Check(
        name=name,
        question=question,
        tolerance=tolerance,
        limit=fine(exact, coarse),
        unit="ratio",
        better="<=",
        measure=measure,
        cannot=cannot,
    )


CHECKS = (
    ratio("loss_parity", "Is the loss that of the plain step?", loss, "loss_rel", exact=1e-6),
    ratio("grad_parity", "Are the gradients?", gradient, "grad_rel", exact=1e-6),
    ratio("params_parity", "Are the weights, steps later?", parameters, "params_rel", exact=1e-5),
    ratio("later_steps", "Are they still, after updates?", later, "later_rel", exact=1e-4, coarse=0.1, cannot=one_step),
    ratio("metric_parity", "Is every metric?", every_metric, "metric_rel", exact=1e-6),
    ratio("result_parity", "Is what the result says beside them?", fields, "result_rel", exact=1e-6),
    zero("ranks_agree", "Do all ranks say the same?", ranks, "numbers_apart"),
    zero("metric_coverage", "Do both give the same keys?", coverage, "metrics_missing"),
    ratio(
        "chunk_invariance",
        "Do gradients not hang on how the step is cut?",
        chunks,
        "chunk_rel",
        exact=1e-6,
        cannot=one_cut,
    ),
    zero("one_reduction", "Is each gradient reduced exactly once?", reductions, "reductions_off"),
    zero(
        "hooks_restored",
        "Are the job's hooks put back, after errors too?",
        promised(
            "hooks_lost", phases=("sync", "split", "rehearse"), what="all hooks are back after finish, abort and errors"
        ),
        "hooks_lost",
    ),
    zero("lr_of_this_step", "Does the result name the rate that was used?", rate, "rate_off"),
    zero(
        "abort_is_clean",
        "Does an abort leave everything as it was?",
        promised(
            "abort_changed",
            "abort_gradients",
            "abort_next_differs",
            "error_changed",
            "misuse_changed",
            "state_unseen",
            what="weights, optimizer, schedule and random numbers bit for bit, no gradient left, and the next step as ever",
        ),
        "abort_changed",
    ),
    zero(
        "version_ticks",
        "Does the version tick on finish alone?",
        promised(
            "wrong_versions",
            "abort_ticked",
            "error_ticked",
            phases=("split", "rehearse"),
            what="+1 on finish, never else",
        ),
        "versions_wrong",
    ),
    zero(
        "misuse_raises",
        "Is a call that does not fit refused, with the state's name?",
        promised(
            "misuse_silent",
            "misuse_other_words",
            "error_swallowed",
            "abort_raised",
            what="begin, microbatch and finish in the wrong state all raise and name it, abort does nothing there, no row is left out",
            beside=["misuse_other_type"],
        ),
        "misuse_silent",
    ),
    zero(
        "groups_return_to_baseline",
        "Is every process group that a step makes gone after it?",
        promised("groups_kept", what="no more after each of two rounds of a step and an aborted one"),
        "groups_more",
    ),
    zero(
        "nonfinite_skipped",
        "Does a step with a gradient or loss that is not finite change nothing?",
        promised(
            "nonfinite_updated",
            "nonfinite_changed",
            "nonfinite_ticks_off",
            "nonfinite_next_differs",
            what="not updated; weights, optimizer and schedule bit for bit, and the next step as without it",
        ),
        "nonfinite_changed",
    ),
    zero("replicas_counted_once", "Does each row count once?", truths.replicas, "replicas_off"),
    ratio(
        "oracle",
        "Do loss, metrics and gradients agree with float64?",
        truths.oracle,
        "oracle_rel",
        exact=1e-5,
        coarse=0.05,
        cannot=no_oracle,
    ),
    Check(
        name="experts_balance",
        question="Is the experts' load-balancing loss that of float64?",
        tolerance="balance_rel",
        limit=fine(1e-5, 0.05),
        unit="ratio",
        better="<=",
        measure=truths.balance,
        when=balanced,
    ),
    ratio(
        "update",
        "Are clipping, AdamW and schedule those of float64?",
        truths.update,
        "update_rel",
        exact=1e-5,
        coarse=0.1,
    ),
    ratio(
        "extreme_gaps",
        "Is the loss right where trainer and engine are far apart?",
        truths.gaps,
        "gap_rel",
        exact=1e-5,
        coarse=1e-5,
    ),
    zero(
        "masked_places",
        "Do NaN and infinities in masked places reach nothing?",
        promised("masked_reach", phases=("oracle",), what="loss, metrics and gradient are the same, bit for bit"),
        "masked_reach",
    ),
    ratio(
        "backends_agree",
        "Do Megatron and FSDP2 agree?",
        truths.backends,
        "backends_rel",
        exact=1e-5,
        cannot=one_backend,
    ),
)
