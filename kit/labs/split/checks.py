"""What the split lab asks of its records: that the piece-wise step is the plain one, number by number, however it is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.split import parity
from kit.labs.split.config import cases_of
from kit.results import Check, Measured, NotMeasured, select

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
    """A number of every case; with any missing there is nothing to judge."""
    rows = select(frame, phase=phase, metric=metric)
    missing = len(cases_of(config)) - rows["cycle"].nunique()
    if missing:
        raise NotMeasured(f"{metric} is missing for {missing} of {len(cases_of(config))} ways to cut")
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
    if config["steps"] < 2:
        raise NotMeasured("there was one step only")
    table = parity.paired(frame, config)
    row = parity.worst(table[(table["step"] > 1) & ~table["metric"].isin(["lr", "wd", "updated"])], "error")
    steps = pd_steps(frame, config, "gradient_error")
    apart = parity.worst(steps[steps["step"] > 1], "value")
    said = f"at worst {row['metric']} in step {row['step']}, {where(config, row['cycle'])}: {row['split']:.9g} against {row['sync']:.9g}"
    return Measured(
        max(row["error"], apart["value"]), f"{said}; gradients {apart['value']:.2g} off in step {apart['step']}"
    )


def fields(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """What the result says beside its metrics. A norm of later steps has rounding of the weights in it; the rest has none."""
    table = parity.paired(frame, config)
    table = table[table["metric"].isin(FIELDS) & ((table["metric"] != "grad_norm") | (table["step"] == 1))]
    row = parity.worst(table.assign(error=parity.error(table["split"], table["sync"], parity.FLOOR)), "error")
    if not row["error"]:
        return Measured(0, f"{', '.join(FIELDS)}: bit for bit, {places(config)}")
    said = f"at worst {row['metric']} in step {row['step']}, {where(config, row['cycle'])}"
    return Measured(row["error"], f"{said}: {row['split']:.9g} against {row['sync']:.9g}")


def ranks(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Numbers of the result that are not the same on all ranks."""
    told = frame[(frame["phase"] == "split") & frame["metric"].str.startswith("split/")]
    if told.empty:
        raise NotMeasured("no numbers of split")
    sides = told.pivot_table(
        index=["cycle", "metric"], columns="rank", values="value", aggfunc="first", dropna=False
    ).reindex(columns=range(config["ranks"]))
    first = sides[0]
    apart = sides[~sides.apply(lambda one: (one == first) | (one.isna() & first.isna())).all(axis=1)]
    if apart.empty:
        return Measured(
            0, f"{sides.index.get_level_values('metric').nunique()} numbers on {config['ranks']} ranks, bit for bit"
        )
    cycle, metric = apart.index[0]
    values = ", ".join(f"{value:.9g}" for value in apart.iloc[0])
    return Measured(len(apart), f"{metric.removeprefix('split/')} by rank: {values}; {where(config, cycle)}")


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
    """Numbers `name/step` of every case."""
    rows = frame[(frame["phase"] == "compare") & frame["metric"].str.fullmatch(rf"{name}/\d+")]
    if rows["cycle"].nunique() < len(cases_of(config)):
        raise NotMeasured(f"{name} was not measured for every way to cut")
    return rows.assign(step=rows["metric"].str.rpartition("/")[2].astype(int))


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
    if len(config["chunks"]) < 2:
        raise NotMeasured("a step was cut in one way only: name two numbers of chunks or more")
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


def promised(*names: str, phases: Sequence[str] = ("rehearse",), what: str) -> Measure:
    """Sums of what ranks counted of broken promises; right is 0."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        found = {}
        for name in names:
            rows = frame[frame["phase"].isin(phases) & (frame["metric"] == name)]
            if rows.empty:
                raise NotMeasured(f"no records of {name}")
            found[name] = rows["value"].max()
        broken = [f"{name.replace('_', ' ')}: {value:g}" for name, value in found.items() if value]
        return Measured(sum(found.values()), "; ".join(broken) or what)

    return measure


def rate(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    told = counted(frame, config, "split", "rate_off")["value"].max()
    return Measured(
        told, "the rate of the result against the one that the optimizer used" + ("" if told else ": the same")
    )


def replicas(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Counts that are known from the rows themselves, against what the step says."""
    table = parity.values(frame, "split", "split")
    known = parity.values(frame, "prepare", "true")
    wide = table.pivot_table(index=["cycle", "step"], columns="metric", values="value")
    pairs = {"num_valid_samples": "sequences", "num_unmasked_tokens": "tokens"}
    pairs |= {"global_valid_seqs": "sequences", "global_valid_toks": "tokens"}
    here = {name: by for name, by in pairs.items() if name in wide}
    if not here:
        raise NotMeasured("the result counts no sequences and no tokens")
    true = known.pivot_table(index="step", columns="metric", values="value")
    times = {
        name: wide[name] / true[by].reindex(wide.index.get_level_values("step")).to_numpy() for name, by in here.items()
    }
    off = pd.DataFrame(times).sub(1).abs().fillna(float("inf"))
    worst = off.max().idxmax()
    said = f"counts are those of the rows: {', '.join(here)}"
    if off[worst].max():
        said = f"{worst} is {times[str(worst)][off[worst].idxmax()]:g} times what the rows hold"
    copies = config["tp"] * config["pp"]
    return Measured(float(off.max().max()), f"{said}; {copies} replica{'s' if copies > 1 else ''} of each data rank")


def oracle(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Loss, metrics and gradients of the plain step against float64 formulas of their own."""
    if config["experts"]:
        raise NotMeasured("the float64 model has no experts")
    exact = parity.values(frame, "oracle", "oracle").rename(columns={"value": "exact"})
    plain = parity.values(frame, "sync", "sync").rename(columns={"value": "plain"})
    table = exact.merge(plain, on=["cycle", "step", "metric"])
    if len(table) < len(exact) or table.empty:
        raise NotMeasured("the oracle has metrics that the step lacks")
    floor = parity.REGROUPED if config["dtype"] == "bfloat16" else parity.FLOOR  # rounding, as there
    table = table.assign(error=parity.error(table["plain"], table["exact"], floor))
    row = parity.worst(table, "error")
    gradients = float(select(frame, phase="oracle", metric="oracle/gradient_error")["value"].max())
    return Measured(
        max(row["error"], gradients),
        f"{table['metric'].nunique()} metrics in float64; worst {row['metric']}: {row['plain']:.9g} against {row['exact']:.9g}; "
        f"gradients {gradients:.2g} off",
    )


def backends(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    if config["backend"] != "fsdp2":
        raise NotMeasured("backend=megatron: run backend=fsdp2 to have both compared")
    rows = frame[(frame["phase"] == "other_backend") & frame["metric"].str.match(r"other/(gradient|parameter)_error")]
    if rows.empty:
        raise NotMeasured("the other backend was not run")
    first = rows[rows["metric"] == "other/gradient_error/1"]["value"].max()
    weights = rows[rows["metric"] == "other/parameter_error"]["value"].max()
    return Measured(
        first, f"gradients of Megatron and FSDP2 in step 1; weights after {config['steps']} steps {weights:.2g} off"
    )


def fine(exact: float, coarse: float) -> Callable[[Mapping[str, Any]], float]:
    return lambda config: coarse if config.get("dtype") == "bfloat16" else exact


def zero(name: str, question: str, measure: Measure, tolerance: str) -> Check:
    return Check(name=name, question=question, tolerance=tolerance, limit=0, unit="1", better="<=", measure=measure)


def ratio(name: str, question: str, measure: Measure, tolerance: str, *, exact: float, coarse: float = COARSE) -> Check:
    limit = fine(exact, coarse)
    return Check(
        name=name, question=question, tolerance=tolerance, limit=limit, unit="ratio", better="<=", measure=measure
    )


CHECKS = (
    ratio("loss_parity", "Is the loss that of the plain step?", loss, "loss_rel", exact=1e-6),
    ratio("grad_parity", "Are the gradients?", gradient, "grad_rel", exact=1e-6),
    ratio("params_parity", "Are the weights, steps later?", parameters, "params_rel", exact=1e-5),
    ratio("later_steps", "Are they still, after updates?", later, "later_rel", exact=1e-4, coarse=0.1),
    ratio("metric_parity", "Is every metric?", every_metric, "metric_rel", exact=1e-6),
    ratio("result_parity", "Is what the result says beside them?", fields, "result_rel", exact=1e-6),
    zero("ranks_agree", "Do all ranks say the same?", ranks, "numbers_apart"),
    zero("metric_coverage", "Do both give the same keys?", coverage, "metrics_missing"),
    ratio("chunk_invariance", "Do gradients not hang on how the step is cut?", chunks, "chunk_rel", exact=1e-6),
    zero("one_reduction", "Is each gradient reduced exactly once?", reductions, "reductions_off"),
    zero(
        "hooks_restored",
        "Are the job's hooks put back, after errors too?",
        promised("hooks_lost", phases=("split", "rehearse"), what="all hooks are back after finish, abort and errors"),
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
            "error_closed",
            "error_swallowed",
            what="begin, microbatch and finish in the wrong state all raise, and abort does nothing there",
        ),
        "misuse_silent",
    ),
    zero("replicas_counted_once", "Does each row count once?", replicas, "replicas_off"),
    ratio(
        "oracle", "Do loss, metrics and gradients agree with float64?", oracle, "oracle_rel", exact=1e-5, coarse=0.05
    ),
    ratio("backends_agree", "Do Megatron and FSDP2 agree?", backends, "backends_rel", exact=1e-5),
)
