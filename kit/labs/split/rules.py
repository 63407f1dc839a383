"""The tables of a split run and its rules: the split step gives the numbers of the plain step, for any number of chunks.

`metrics(frame, config)` and `tensors(frame, config)` return pandas tables: every metric of both steps, and the errors of every gradient and
weight. Most rules compare the two steps; the others judge the promises of the protocol, or compare with float64 computations and counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from kit.labs.split.faults import KIT_LOSS, KIT_MODEL, KIT_SPLIT
from kit.labs.split.lab import cases_of
from kit.results import Measured, Missing, NotMeasured, Unjudged, incomplete, select, with_ids
from kit.results.frames import read_ids
from kit.results.records import value_in_words
from kit.results.rules import Rule, rule
from kit.results.units import counted

Config = Mapping[str, Any]

COMMON = 1e-3  # a limit in common use for losses and gradient norms; shown beside the kit's
COARSE = 1e-2  # bfloat16 keeps 8 bits
RESULT_LIMIT = 1e-6  # of numbers that every dtype leaves exact, and of the norm in float32
SLACK = 3.0  # roundings of other code may be this many times those of the oracle
HIDDEN = 1.0  # a relative error that says nothing: rounding alone may be as large as the number
# Errors of smaller values are absolute: a relative limit of 1e-6 becomes an absolute one of 1e-8.
FLOOR = 1e-2
# The same threshold if the rows of a microbatch depend on the number of chunks: log-probabilities are rounded differently, and a loss
# near zero is a small difference of large terms.
REGROUPED = 1.0
ALIKE = 1e-6  # below this gradients are the same, and no factor is worth a word
FIELDS = ("grad_norm", "lr", "wd", "updated", "global_valid_seqs", "global_valid_toks")
NOT_METRICS = (*FIELDS, "global_loss")
COUNTS = {"num_valid_samples": "sequences", "num_unmasked_tokens": "tokens"}
COUNTS |= {"global_valid_seqs": "sequences", "global_valid_toks": "tokens"}
UPDATES = {"update_norm_error": "norm", "update_rate_error": "learning rate", "update_decay_error": "decay"}
PLACES = 3  # of a broken promise that are named
# What each number counts, in words.
PROMISES = {
    "hooks_lost": "hooks and settings not restored",
    "abort_changed": "tensors changed by abort",
    "abort_gradients": "nonzero gradients left by abort",
    "abort_next_differs": "tensors that differ after the step that follows an abort",
    "abort_ticked": "versions that grew with abort",
    "abort_raised": "aborts of a closed step that raised",
    "error_changed": "tensors changed by an error and the abort after it",
    "error_ticked": "versions that grew with an error",
    "error_swallowed": "errors swallowed",
    "misuse_changed": "states changed by calls in the wrong state",
    "misuse_silent": "wrong calls that were accepted",
    "misuse_other_words": "errors that do not name the state",
    "misuse_other_type": "errors of another type than Misuse (allowed)",
    "state_unseen": "kinds of state that a step did not change",
    "wrong_versions": "wrong versions",
    "groups_kept": "groups left behind",
    "bytes_kept": "bytes that each step adds",
    "graphs_kept": "tensors with a graph that each step adds",
    "hooks_kept": "hooks that each step adds",
    "fds_kept": "file descriptors that each step adds",
    "sockets_kept": "sockets that each step adds",
    "threads_kept": "threads that each step adds",
    "nonfinite_updated": "updates with non-finite values",
    "nonfinite_changed": "tensors changed by a non-finite step",
    "nonfinite_ticks_off": "wrong versions after a non-finite step",
    "nonfinite_next_differs": "tensors that differ after the step that follows a non-finite one",
    "masked_reach": "numbers changed by masked places",
    "overwritten_differs": "tensors that differ if the caller overwrites its rows",
    "mean_wrong": "wrong means",
    "passes_repeated": "forward passes beyond one for each microbatch",
}


# -- tables --------------------------------------------------------------------------------------------------------------


def results(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """The numbers that ranks recorded for the steps of a phase, with columns `step` and `metric`."""
    rows = with_ids(frame[(frame["phase"] == phase) & (frame["metric"] == "result")], "step", "name")
    if rows.empty:
        raise Missing(f"no results of phase {phase}")
    return rows.assign(metric=rows["name"])


def values(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """The numbers that rank 0 recorded for the steps of a phase."""
    return results(frame[frame["rank"] == 0], phase)[["cycle", "step", "metric", "value"]]


def error(value: pd.Series, base: pd.Series, floor: float = FLOOR) -> pd.Series:
    """Relative error, absolute below the floor. NaN equals NaN and an infinity itself; other non-finite errors are infinite."""
    equal = (value == base) | (value.isna() & base.isna())
    relative = (value - base).abs() / base.abs().clip(lower=floor)
    return relative.fillna(math.inf).where(~equal, 0.0)


def worst_row(table: pd.DataFrame, column: str = "value") -> dict[str, Any]:
    row = table.iloc[int(table[column].to_numpy().argmax())]
    return {str(name): value for name, value in row.items()}


def paired(frame: pd.DataFrame, config: Config) -> pd.DataFrame:
    """Every number of the plain and the split step: cycle, level, chunks, step, metric, sync, split, error."""
    cases = pd.DataFrame(cases_of(config))
    cases["base"] = cases["cycle"].where(cases["first"]).ffill()
    split = cases.merge(values(frame, "split").rename(columns={"value": "split"}))
    plain = cases.merge(values(frame, "sync").rename(columns={"cycle": "base", "value": "sync"}), on="base")
    for case in cases_of(config):
        if case.cycle not in set(split["cycle"]):
            raise Missing(f"the split step with chunks={case.chunks}, level={case.level} did not run")
    table = plain.merge(split, on=[*cases.columns, "step", "metric"], how="outer", indicator="seen")
    floor = FLOOR if config["batching"] == "fixed" else REGROUPED
    return table.assign(error=error(table["split"], table["sync"], floor))


def metrics(frame: pd.DataFrame, config: Config) -> pd.DataFrame:
    """Every metric of every case and step, its normalizer, and its value if one scalar divided all metrics."""
    numbers = paired(frame, config)
    rows = frame[(frame["phase"] == "sync") & (frame["rank"] == 0) & (frame["metric"] == "normalizer")]
    by = pd.DataFrame(cases_of(config))[["cycle", "level"]].merge(with_ids(rows, "name")[["cycle", "name", "text"]])
    by = by.drop(columns="cycle").set_axis(["level", "metric", "normalizer"], axis=1)
    table = numbers[~numbers["metric"].isin(NOT_METRICS)].merge(by, how="left").fillna({"normalizer": "none"})
    steps = numbers.pivot_table(index=["cycle", "step"], columns="metric", values="sync", dropna=False)
    counts = steps[["global_valid_seqs", "global_valid_toks"]].clip(lower=1)
    by_unit = counts.set_axis(["sequences", "tokens"], axis=1).assign(none=1.0).stack()
    right, scalar = (
        by_unit.reindex(pd.MultiIndex.from_frame(table[["cycle", "step", unit]])).to_numpy()
        for unit in ("normalizer", "level")
    )
    extreme = table["metric"].str.endswith(("_min", "_max"))
    table["one_scalar"] = table["sync"].where(extreme, table["sync"] * (right / scalar))
    table["one_scalar_error"] = error(table["one_scalar"], table["sync"])
    keys = ["level", "chunks", "step", "metric"]
    columns = [*keys, "normalizer", "sync", "split", "one_scalar", "error", "one_scalar_error"]
    return table[columns].sort_values(keys, ignore_index=True)


def tensors(frame: pd.DataFrame, config: Config) -> pd.DataFrame:
    """Every tensor of every case: relative error of the first gradient and of the final weights, and the worst element."""
    rows = frame[(frame["phase"] == "compare") & (frame["rank"] == 0)]
    errors = with_ids(rows[rows["metric"].str.startswith("tensor_")], "tensor")
    if errors.empty:
        raise Missing("no tensors were compared")
    errors = errors.assign(name=errors["metric"].str.removeprefix("tensor_"))
    wide = errors.pivot_table(index=["cycle", "tensor"], columns="name", values="value", sort=False).reset_index()
    return pd.DataFrame(cases_of(config))[["cycle", "level", "chunks"]].merge(wide, on="cycle").drop(columns="cycle")


# -- words for reasons and pictures ----------------------------------------------------------------------------------------


def every_chunks(config: Config) -> str:
    return "chunks " + ", ".join(str(count or "one per microbatch") for count in config["chunks"])


def scope(config: Config) -> str:
    """The steps, levels and numbers of chunks that a run compared."""
    levels = sorted({case.level for case in cases_of(config)}, reverse=True)
    return f"{counted(config['steps'], 'step')}, loss per {' and per '.join(map(singular, levels))}, {every_chunks(config)}"


def singular(level: str) -> str:
    return level.removesuffix("s")


def case_of(config: Config, row: Mapping[str, Any]) -> str:
    case = cases_of(config)[row["cycle"] - 1]
    return f"loss per {singular(case.level)}, {chunks_in_words(case.chunks)}"


def chunks_in_words(count: int) -> str:
    return counted(count, "chunk") if count else "one chunk per microbatch"


PLAIN, SPLIT = ("sync", "in the plain step"), ("split", "in the split step")  # a column of `paired`, and its place


def compared_numbers(
    row: Mapping[str, Any], *at: str, base: tuple[str, str] = PLAIN, side: tuple[str, str] = SPLIT
) -> str:
    """A number and what it was compared with: "loss: 0.5 in the plain step, 0.6 in the split step (error 0.2; step 1)"."""
    values = ", ".join(f"{row[column]:.9g} {place}" for column, place in (base, side))
    error = f"error {row['error']:.2g}" if row["error"] else "identical bit for bit"
    return f"{row['metric']}: {values} ({'; '.join([error, *at])})"


def beside(value: float) -> str:
    """How the error compares with the limit in common use."""
    return f"; {'within' if value <= COMMON else 'above'} the 1e-3 in common use"


def place_in_step(ids: str, text: str = "") -> str:
    words = [value_in_words(value) for value in read_ids(ids).values()]
    return ", ".join(filter(None, [*words, text]))


# -- the split step against the plain one ----------------------------------------------------------------------------------


def of_every_case(frame: pd.DataFrame, config: Config, phase: str, metric: str) -> pd.DataFrame:
    """A metric of every case; the rule cannot pass if any is missing."""
    rows, cases = select(frame, phase=phase, metric=metric), len(cases_of(config))
    if missing := cases - rows["cycle"].nunique():
        incomplete(f"{metric} is missing for {missing} of {cases} cases (level and number of chunks)")
    return rows


def loss_parity(frame: pd.DataFrame, config: Config) -> Measured:
    """Does the loss match the plain step's?

    In the first step, where the error is largest: both steps start from the same weights.
    """
    table = paired(frame, config)
    row = worst_row(table[(table["metric"] == "global_loss") & (table["step"] == 1)], "error")
    if not row["error"]:
        return Measured(0, f"identical bit for bit in step 1 ({scope(config)})")
    return Measured(row["error"], compared_numbers(row, f"step 1, {case_of(config, row)}") + beside(row["error"]))


def grad_parity(frame: pd.DataFrame, config: Config) -> Measured:
    """Do the gradients match the plain step's?"""
    table = with_ids(of_every_case(frame, config, "compare", "gradient_error"), "step")
    row, tensor = worst_row(table[table["step"] == 1]), worst_row(tensors(frame, config), "gradient_error")
    why = f"||dg||/||g|| over the model in step 1, worst: {case_of(config, row)}"
    why += f"; worst tensor: {tensor['tensor']}, {tensor['gradient_error']:.3g}, element {tensor['gradient_index']:.0f}"
    common = frame[(frame["metric"] == "gradient_factor") & (frame["cycle"] == row["cycle"])]["value"]
    if row["value"] > ALIKE and len(common):
        why += f"; all gradients are {common.iloc[0]:.6g} times those of the plain step"
    return Measured(row["value"], why + beside(row["value"]))


def params_parity(frame: pd.DataFrame, config: Config) -> Measured:
    """Do the weights match the plain step's at the end?"""
    row, table = worst_row(of_every_case(frame, config, "compare", "parameter_error")), tensors(frame, config)
    tensor = worst_row(table, "parameter_error")
    uncertain, elements = (
        select(frame, phase="compare", metric=name)["value"].max() for name in ("uncertain_elements", "elements")
    )
    return Measured(
        row["value"],
        f"||dp||/||p|| after {counted(config['steps'], 'step')}, worst: {case_of(config, row)}; "
        f"worst tensor: {tensor['tensor']}, {tensor['parameter_error']:.3g}; "
        f"excluded: {uncertain / elements:.1%} of the elements, with gradients below rounding "
        f"(largest difference {table['uncertain_worst'].max():.2g})",
    )


def later_steps(frame: pd.DataFrame, config: Config) -> Measured:
    """Do later steps match the plain ones?

    Loss, metrics, norms and gradients of the steps after the first; their weights differ by rounding.
    """
    table = paired(frame, config)
    row = worst_row(table[(table["step"] > 1) & ~table["metric"].isin(["lr", "wd", "updated"])], "error")
    steps = with_ids(of_every_case(frame, config, "compare", "gradient_error"), "step")
    gradients = worst_row(steps[steps["step"] > 1])
    why = compared_numbers(row, f"step {row['step']}, {case_of(config, row)}")
    why += f"; worst gradients: ||dg||/||g|| {gradients['value']:.2g} in step {gradients['step']}"
    return Measured(max(row["error"], gradients["value"]), why)


def metric_parity(frame: pd.DataFrame, config: Config) -> list[Measured]:
    """Does every metric match the plain step's?

    A row for every metric: its largest error, and the error that one scalar for all metrics would cause.
    """
    table = metrics(frame, config)
    answers = []
    for name, rows in table[table["step"] == 1].groupby("metric", sort=False):
        row, scalar = worst_row(rows, "error"), rows["one_scalar_error"].max()
        divided = "not divided" if row["normalizer"] == "none" else f"per {singular(row['normalizer'])}"
        at = [f"loss per {singular(row['level'])}, {chunks_in_words(row['chunks'])}"] if row["error"] else []
        would = f"; one scalar for all metrics would give an error of {scalar:.2g}" if scalar else ""
        why = compared_numbers({**row, "metric": f"{name} ({divided})"}, *at) + would
        answers.append(Measured(row["error"], why, of=str(name)))
    return answers


def result_parity(frame: pd.DataFrame, config: Config) -> Measured | list[Measured]:
    """Do norm, learning rate, decay and counts match?

    The numbers of the result that are no metrics. Norms of later steps contain rounding of the weights; the others do not.

    A norm may be summed in float32 in any order, tensor by tensor or shard by shard. The rounding that this allows
    (`oracle.norm_rounding`: about sqrt(n) times EPS with n elements in the largest tensor, 1.5e-5 in the tiny model) is excluded.
    In bfloat16 the norm has its own row and limit; the other numbers are as exact as in float32.
    """
    if config.get("dtype") != "bfloat16":
        return fields_apart(frame, config, FIELDS)
    norm = within_noise(fields_apart(frame, config, ["grad_norm"]), frame, config, "gradients", exact=RESULT_LIMIT)
    others = fields_apart(frame, config, [name for name in FIELDS if name != "grad_norm"])
    return [replace(norm, of="grad_norm"), replace(others, of="other numbers", limit=RESULT_LIMIT)]


def fields_apart(frame: pd.DataFrame, config: Config, names: Sequence[str]) -> Measured:
    """The worst of these fields of the result, beyond the rounding of a float32 norm."""
    table = paired(frame, config)
    table = table[table["metric"].isin(names) & ((table["metric"] != "grad_norm") | (table["step"] == 1))]
    allowed = frame[(frame["metric"] == "norm_rounding") & (frame["phase"] == "sync")]["value"]
    rounding = float(allowed.max()) if len(allowed) else 0.0
    table["error"] = error(table["split"], table["sync"])
    table["beyond"] = table["error"].where(table["metric"] != "grad_norm", (table["error"] - rounding).clip(lower=0))
    row = worst_row(table.sort_values("error", ascending=False), "beyond")
    if not row["error"]:
        return Measured(0, f"{', '.join(names)}: identical bit for bit ({scope(config)})")
    why = compared_numbers(row, f"step {row['step']}, {case_of(config, row)}")
    excused = f"rounding of a float32 norm is excluded, up to {rounding:.2g}"
    return Measured(row["beyond"], why, if_passed=excused if row["error"] > row["beyond"] else "")


def ranks_agree(frame: pd.DataFrame, config: Config) -> Measured:
    """Do all ranks report the same result?"""
    rows = results(frame, "split")
    rows = rows[rows.groupby("cycle")["rank"].transform("nunique") == config["ranks"]]  # no rank raised in the phase
    if rows.empty:
        raise NotMeasured("no case has results of every rank")
    keys = ["cycle", "step", "metric"]
    sides = rows.pivot_table(index=keys, columns="rank", values="value", aggfunc="first", dropna=False)
    sides = sides.reindex(columns=range(config["ranks"]))
    same = sides.eq(sides[0], axis=0) | (sides.isna() & sides[[0]].isna().to_numpy())
    differing = sides[~same.all(axis=1)]
    if differing.empty:
        numbers = len(rows[["step", "metric"]].drop_duplicates())
        return Measured(0, f"{numbers} numbers are identical bit for bit on {config['ranks']} ranks")
    cycle, step, name = first = differing.index[0]
    row, odd = differing.iloc[0], same.loc[first].idxmin()
    at = f"step {step}, {case_of(config, {'cycle': cycle})}"
    return Measured(len(differing), f"{name}: {row[0]:.9g} on rank 0, {row[odd]:.9g} on rank {odd} ({at})")


def metric_coverage(frame: pd.DataFrame, config: Config) -> Measured:
    """Do split and plain step report the same metrics?"""
    table = paired(frame, config)
    if names := sorted(set(table[table["seen"] != "both"]["metric"])):
        return Measured(len(names), f"only one of the two steps reports {', '.join(names)}")
    return Measured(0, f"both steps report the same {table['metric'].nunique()} numbers ({scope(config)})")


def chunk_invariance(frame: pd.DataFrame, config: Config) -> Measured:
    """Are gradients independent of the number of chunks?"""
    row = worst_row(of_every_case(frame, config, "compare", "chunk_error"))
    if not row["value"]:
        return Measured(0, f"gradients are identical bit for bit for {every_chunks(config)}")
    first = chunks_in_words(config["chunks"][0])
    return Measured(row["value"], f"||dg||/||g|| against {first}, worst: {case_of(config, row)}")


def one_reduction(frame: pd.DataFrame, config: Config) -> Measured:
    """Is each gradient reduced exactly once per step?"""
    most = of_every_case(frame, config, "split", "reductions_most")["value"].max()
    least = of_every_case(frame, config, "split", "reductions_least")["value"].min()
    off = max(abs(most - 1), abs(least - 1))
    times = "exactly once" if not off else f"{least:g} to {most:g} times instead of once"
    return Measured(off, f"each gradient bucket was reduced {times} per step ({scope(config)})")


def lr_of_this_step(frame: pd.DataFrame, config: Config) -> Measured:
    """Is the reported learning rate the one that the update used?"""
    off = of_every_case(frame, config, "split", "rate_off")["value"].max()
    if not off:
        return Measured(0, "lr in the result equals the learning rate of the optimizer in every step")
    return Measured(off, f"lr in the result differs from the optimizer's learning rate by {off:.2g} (relative)")


# -- the promises of the protocol --------------------------------------------------------------------------------------------


def promised(
    frame: pd.DataFrame, *names: str, right: str, phases: Sequence[str] = ("rehearse",), uncounted: Sequence[str] = ()
) -> Measured:
    """The number of broken promises, on the worst rank of each. `right` is the reason if there is none; `uncounted` are only shown."""
    total, reasons = 0.0, []
    raised = frame[(frame["metric"] == "rehearsal_raised") & (frame["value"] > 0)]
    for name in (*names, *uncounted):
        rows = frame[frame["phase"].isin(phases) & (frame["metric"] == name)]
        if rows.empty and raised.empty:
            raise Missing(f"no records of {name}")
        if rows.empty:
            first = place_in_step(*raised.iloc[0][["ids", "text"]])
            return Measured(math.inf, f"could not be judged: a rehearsal raised an error ({first})")
        broken = rows.loc[rows.groupby(["cycle", "ids"])["value"].idxmax()].query("value > 0")
        total += float(broken["value"].sum()) if name in names else 0.0
        if not broken.empty:
            places = [*filter(None, map(place_in_step, broken["ids"], broken["text"]))]
            omitted = [f"and {len(places) - PLACES} more"] if places[PLACES:] else []
            listed = f" ({'; '.join(places[:PLACES] + omitted)})" if places else ""
            reasons.append(f"{PROMISES[name]}: {broken['value'].sum():g}{listed}")
    return Measured(total, ", ".join(reasons) if total else "; ".join([right, *reasons]))


def hooks_restored(frame: pd.DataFrame, _: Config) -> Measured:
    """Are the job's hooks, training mode and torch's settings restored after finish, abort and errors?"""
    right = "all hooks, the training mode of every module and the settings of torch are restored after finish, abort and errors"
    return promised(frame, "hooks_lost", right=right, phases=("sync", "split", "rehearse"))


def abort_is_clean(frame: pd.DataFrame, _: Config) -> Measured:
    """Does abort restore the state before begin, bit for bit, and does a step draw new random numbers?"""
    promises = ("abort_changed", "abort_gradients", "abort_next_differs", "error_changed", "misuse_changed")
    right = (
        "abort restores weights, optimizer, schedule and random state bit for bit and leaves no gradient; "
        "the next step equals one without the abort; after a step that draws random numbers, others follow"
    )
    return promised(frame, *promises, "state_unseen", right=right)


def version_ticks(frame: pd.DataFrame, _: Config) -> Measured:
    """Does the version grow by one with each finish, and only then?"""
    promises = ("wrong_versions", "abort_ticked", "error_ticked")
    right = "version grew by 1 with each finish and never otherwise"
    return promised(frame, *promises, right=right, phases=("split", "rehearse"))


def misuse_raises(frame: pd.DataFrame, _: Config) -> Measured:
    """Does a call in the wrong state raise an error that names the state?"""
    promises = ("misuse_silent", "misuse_other_words", "error_swallowed", "abort_raised")
    right = (
        "begin, microbatch and finish raise in the wrong state and name it; "
        "abort on a closed step does nothing; no row is dropped"
    )
    return promised(frame, *promises, right=right, uncounted=["misuse_other_type"])


def groups_return_to_baseline(frame: pd.DataFrame, _: Config) -> Measured:
    """Does a step leave no process group behind?"""
    right = "no new group remains after two rounds of one finished and one aborted step"
    return promised(frame, "groups_kept", right=right)


def need_rehearsal(frame: pd.DataFrame, name: str) -> None:
    ended = frame[frame["metric"] == "rehearsal_raised"]
    if len(ended) and not ended["ids"].astype(str).str.contains(name).any():
        raise NotMeasured("the kit that made these records did not look for it")


def nothing_stays(frame: pd.DataFrame, _: Config) -> Measured:
    """Does a step leave no tensor, graph, hook, descriptor, socket or thread behind?

    In each of two steps after a first one: finished, aborted, and aborted after an error."""
    need_rehearsal(frame, "memory_of_steps")
    of_process = [name for name in ("fds_kept", "sockets_kept", "threads_kept") if frame["metric"].eq(name).any()]
    right = f"no tensor, graph{', hook, descriptor, socket or thread' if of_process else ' or hook'} is added by another step"
    return promised(frame, "bytes_kept", "graphs_kept", "hooks_kept", *of_process, right=right)


def rows_copied(frame: pd.DataFrame, _: Config) -> Measured:
    """May the caller overwrite its rows after microbatch?"""
    need_rehearsal(frame, "overwritten")
    right = "a step whose rows the caller overwrites before finish equals one with rows that stay, bit for bit"
    return promised(frame, "overwritten_differs", right=right)


def means_averaged(frame: pd.DataFrame, _: Config) -> Measured:
    """Are metrics that are means averaged over microbatches and data ranks?"""
    need_rehearsal(frame, "mean_metric")
    return promised(frame, "mean_wrong", right="reward is the mean over microbatches and data ranks")


def one_pass(frame: pd.DataFrame, _: Config) -> Measured:
    """Does each microbatch run forward once if all have equally many tokens?"""
    need_rehearsal(frame, "forward_passes")
    return promised(frame, "passes_repeated", right="each microbatch of rows of equally many tokens ran forward once")


def nonfinite_skipped(frame: pd.DataFrame, _: Config) -> Measured:
    """Is the update skipped if a loss or gradient is not finite?"""
    promises = ("nonfinite_updated", "nonfinite_changed", "nonfinite_ticks_off", "nonfinite_next_differs")
    right = "no update; weights, optimizer and schedule are unchanged bit for bit; the next step equals one without it"
    return promised(frame, *promises, right=right)


def masked_places(frame: pd.DataFrame, _: Config) -> Measured:
    """Does the loss ignore NaN and infinities in masked places?"""
    right = "loss, metrics and gradient are unchanged bit for bit by NaN and infinities in masked places"
    return promised(frame, "masked_reach", right=right, phases=("oracle",))


# -- float64 and counts ------------------------------------------------------------------------------------------------------


def replicas_counted_once(frame: pd.DataFrame, config: Config) -> Measured:
    """Do all ranks together count each row once?

    The counts in the result against the rows counted one by one.
    """
    table = values(frame, "split")
    table = table[table["metric"].isin(COUNTS)]
    if table.empty:
        return Measured(math.inf, "the result has no count of sequences or tokens")
    true = values(frame, "prepare").drop(columns="cycle").rename(columns={"metric": "unit", "value": "true"})
    table = table.assign(unit=table["metric"].map(COUNTS)).merge(true, how="left")
    times = table["value"] / table["true"]
    row = worst_row(table.assign(error=(times - 1).abs().fillna(math.inf)), "error")
    replicas = f"{counted(config['tp'] * config['pp'], 'rank')} per data-parallel replica"
    if not row["error"]:
        names = [name for name in COUNTS if name in set(table["metric"])]
        return Measured(0.0, f"{', '.join(names)} equal the counts of the rows ({replicas})")
    why = compared_numbers(row, replicas, base=("true", "counted row by row"), side=("value", "in the split step"))
    return Measured(row["error"], why)


def oracle(frame: pd.DataFrame, config: Config) -> Measured:
    """Does the plain step match a float64 computation?"""
    exact = values(frame, "oracle").rename(columns={"value": "exact"})
    table = exact.merge(values(frame, "sync"), how="left")
    if lacking := sorted(set(exact["metric"]) - set(values(frame, "sync")["metric"])):
        return Measured(math.inf, f"the plain step does not report {', '.join(lacking)}, which the float64 oracle has")
    floor = REGROUPED if config["dtype"] == "bfloat16" else FLOOR  # rounding, as there
    row = worst_row(table.assign(error=error(table["value"], table["exact"], floor)), "error")
    gradients = float(select(frame, phase="oracle", metric="gradient_error")["value"].max())
    why = compared_numbers(row, base=("exact", "in float64"), side=("value", "in the plain step"))
    every = counted(table["metric"].nunique(), "metric")
    return Measured(max(row["error"], gradients), f"{why}, worst of {every}; gradients: ||dg||/||g|| {gradients:.2g}")


def experts_balance(frame: pd.DataFrame, _: Config) -> Measured:
    """Does the load-balancing loss match a float64 computation?

    That of step 1 in both steps, against float64 from the routers' inputs.
    """
    exact = float(select(frame, phase="oracle", metric="balance")["value"].iloc[0])
    steps = {"plain": values(frame, "sync"), "split": values(frame, "split")}
    table = pd.concat([rows.assign(way=way, exact=exact) for way, rows in steps.items()])
    table = table[(table["step"] == 1) & (table["metric"] == "moe_aux_loss")]
    if lacking := [way for way in steps if way not in set(table["way"])]:
        return Measured(math.inf, f"the result of the {lacking[0]} step has no moe_aux_loss")
    row = worst_row(table.assign(error=error(table["value"], table["exact"])), "error")
    side = ("value", f"in the {row['way']} step")
    return Measured(row["error"], compared_numbers(row, base=("exact", "in float64"), side=side))


def routers_match(frame: pd.DataFrame, _: Config) -> Measured:
    """Are the biases and counts of the routers after step 1 those of the plain step, bit for bit?"""
    differ, moved = (select(frame, phase="compare", metric=name) for name in ("routers_differ", "routers_moved"))
    if not moved["value"].min():
        raise Unjudged("no bias of a router was moved by the plain step")
    row = worst_row(differ)
    if row["value"]:
        return Measured(row["value"], f"{row['value']:g} differ after step 1 (rank {row['rank']}): {row['text']}")
    return Measured(0, f"identical bit for bit after step 1 ({moved['value'].min():g} values were moved on each rank)")


def update(frame: pd.DataFrame, config: Config) -> Measured:
    """Do clipping, AdamW and schedule match a float64 computation?

    The updates of both steps against separate float64 formulas, from the gradients that the optimizer received.
    """
    if config["model"] != KIT_MODEL:
        raise NotMeasured(f"the optimizer settings of model={config['model']} are unknown")
    rows, cases = frame[frame["phase"].isin(["sync", "split", "rehearse"])], len(cases_of(config))
    most = {
        name: worst_row(rows[rows["metric"] == name])
        for name in ("update_error", *UPDATES)
        if (rows["metric"] == name).any()
    }
    runs = rows[(rows["metric"] == "update_error") & (rows["cycle"] > 0)]["cycle"].nunique()
    if runs < cases:
        incomplete(f"updates were recorded for {runs} of {cases} cases (level and number of chunks)")
    if len(most) <= len(UPDATES):
        if runs < cases:
            raise Missing("updates were not recorded")
        return Measured(math.inf, "no step called ctx.optimizer.step")
    moved = most["update_error"]
    off = ", ".join(
        f"{word} {most[name]['value']:.2g}"
        + (f" in step {read_ids(most[name]['ids'])['step']}" if most[name]["value"] else "")
        for name, word in UPDATES.items()
    )
    small = rows[rows["metric"] == "small_gradient_error"]["value"]  # not in records of an older kit
    if len(small):
        off += (
            f"; gradients of a step below the limit of clipping, against its first step: ||dg||/||g|| {small.max():.2g}"
        )
    return Measured(
        max([float(row["value"]) for row in most.values()] + small.tolist()),
        f"worst tensor after {counted(config['steps'], 'step')}: {moved['text']}, "
        f"error {moved['value']:.2g} of the distance it moved ({place_in_step(moved['ids'])} step, "
        f"against float64 clipping, AdamW and schedule); relative errors: {off}",
    )


def extreme_gaps(frame: pd.DataFrame, config: Config) -> Measured:
    """Is the loss correct if the log-probabilities of trainer and engine are far apart?"""
    rows = with_ids(select(frame, phase="oracle", metric="gap_error"), "gap")
    if config["loss"] != KIT_LOSS:
        rows = rows[rows["gap"].abs() <= 50]  # a loss in float32 overflows above 88
    row = worst_row(rows)
    why = f"worst at a gap of {row['gap']:+d}: {row['text']}, error {row['value']:.2g}"
    sizes = ", ".join(map(str, sorted(rows["gap"].abs().unique())))
    return Measured(row["value"], f"{why}; gaps of {sizes} in both directions, float32 against float64")


def backends_agree(frame: pd.DataFrame, config: Config) -> Measured:
    """Do Megatron and FSDP2 give the same gradients?"""
    steps = with_ids(select(frame, phase="other_backend", metric="gradient_error"), "step")
    weights = select(frame, phase="other_backend", metric="parameter_error")["value"].max()
    after = f"weights after {counted(config['steps'], 'step')}: ||dp||/||p|| {weights:.2g}"
    return Measured(select(steps, step=1)["value"].max(), f"||dg||/||g|| between Megatron and FSDP2 in step 1; {after}")


# -- the rules and their limits ----------------------------------------------------------------------------------------------


def by_dtype(exact: float, coarse: float = COARSE) -> dict[str, Any]:
    """The limit of a relative error; `coarse` is that in bfloat16."""
    return {"limit": lambda config: coarse if config.get("dtype") == "bfloat16" else exact, "unit": "ratio"}


def by_noise(measure: Callable[..., Measured], exact: float, *kinds: str, coarse: float = COARSE) -> Rule:
    """A rule of a relative error. In bfloat16 its limit follows from the noise of the oracle's own steps (`ranks/noise.py`)."""

    @functools.wraps(measure)
    def measured(frame: pd.DataFrame, config: Config) -> Measured:
        return within_noise(measure(frame, config), frame, config, *kinds, exact=exact, coarse=coarse)

    return rule(measured, **by_dtype(exact, coarse))


def within_noise(
    answer: Measured, frame: pd.DataFrame, config: Config, *kinds: str, exact: float, coarse: float = COARSE
) -> Measured:
    """The answer with the limit that follows from noise in bfloat16; `coarse` is the least for code that the oracle does not imitate."""
    if config.get("dtype") != "bfloat16" or answer.value is None or (noise := noise_of(frame, kinds)) is None:
        return answer
    imitated = config["loss"] == KIT_LOSS and config["model"] == KIT_MODEL and not config["experts"]
    # A step of one's own rounds the weights in another order, which later steps amplify.
    imitated = imitated and ("later" not in kinds or config["implementation"] == KIT_SPLIT)
    limit = max(exact if imitated else coarse, SLACK * noise[0] + noise[1])
    hidden = f"rounding in bfloat16 alone may give an error of {limit:.2g}; use dtype=float32 or fewer steps"
    why = f"{answer.why}; bfloat16 noise: {noise[0]:.2g}, limit {limit:.2g}"
    return replace(answer, limit=limit, why=why, hidden=hidden if limit >= HIDDEN else "")


def noise_of(frame: pd.DataFrame, kinds: Sequence[str]) -> tuple[float, float] | None:
    """The largest noise of these kinds, and what clipping may add; None in a run without it."""
    rows = with_ids(frame[frame["metric"].isin(["noise", "reach"])], "of")
    largest = rows[rows["of"].isin(kinds)].groupby("metric")["value"].max()
    noise, reach = (float(largest.get(metric, math.nan)) for metric in ("noise", "reach"))
    return (noise, reach) if math.isfinite(noise) and math.isfinite(reach) else None


def one_step(config: Config) -> str:
    return "" if config["steps"] > 1 else "steps=1: no step after the first"


def one_way(config: Config) -> str:
    return "" if config["chunks"][1:] else "only one number of chunks was run; use at least two, such as chunks=[1, 5]"


def no_oracle(config: Config) -> str:
    if config["experts"]:
        return "the float64 model does not support experts"
    return "" if config["model"] == KIT_MODEL else f"model={config['model']} has no float64 model to compare with"


def is_kits_step(config: Config) -> bool:
    return bool(config["implementation"] == KIT_SPLIT)


def regrouped(config: Config) -> str:
    return (
        "" if config["batching"] == "fixed" else f"batching={config['batching']} makes other microbatches of the rows"
    )


def one_backend(config: Config) -> str:
    only_megatron = "backend=megatron runs Megatron only; use backend=fsdp2 to compare both backends"
    return "" if config["backend"] == "fsdp2" else only_megatron


RULES = (
    rule(loss_parity, **by_dtype(1e-6)),
    by_noise(grad_parity, 1e-6, "gradients"),
    by_noise(params_parity, 1e-5, "weights"),
    replace(by_noise(later_steps, 1e-4, "later", coarse=0.1), cannot=one_step),
    rule(metric_parity, **by_dtype(1e-6)),
    rule(result_parity, **by_dtype(RESULT_LIMIT)),
    rule(ranks_agree),
    rule(metric_coverage),
    replace(by_noise(chunk_invariance, 1e-6, "gradients"), cannot=one_way),
    rule(one_reduction),
    rule(hooks_restored),
    rule(lr_of_this_step),
    rule(abort_is_clean),
    rule(version_ticks),
    rule(misuse_raises),
    rule(groups_return_to_baseline),
    rule(nothing_stays),
    rule(rows_copied, when=is_kits_step),
    rule(means_averaged, when=is_kits_step, cannot=regrouped),
    rule(one_pass, when=is_kits_step, cannot=regrouped),
    rule(nonfinite_skipped),
    rule(replicas_counted_once),
    replace(by_noise(oracle, 1e-5, "exact", coarse=0.05), cannot=no_oracle),
    rule(
        experts_balance,
        **by_dtype(1e-5, coarse=0.05),
        when=lambda config: bool(config["experts"] and config["aux_loss"] and not config.get("router_bias")),
    ),
    rule(routers_match, when=lambda config: bool(config.get("router_bias"))),
    by_noise(update, 1e-5, "gradients", coarse=0.1),
    rule(extreme_gaps, limit=1e-5, unit="ratio"),
    rule(masked_places),
    replace(by_noise(backends_agree, 1e-5, "exact"), cannot=one_backend),
)


# Sets of tolerances for the split lab. A tolerance that a set does not name keeps the lab's default. Both sets are for float32. For
# bfloat16, which has 8 bits of precision, start from the defaults.
PRESETS = {
    "strict": {
        "loss_parity": 1e-12,  # losses are summed in float64; only the order of the sum differs
        "metric_parity": 1e-12,
        "chunk_invariance": 0.0,  # the same sum for any number of chunks
        "grad_parity": 5e-7,  # four roundings of float32
        "result_parity": 5e-7,  # the norm of the gradients is float32
        "params_parity": 1e-6,
        "later_steps": 1e-5,
        "oracle": 1e-6,
        "backends_agree": 1e-6,
    },
    "common practice": {
        "loss_parity": 1e-3,  # usual in tests of training stacks for losses and gradient norms
        "result_parity": 1e-3,
        "metric_parity": 1e-3,
        "grad_parity": 1e-5,  # float32 gradients, per tensor
        "chunk_invariance": 1e-5,
        "params_parity": 1e-4,  # after some steps
        "later_steps": 1e-2,
        "oracle": 1e-3,
        "backends_agree": 1e-3,
    },
}
