"""The checks of the lab `stream`: those based on recomputation, and those based on the controller's ledger (`kit.stream.judge`)."""

from __future__ import annotations

import bisect
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from kit.labs.definition import EXPLORED, in_a_notebook, own_code
from kit.labs.explored import no_world_fails
from kit.labs.served import SERVED
from kit.labs.stream import tables
from kit.labs.stream.lab import ALL, ON_SIMULATED_RANKS, OWN, PHASES, phase_wanted
from kit.results.frames import read_ids, rows_of, with_ids
from kit.results.ledger import PerFrame, events
from kit.results.records import Unjudged
from kit.results.rules import (
    Measure,
    Measured,
    Missing,
    NotMeasured,
    Rule,
    Violations,
    incomplete,
    rule,
    select,
    settle,
)
from kit.results.units import counted
from kit.stream import judge
from kit.stream.judge.history import ABORTING, LoopLedger, pipelines
from kit.stream.judge.waiting import waiting_for

ByLedger = Callable[[LoopLedger], Measured | Violations]
Outcomes = Mapping[tuple[str, str], tuple[float | None, str]]

LOOPS = ("lockstep", "stream")  # phases with a ledger
# Phases with a ledger of a loop that is stopped and one of the loop that continues it.
RESUMED = ("resume", "resume_lockstep")
JUDGED = (*LOOPS, "rehearse")  # phases with a loop that the rules of a ledger judge
ANY_LOOP = (*LOOPS, *RESUMED, "rehearse")
MANY = 100  # groups needed to show a length bias


def read_loops(frame: pd.DataFrame, phase: str) -> list[LoopLedger]:
    """The ledgers of a phase's loops: a resumed loop comes after the one that was stopped. In a run of another lab, all events of each
    pipeline count as one loop of the phase `stream`."""
    rows = events(frame, phase, lab="stream", main="stream")
    if rows.empty:
        return []
    begins = rows.index[rows["metric"] == "capacity"] if (rows["lab"] == "stream").all() else rows.index[:0]
    if begins.empty:
        by_pipeline = [*pipelines(rows_of(rows)).values()]
        loops_only = [loop for loop in by_pipeline if loop.life or loop.by_event["capacity"]]  # a desk has neither
        return loops_only or by_pipeline[:1]
    parts = [rows.loc[begin : end - 1] for begin, end in pairwise(begins)]
    parts.append(rows.loc[begins[-1] :])
    return [LoopLedger(rows_of(part)) for part in parts]


loops = PerFrame(read_loops).of


def ledger(frame: pd.DataFrame, phase: str) -> LoopLedger | None:
    """The ledger of a phase's last loop."""
    return next(reversed(loops(frame, phase)), None)


def whole_loops(frame: pd.DataFrame, phases: Sequence[str]) -> Iterator[tuple[str, LoopLedger]]:
    """The ledgers that are judged, by their names: each loop of the phase rehearse, and the last of another phase, where one before it was
    stopped; of several pipelines that of each."""
    for phase in phases:
        begun = loops(frame, phase)
        names = {rows.pipeline for rows in begun}
        if len(names) > 1 and all(names):  # without a name: notes that a core wrote before its first event
            yield from ((f"{phase} of {rows.pipeline}", rows) for rows in begun)
        else:
            yield from ((phase, rows) for rows in (begun if phase == "rehearse" else begun[-1:]))


def needed(frame: pd.DataFrame, phase: str, lacking: str = "no phase recorded a ledger") -> LoopLedger:
    if (rows := ledger(frame, phase)) is None:
        raise Missing(lacking)
    return rows


def lockstep_is_the_kits(config: Mapping[str, Any]) -> str:
    """The loops in lockstep have the sampler strict: they say nothing about own code that is only a sampler."""
    own = own_code(config, (*OWN, "trainer", "transport"))
    return f"neither loop uses sampler={config['sampler']}" if own == ("sampler",) else ""


def engine_varies(config: Mapping[str, Any]) -> str:
    """Why two loops do not compute the same bits; empty if they do."""
    serve = config.get("serve", "megatron")
    varies = serve not in SERVED or serve == "vllm"
    return f"bits of serve={serve} may depend on which requests take a step together" if varies else ""


def with_own_code(config: Mapping[str, Any], phases: Sequence[str]) -> list[str]:
    """Those of these phases in which the loop runs the user's own code, if there is any."""
    return [phase for phase in phases if "lockstep" not in phase or not lockstep_is_the_kits(config)]


def in_every_loop(by_ledger: ByLedger, phases: Sequence[str]) -> Measure:
    """The first violation in any loop; else the events that a loop lacks; else the last answer. One loop with an answer is enough."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        last: Measured | None = None
        lacking: list[NotMeasured] = []
        for phase, rows in whole_loops(frame, with_own_code(config, phases)):
            try:
                answer = settle(by_ledger(rows))
            except NotMeasured as error:
                lacking.append(error)
                continue
            last = Measured(answer.value, f"{phase}: {answer.why}")
            if answer.value:
                return last
        missing = [error for error in lacking if isinstance(error, Missing)]
        if missing or last is None:
            raise [*missing, *lacking, Missing("no phase recorded a ledger")][0]
        return last

    return measure


def replicas_answer(rows: LoopLedger) -> Violations:
    """Did every replica answer in every loop?"""
    died = rows.by_event["died"]
    if rows.leaves_out("sent"):
        raise Missing("the ledger has no `sent` event")
    if rows.error:
        why, last = str(rows.ended.get("error", "")) if rows.ended else "", rows.by_event["completed"][-1:]
        # The loop survived a death after which samples were completed, unless its error names the replica.
        deadly = [
            row
            for row in died
            if not last or row.at > last[0].at or re.search(rf"\b{re.escape(str(row['replica']))}\b", why)
        ]
        yield from (f"replica {row['replica']} died: {row.get('why', 'no reason given')}" for row in deadly)
        yield from (str(row.get("why")) for row in rows.by_event["error"] if row.get("of") == "port")
    return "the loop continued without the dead replica" if died else "all requests were answered"


def no_length_bias(rows: LoopLedger) -> Measured:
    """Are trained samples as long on average as all started samples?

    For a sample that was given up, only a lower bound of its length is known; the Kaplan-Meier estimate accounts for that.
    """
    if rows.leaves_out("tokens"):
        raise Missing("the ledger has no `tokens` event")
    gone = {row["group"] for row in rows.trained()}
    pairs = [(group in gone, sample) for group, samples in rows.samples.items() for sample in samples.values()]
    trained = [sample.tokens for counts, sample in pairs if counts]
    if not any(not counts and sample.tokens for counts, sample in pairs):
        return Measured(0.0, "every generated token belongs to a trained group")
    aborts = any(row.numbers("aborted") for row in rows.by_event["chosen"])
    if aborts or rows.setting("sampler") in ABORTING:  # they keep the short ones
        raise NotMeasured(f"the sampler {rows.setting('sampler')} gives up groups that are slower than its window")
    if len(gone) < MANY:
        raise NotMeasured(f"{counted(len(gone), 'group')} trained; at least {MANY} are needed to show a bias")
    wanted = mean_length([(sample.tokens, bool(sample.completed)) for _, sample in pairs if sample.tokens])
    # Trained samples of a single length show no spread; the complete samples that were not trained may.
    varied = trained if len({*trained}) > 1 else [sample.tokens for _, sample in pairs if sample.completed]
    error = statistics.stdev(varied) / math.sqrt(len(trained))
    mean = statistics.fmean(trained)
    return Measured(
        abs(wanted - mean) / error if error else 0.0,
        f"mean length of {len(trained)} trained samples: {mean:.2f} tokens, of all {len(pairs)} started samples: {wanted:.2f} "
        f"(standard error {error:.2f})",
    )


def mean_length(seen: Sequence[tuple[int, bool]]) -> float:
    """Kaplan-Meier mean length. Each pair is the tokens of a sample and whether it completed."""
    whole = Counter(length for length, complete in seen if complete)
    lengths = sorted(length for length, _ in seen)
    longer, mean, before = 1.0, 0.0, 0  # the share of samples that are longer
    for length in sorted(whole):
        mean += longer * (length - before)
        longer *= 1 - whole[length] / (len(lengths) - bisect.bisect_left(lengths, length))
        before = length
    return mean


SHUFFLED = 0.95  # share of deliberately wrong stamps that a run must find; many runs together find 99 %
QUESTIONS_ASKED = 50
ENOUGH = {"float32": 0.5, "bfloat16": 0.25}  # share of tokens that must be decidable
AT_A_POSITION = 16  # fewest tokens at a position, or of a version, to judge it separately
OUTCOMES = ("digest", "global_loss", "grad_norm", "tokens_digest")


# -- recomputed -----------------------------------------------------------------------------------------------------------


def equals_plain(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does the loop with staleness 0 compute what the plain loop computes, bit for bit?

    Compares the weights of every version, losses and norms of every update, and every sample's tokens.
    """
    plain, lockstep = (outcomes(frame, phase) for phase in ("plain", "lockstep"))
    versions = sum(key[0] == "digest" for key in plain)
    if versions != config["steps"] + 1:
        incomplete(f"the plain loop has the weights of {versions} versions, expected {config['steps'] + 1}")
    return differing(plain, lockstep, f"over {counted(config['steps'], 'step')}")


def differing(wanted: Outcomes, actual: Outcomes, where: str) -> Measured:
    differ = [key for key in {**wanted, **actual} if wanted.get(key) != actual.get(key)]
    if not differ:
        return Measured(0.0, f"{len(wanted)} outcomes {where} are identical bit for bit")
    first = " ".join(differ[0])
    return Measured(float(len(differ)), f"{len(differ)} of {len(wanted)} outcomes {where} differ; first: {first}")


def outcomes(frame: pd.DataFrame, phase: str) -> Outcomes:
    rows = frame[(frame["phase"] == phase) & frame["metric"].isin(OUTCOMES)]
    if rows.empty:
        raise Missing(f"the phase {phase} recorded no weights")
    values = zip(rows["metric"], rows["ids"], rows["value"], rows["text"], strict=True)
    return {(metric, ids): (None if metric.endswith("digest") else value, text) for metric, ids, value, text in values}


def resume_equals(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does a loop that is stopped and resumed compute the same as without the stop?

    Compares the ledger of every resumed loop, and of the lockstep loop on ranks every outcome.
    """
    own = loops(frame, "resume")
    # An older kit resumed the lockstep loop in the phase `resume`, and no other on ranks.
    of_older_kit = len(own) > 1 and own[0].limit("steps") != own[-1].limit("steps")
    whys = []
    for phase in with_own_code(config, RESUMED):
        if phase not in phases_in(config) or (phase == "resume_lockstep" and (config["simulated"] or of_older_kit)):
            continue
        resumed = needed(frame, phase, f"the phase {phase} recorded no ledger")
        if config["simulated"]:
            answer = continues(frame, "stream", resumed)
        elif phase == "resume" and not of_older_kit:
            answer = settle(judge.resume_equals(own[0], resumed))
        else:
            answer = continues(frame, "lockstep", resumed)
            if not answer.value and not engine_varies(config):
                wanted, actual = outcomes(frame, "lockstep"), outcomes(frame, phase)
                same = differing(wanted, actual, f"with a stop after step {config['steps'] // 2}")
                answer = Measured(same.value, f"{same.why}; {answer.why}")
        if answer.value:
            return answer
        whys.append(answer.why)
    return Measured(0.0, "; ".join(whys))


def continues(frame: pd.DataFrame, phase: str, resumed: LoopLedger) -> Measured:
    """The ledger of a resumed loop against that of the whole loop, which ran in another phase."""
    return settle(judge.resume_equals(needed(frame, phase, f"the phase {phase} recorded no ledger"), resumed))


def controller_answers(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Does the controller answer questions while replicas and trainer are busy?"""
    answered, seconds = (
        select(frame, phase="stream", metric=name)["value"].iloc[-1] for name in ("answers", "answer_seconds")
    )
    questions = frame[(frame["phase"] == "stream") & (frame["metric"] == "questions")]["value"].max()
    if not answered and questions >= QUESTIONS_ASKED:
        raise NotMeasured(f"the controller answered none of {questions:.0f} questions (the event `ask`)")
    if answered < QUESTIONS_ASKED:
        raise NotMeasured(
            f"only {answered:.0f} questions fitted into the loop; {QUESTIONS_ASKED} are needed; use more steps"
        )
    return Measured(
        1000 * seconds, f"median over {answered:.0f} questions from outside while replicas and trainer worked"
    )


def logger_is_harmless(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does training continue when the logger raises?

    A loop that ends with another error must have begun a step after the logger raised last, or that error stands in the ledger."""
    rows = needed(frame, "stream" if config["simulated"] else "rehearse", "no phase with a broken logger was recorded")
    if rows.ended is None:
        raise NotMeasured("the loop did not end, so what the logger did to it is unknown; see no_deadlock")
    before = rows.rows[: rows.ended.at]
    failed = [row for row in before if row.event == "logger_failed"]
    if not failed and "run" not in {*frame["phase"]}:  # as every run of the lab has it
        raise NotMeasured("in this random world no logger raised")
    error = str(rows.ended.get("error", ""))
    if error and not failed:
        raise NotMeasured(f"the loop ended before anything was logged: {error}")
    raised = {str(row["why"]).partition(": ")[2] for row in failed} - {""}
    harmed = any(words in error for words in raised)
    if error and not harmed and not any(row.at > failed[-1].at for row in rows.by_event["begin"]):
        incidents = [row for row in before if row.event in ("logger_failed", "error", "died", "failed", "exhausted")]
        gone = Unjudged if incidents[-1].event == "logger_failed" else NotMeasured
        raise gone(f"after the logger raised, the loop ended before another step: {error}")
    ended = f", and ended later for another reason: {error}" if error else ""
    why = f"the logger raised {len(failed)} times; {error if harmed else f'the loop continued{ended}'}"
    return Measured(float(not failed) + float(harmed), why)


def death_named_in_time(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Is a killed replica named within a second?"""
    rehearsed = select(frame, phase="rehearse")
    if not rehearsed["metric"].isin(["killed", "named_seconds"]).any():
        raise NotMeasured("the last replica decoded nothing with version 1, so it was not killed; use more steps")
    seconds = select(frame, phase="rehearse", metric="named_seconds")["value"].iloc[-1]
    return Measured(float(seconds), "from the kill of the replica to its name in the ledger")


def no_rehearsal(config: Mapping[str, Any]) -> str:
    if "simulated" not in config:
        return "only a run of the lab rehearses this"
    if config["simulated"]:
        return left_out(config, ("stream",))
    if why := left_out(config, ("rehearse",)):
        return why
    return "" if config["replicas"] > 1 else "the only replica is not killed, because the loop could not continue"


def no_deadlock(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Did every loop end on its own?"""
    judged = with_own_code(config, ANY_LOOP)
    begun = [*whole_loops(frame, judged)]
    if not begun:
        raise Missing("no phase recorded a ledger")
    if all(rows.leaves_out("ended") for _, rows in begun):
        raise Missing("the ledger has no `ended` event")
    stuck = [(phase, rows) for phase, rows in begun if rows.ended is None]
    waiting = "; ".join(f"{phase} waits: {waiting_for(rows)}" for phase, rows in stuck)
    why = (
        f"no end: {', '.join(phase for phase, _ in stuck)}; {waiting}"
        if stuck
        else f"{counted(len(begun), 'loop')} ended"
    )
    return Measured(float(len(stuck)), why)


def stamps_true(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Was every token sampled from the version that it is stamped with?"""
    number, dtype = verified(frame), config.get("dtype", "float32")
    if number["decidable"] < ENOUGH[dtype] * number["tokens"]:
        raise NotMeasured(
            f"versions are too similar: rounding hides the differences between them in all but {number['decidable']:.0f} of "
            f"{number['tokens']:.0f} tokens; use a larger lr{' or dtype=float32' if dtype == 'bfloat16' else ''}"
        )
    if number["shuffled_found"] < SHUFFLED * number["shuffled"]:
        incomplete(
            f"only {number['shuffled_found']:.0f} of {number['shuffled']:.0f} deliberately wrong stamps were found"
        )
    return Measured(
        number["wrong_stamps"],
        f"{number['wrong_stamps']:.0f} of {number['decidable']:.0f} decidable tokens ({number['tokens']:.0f} tokens, "
        f"{number['samples_over_syncs']:.0f} of {number['samples']:.0f} samples span a sync) have the log-probability of another version",
    )


def kv_policy_kept(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Did every sync treat the KV cache as at_sync requires?"""
    number, at_sync = verified(frame), config["at_sync"]
    if at_sync in ("abort", "drain"):
        spanning = number["samples_over_syncs"]
        return Measured(spanning, f"{spanning:.0f} samples span a sync with at_sync={at_sync}")
    wrong, shown = number["policy_wrong"], number["policy_decidable"]
    if not shown:
        raise NotMeasured("no sample spans a sync by enough tokens to show whether the KV cache was kept or recomputed")
    return Measured(wrong, f"{wrong:.0f} of {shown:.0f} decisive tokens contradict at_sync={at_sync}")


def recomputed(frame: pd.DataFrame, metric: str, why: str) -> Measured:
    """One number of the recomputation. `why` may contain {value} and the names of other numbers."""
    numbers = verified(frame)
    if metric not in numbers:
        raise Missing(f"{metric} was not recorded")
    return Measured(numbers[metric], why.format(value=numbers[metric], **numbers))


def within_rounding(frame: pd.DataFrame, config: Mapping[str, Any], metric: str, why: str) -> Measured:
    """A difference of log-probabilities. In another dtype than float32 its limit follows from the noise of the recomputation."""
    measured = recomputed(frame, metric, f"{why} ({config.get('dtype', 'float32')} noise: {{noise:.1g}})")
    return measured if config.get("dtype", "float32") == "float32" else replace(measured, limit=allowed(frame))


def allowed(frame: pd.DataFrame) -> float:
    return recomputed(frame, "allowed", "").value or 0.0


def behaviour_logprob(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Do recorded log-probabilities match the distribution that tokens were sampled from?"""
    why = "largest difference from the closest version over {tokens:.0f} tokens"
    if "engine_noise" not in verified(frame):
        return within_rounding(frame, config, "logprob_error", why)
    noise = "noise at rest {engine_noise:.2g}, between the engine and a float64 model with the base weights"
    return replace(recomputed(frame, "logprob_error", f"{why}; {noise}"), limit=allowed(frame))


def draws_independent(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Was every token drawn with its own uniform random number, as far as the sampled tokens show?

    Measures log10 of the evidence against it. Right sampling exceeds a limit of 6 in at most one of a million runs.
    """
    numbers = verified(frame)
    if "evidence" not in numbers:
        raise NotMeasured("this run did not recompute the distributions that tokens were drawn from")
    table = with_ids(frame[(frame["phase"] == "verify") & (frame["metric"] == "evidence_for")], "suspicion")
    rows = table.to_dict("records")
    worst = max(rows, key=lambda row: float(row["value"]))
    loop = needed(frame, "stream")
    begun, trained = len({row["group"] for row in loop.by_event["sent"]}), len({row["group"] for row in loop.trained()})
    choice = log_ways(begun, trained)
    value, most = numbers["evidence"] - choice, float(worst["value"])
    left_out = f" and by 10^{choice:.1f} for the choice of {trained} of {begun} groups" if choice else ""
    return Measured(
        value,
        f"the {numbers['tokens']:.0f} tokens are 10^{most:.1f} times as likely with {worst['suspicion']} as with independent uniform "
        f"numbers, the strongest of {len(rows)} suspicions (divided by their number{left_out}: 10^{value:.1f}; right sampling reaches "
        "10^6 in one of 10^6 runs)",
    )


def log_ways(begun: int, trained: int) -> float:
    """log10 of the number of ways to choose the groups that are trained: which of them are dropped may depend on their answers."""
    return math.log10(math.comb(begun, min(begun, trained)))


def no_stale_prefix(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Was every prompt computed with the weights that its tokens are stamped with?"""
    why = "{value:.0f} of {tokens:.0f} tokens depend on a prompt that an older version computed"
    return recomputed(frame, "stale_prefixes", why)


def no_torn_generation(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Did every forward use the weights of a single version?"""
    why = "{value:.0f} of {tokens:.0f} tokens match the log-probability of no version"
    return recomputed(frame, "of_no_version", why)


def advantage_by_group(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Did the trainer get advantages computed within each sample's own group?"""
    return recomputed(frame, "advantage_error", "advantages: largest difference over {samples:.0f} samples")


def on_policy_ratio_one(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Do previous log-probabilities match the weights at the start of the step?"""
    why = "log-probabilities: largest difference over {samples:.0f} samples"
    return within_rounding(frame, config, "previous_error", why)


def is_weight_right(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Did the trainer get each sample's recorded log-probabilities?"""
    return recomputed(frame, "recorded_error", "log-probabilities: largest difference over {samples:.0f} samples")


def every_sample_trained(frame: pd.DataFrame, config: Mapping[str, Any]) -> Violations:
    """Did every sample of a trained group enter the gradient of its update once, with its own numbers?

    Compares the `trained` rows of each loop's ledger with the gradients that flowed back into the samples on the trainer, and what the loss
    was called with there with what the trainer got.
    """
    if not (frame["metric"] == "learning").any():
        raise NotMeasured("no update recorded which samples its gradients came from")
    judged, groups, why = 0, 0, "no update was finished"
    for phase in with_own_code(config, JUDGED):
        if (rows := ledger(frame, phase)) is None or not (trained := rows.trained()):
            continue
        groups += len(trained)
        learned, changed, updates = learned_in(frame, phase)
        for row in trained:
            update = row["step"], row.number("update", 0)
            if update not in updates:
                incomplete(f"{phase}: the trainer recorded no gradients of step {update[0]} update {update[1]}")
            elif not updates[update]:
                yield f"{phase}: {row}: step {update[0]} update {update[1]} never differentiated the loss that begin gave it"
            for sample in rows.samples[row["group"]]:
                times = learned.get((*update, row["group"], sample))
                judged += times is not None
                if times not in (None, 1) and updates.get(update):
                    yield f"{phase}: {row}: sample {sample} entered the gradient {times} times"
                elif columns := changed.get((*update, row["group"], sample)):
                    yield f"{phase}: {row}: the loss got sample {sample} with other {columns} than the trainer got"
    if not judged:
        raise NotMeasured(why if not groups else "no sample had an advantage, so no gradient was due")
    return f"{counted(judged, 'sample')} of {counted(groups, 'trained group')} entered the gradient once; the others have none by right"


def learned_in(
    frame: pd.DataFrame, phase: str
) -> tuple[Mapping[tuple[Any, ...], int], Mapping[tuple[Any, ...], str], Mapping[tuple[Any, ...], int]]:
    """How often each sample entered the gradient and what was changed in it, by step, update, group and sample; and rows by update."""
    rows = frame[frame["phase"] == phase]
    learned, updates = (
        [(read_ids(ids), value, text) for ids, value, text in part[["ids", "value", "text"]].itertuples(index=False)]
        for part in (rows[rows["metric"] == metric] for metric in ("learned", "learning"))
    )
    keyed = [((ids["step"], ids["update"], ids["group"], ids["sample"]), value, text) for ids, value, text in learned]
    return (
        {key: int(value) for key, value, _ in keyed},
        {key: text for key, _, text in keyed},
        {(ids["step"], ids["update"]): int(str(ids["passes"])) for ids, _, _ in updates},
    )


def verified(frame: pd.DataFrame) -> dict[str, float]:
    rows = select(frame, phase="verify", metric="tokens")
    if not rows["value"].iloc[-1]:
        incomplete("no token was recomputed")
    rows = frame[(frame["phase"] == "verify") & (frame["ids"] == "")]
    return dict(zip(rows["metric"], rows["value"].astype(float), strict=True))


def recomputed_as_sampled(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Do the recomputed samples and weights match those of the replicas?

    Compares digests of trained samples and of weights at the recomputation with those that the replicas recorded.
    """
    rows = needed(frame, "stream")
    sampled, recomputed = digests(frame, "stream", "sampled"), digests(frame, "verify", "recomputed")
    served, used = digests(frame, "stream", "served"), digests(frame, "verify", "recomputed_by")
    there = {(ids["group"], ids["sample"]) for ids in map(read_ids, recomputed)}
    trained = {(row["group"], sample) for row in rows.trained() for sample in rows.samples[row["group"]]}
    wrong = [f"sample {ids}" for ids, texts in recomputed.items() if not texts <= sampled.get(ids, set())]
    wrong += [f"group {group}, sample {sample} (left out)" for group, sample in sorted(trained - there)]
    wrong += [f"weights {ids}" for ids, texts in served.items() if texts != used.get(ids)]
    return Measured(
        float(len(wrong)),
        f"{len(recomputed)} samples and the weights of {len(served)} versions, digests of the replicas and of the recomputation: "
        f"{len(wrong)} differ or were left out{f'; first: {wrong[0]}' if wrong else ''}",
    )


def digests(frame: pd.DataFrame, phase: str, metric: str) -> dict[str, set[str]]:
    rows = frame[(frame["phase"] == phase) & (frame["metric"] == metric)]
    if rows.empty:
        raise Missing(f"the phase {phase} recorded no digest as {metric!r}")
    return {str(ids): {*texts} for ids, texts in rows.groupby("ids", sort=False)["text"]}


def tokens_match(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Do engine and trainer compute the same log-probability for tokens of the same version?

    Measures the mean difference at lag 0, in the version and at the position where it is largest: version 0, which no sync has
    moved, hides none of the others.
    """
    folder = Path(frame.attrs.get("folder", ""))
    table = tables.drift(frame, folder)
    fresh = table[table["lag"] == 0]
    if fresh.empty:
        raise NotMeasured(
            f"no token was generated by the version of its step; the smallest lag is {table['lag'].min()}"
        )
    overall = weighted(fresh)
    value, places = overall, ""
    for column, cells in (("version", tables.fresh_by_version(folder)), ("position", fresh)):
        judged = [row for row in cells.to_dict("records") if row["tokens"] >= AT_A_POSITION]
        if worst := max(judged, key=lambda row: float(row["mismatch"]), default=None):
            value = max(value, float(worst["mismatch"]))
            places += (
                f", largest {'in' if column == 'version' else 'at'} {column} {worst[column]}: {worst['mismatch']:.2g}"
            )
    lags = sorted({int(lag) for lag in table["lag"]} - {0})
    later = "".join(f"; lag {lag}: {weighted(table[table['lag'] == lag]):.2g}" for lag in lags)
    return Measured(
        value, f"mean |trainer - engine| at lag 0: {overall:.2g} over {fresh['tokens'].sum()} tokens{places}{later}"
    )


def weighted(table: pd.DataFrame) -> float:
    return float((table["mismatch"] * table["tokens"]).sum() / table["tokens"].sum())


def phases_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The phases that a config selects; configs of older kits have no such setting."""
    return phase_wanted(config.get("phases", ALL))


def left_out(config: Mapping[str, Any], phases: Sequence[str]) -> str:
    """Why none of these phases can have a ledger; empty if one can."""
    there = ON_SIMULATED_RANKS if config.get("simulated") else PHASES
    judged = [phase for phase in with_own_code(config, phases) if phase in there]
    if {*judged} & {*phases_in(config)}:
        return ""
    return f"the setting phases leaves out {', '.join(judged)}"


def no_loop(phases: Sequence[str]) -> Callable[[Mapping[str, Any]], str]:
    return lambda config: left_out(config, phases)


def ran(*phases: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether these phases ran on ranks."""
    return lambda config: not config["simulated"] and {*phases} <= {*phases_in(config)}


def resumes(config: Mapping[str, Any]) -> bool:
    on_ranks = ran("resume")(config) or ran("lockstep", "resume_lockstep")(config)
    return on_ranks or (config["simulated"] and "resume" in phases_in(config))


def nothing_resumed(config: Mapping[str, Any]) -> str:
    if config["steps"] < 2:
        return "a single step leaves nothing to resume"
    # A simulated loop that resumes is compared with the one that did not stop.
    return left_out(config, ("stream",)) if config["simulated"] else ""


def explores(config: Mapping[str, Any]) -> bool:
    return bool(
        config["worlds"]
        and (EXPLORED.phase in phases_in(config) or in_a_notebook(config, OWN))
        and own_code(config, OWN)
    )


# Rules of a loop's ledger, in every loop: lockstep, stream, and rehearse, which has a failed step and a dead replica.
LEDGER_RULES: tuple[ByLedger, ...] = (*judge.RULES, replicas_answer, no_length_bias)
# Lockstep waits for all groups of a step by design.
LOOPS_OF = {"trains_before_straggler": ("stream",)}
LIMITS = {"no_length_bias": 3.0}  # standard errors; all others count violations


def rule_of_ledger(by_ledger: ByLedger) -> Rule:
    phases = LOOPS_OF.get(by_ledger.__name__, JUDGED)
    asked = rule(by_ledger, limit=LIMITS.get(by_ledger.__name__, 0.0), cannot=no_loop(phases))
    return replace(asked, measure=in_every_loop(by_ledger, phases))


RULES: tuple[Rule, ...] = (
    rule(
        equals_plain,
        when=ran("plain", "lockstep"),
        cannot=lambda config: lockstep_is_the_kits(config) or engine_varies(config),
    ),
    rule(recomputed_as_sampled, when=ran("verify")),
    rule(stamps_true, when=ran("verify")),
    rule(behaviour_logprob, limit=1e-5, when=ran("verify")),
    rule(draws_independent, limit=6.0, when=ran("verify")),
    rule(kv_policy_kept, when=ran("verify")),
    rule(no_stale_prefix, when=ran("verify")),
    rule(no_torn_generation, when=ran("verify")),
    rule(advantage_by_group, limit=1e-6, when=ran("verify")),
    rule(on_policy_ratio_one, limit=1e-5, when=ran("verify")),
    rule(is_weight_right, when=ran("verify")),
    rule(every_sample_trained, when=ran()),
    rule(
        resume_equals,
        when=resumes,
        cannot=nothing_resumed,
    ),
    rule(no_world_fails, when=explores, cannot=lambda config: in_a_notebook(config, OWN)),
    rule(no_deadlock, cannot=no_loop(ANY_LOOP)),
    rule(controller_answers, limit=50, unit="ms", when=ran("stream")),
    rule(logger_is_harmless, cannot=no_rehearsal),
    rule(death_named_in_time, limit=1, unit="s", when=ran(), cannot=no_rehearsal),
    # 3e-2 is usual between an engine and a trainer. The lab recomputes its own tokens, which is more exact.
    rule(tokens_match, limit=3e-2, when=lambda config: "simulated" not in config),
    *map(rule_of_ledger, LEDGER_RULES),
)

PRESETS = {
    "strict": {
        "behaviour_logprob": 1e-6,  # twice the noise of float32
        "on_policy_ratio_one": 1e-6,
        "controller_answers": 10.0,
        "death_named_in_time": 0.2,
    },
    "common practice": {
        "behaviour_logprob": 3e-2,  # usual between an engine and a trainer
        "on_policy_ratio_one": 3e-2,
        "controller_answers": 1000.0,  # a loop that polls once per second
        "death_named_in_time": 60.0,
    },
}
