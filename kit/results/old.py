"""Old names that stored runs, files of settings and tolerances, and scripts still have. Standard library only.

One table and one function for each kind of name. Where a person gives an old name, `Renamed` warns with the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Code named by a setting (`module:attr`) that has moved.
CODE = {
    "kit.labs.split.ranks.losses:of_recipe": "kit.labs.split.ranks.backends:of_recipe",
    "kit.share.own:Pipeline": "kit.share.member:Pipeline",
}

# Settings that no longer exist, by lab, and what holds instead. Those of a nested config are gone under its name too (`a.temperature`).
SETTINGS = {
    "share": {"temperature": "tokens are sampled at temperature 1; the lab stream has the setting"},
    "stream": {"advantage": "advantages are those of GRPO, within each group"},
    "sync": {
        "asynchronous": "replicas always serve while the trainer trains",
        "trainer_on": "`placement` chooses the trainer's devices",
    },
}

# Settings with another name, by lab. Those of the two pipelines of `share` had a suffix.
RENAMED = {
    "share": {
        f"{setting}_{name}": f"{name}.{setting}" for setting in ("train", "infer", "steps", "answer") for name in "ab"
    },
}
# Settings that were a list with a value for each pipeline.
PER_PIPELINE = {"share": ("pace_ms", "train_pace_ms")}
SINGLE = ("A", "E")  # scenarios of `share` in which the settings of the second pipeline meant nothing

# A tolerance has the name of its rule; in older runs it had a separate name.
TOLERANCES: dict[str, tuple[str, ...]] = {
    "abort_changed": ("abort_is_clean",),
    "advantage_error": ("advantage_by_group",),
    "alike": ("namespaces_apart",),
    "answer_ms": ("controller_answers",),
    "asleep_tensors": ("sleepers_release",),
    "backends_rel": ("backends_agree",),
    "balance_rel": ("experts_balance",),
    "base_differ": ("base_equal",),
    "chunk_rel": ("chunk_invariance",),
    "comm_share": ("comm_released",),
    "copies": ("cache_bounded",),
    "drift_mib": ("memory_drift",),
    "failures_hidden": ("destroy_failure_raises",),
    "failures_unclean": ("failure_is_clean",),
    "fds_more": ("fds_return",),
    "gap_rel": ("extreme_gaps",),
    "generators_moved": ("random_unchanged",),
    "grad_rel": ("grad_parity",),
    "groups_kept": ("groups_down_asleep",),
    "groups_more": ("groups_return_to_baseline",),
    "groups_shared": ("groups_are_distinct",),
    "growth_mib": ("memory_growth",),
    "hooks_lost": ("hooks_restored",),
    "initialised": ("model_parallel_uninitialised",),
    "kept_asleep": ("memory_down_asleep",),
    "later_rel": ("later_steps",),
    "left_more": ("nothing_left",),
    "left_over": ("nothing_left",),
    "logger_harm": ("logger_is_harmless",),
    "logits_rel": ("logits_equal",),
    "logprob_error": ("behaviour_logprob",),
    "loops_stuck": ("no_deadlock",),
    "loops_wrong": ("loops_right",),
    "loss_rel": ("loss_parity",),
    "masked_reach": ("masked_places",),
    "metric_rel": ("metric_parity",),
    "metrics_missing": ("metric_coverage",),
    "misuse_silent": ("misuse_raises",),
    "named_s": ("death_named_in_time",),
    "names_moved": ("membership_unchanged",),
    "names_rel": ("names_right",),
    "names_replaced": ("names_restored",),
    "nonfinite_changed": ("nonfinite_skipped",),
    "not_as_found": ("state_as_found",),
    "not_as_sampled": ("recomputed_as_sampled",),
    "numbers_apart": ("ranks_agree",),
    "old_groups": ("old_groups_dead",),
    "options_changed": ("options_unchanged",),
    "oracle_rel": ("oracle",),
    "other_weights": ("weights_after_wake",),
    "others_mib": ("others_untouched",),
    "others_touched": ("others_untouched",),
    "out_of_order": ("version_order",),
    "outcomes_differ": (
        "same_numbers",
        "equals_plain",
    ),
    "over_budget_mib": ("peak_fits",),
    "params_rel": ("params_parity",),
    "peak_ratio": ("reload_peak",),
    "piled_up": ("nothing_piles_up",),
    "previous_error": ("on_policy_ratio_one",),
    "rate_off": ("lr_of_this_step",),
    "recorded_error": ("is_weight_right",),
    "reductions_off": ("one_reduction",),
    "released_share": ("tensors_released",),
    "replicas_off": ("replicas_counted_once",),
    "residual_mib": ("residual",),
    "result_rel": ("result_parity",),
    "resume_differs": ("resume_equals",),
    "routed_part": ("routing_effective",),
    "segments_more": ("segments_return_to_baseline",),
    "slope_mib": ("memory_slope",),
    "stale_holders": ("handles_alive",),
    "stale_prefixes": ("no_stale_prefix",),
    "stale_usable": ("stale_handle_raises",),
    "sweep_missing": ("sweep_arrived",),
    "tensors_changed": ("tensors_restored",),
    "tensors_differ": ("bit_exact",),
    "tensors_left": ("no_tensor_left",),
    "threads_more": ("threads_return",),
    "time_ratio": ("time_steady",),
    "times_shown": ("gate_shown",),
    "token_mismatch": ("tokens_match",),
    "torn_reads": ("no_torn_reads",),
    "torn_tokens": ("no_torn_generation",),
    "unanswered": ("receivers_answer",),
    "update_rel": ("update",),
    "values_differ": ("training_continues_bitwise",),
    "versions_off": ("no_double_bump",),
    "versions_wrong": ("version_ticks",),
    "worlds_left": ("world_released",),
    "wrong_groups": ("every_group_communicates",),
    "wrong_policy": ("kv_policy_kept",),
    "wrong_stamps": ("stamps_true",),
    "wrong_values": ("every_group_communicates",),
}


class Renamed(FutureWarning):
    """An old name was accepted; the sentence has the new one."""


def current_code(target: str) -> str:
    return CODE.get(target, target)


def current_settings(lab: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A config without settings that no longer exist, with the current names of settings and of code."""
    settings = dict[str, Any]()
    single = lab == "share" and values.get("scenario") in SINGLE
    for name, value in values.items():
        if isinstance(value, Mapping):  # a nested config
            settings[name] = {setting: inner for setting, inner in value.items() if not dropped(lab, setting)}
            continue
        for setting, current in () if dropped(lab, name) else current_setting(lab, name, value).items():
            if setting == name or not (single and setting.startswith("b.")):
                settings[setting] = current_code(current) if isinstance(current, str) else current
    return settings


def dropped(lab: str, name: str) -> str:
    """What holds instead of a setting that no longer exists; empty for one that does, or never did."""
    return SETTINGS.get(lab, {}).get(name.rpartition(".")[2], "")


def current_setting(lab: str, name: str, value: Any) -> dict[str, Any]:
    """A setting under its current name, or several that took its place."""
    if name in PER_PIPELINE.get(lab, ()) and isinstance(value, list | tuple):
        return {f"{pipeline}.{name}": number for pipeline, number in zip("ab", value, strict=False)}
    return {RENAMED.get(lab, {}).get(name, name): value}


def current_tolerances(name: str) -> tuple[str, ...]:
    """The rules that had a tolerance of this name; none if it never existed."""
    return TOLERANCES.get(name, ())
