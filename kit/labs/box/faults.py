"""The known bugs of the lab `box` that can be switched on, each with the rule that catches it: ways in which a probe was fooled, and a box
that hangs, dies or leaves something behind."""

from __future__ import annotations

from kit.labs.definition import Fault, exposed_by

PROBES = "kit.labs.box.ranks.probes"
BUGS = "kit.labs.box.ranks.bugs"

FAULTS = (
    *exposed_by(
        {"probes": "groups", "timeout_s": 8.0},
        Fault(
            "hangs",
            "one rank never comes back from making a group",
            "every_probe_ends",
            exit=3,
            patch={f"{PROBES}:Probes.groups": f"{BUGS}:sleeps"},
        ),
        Fault(
            "dies",
            "one rank is killed while it makes a group",
            "every_probe_ends",
            exit=3,
            patch={f"{PROBES}:Probes.groups": f"{BUGS}:kills_itself"},
        ),
    ),
    Fault(
        "wrong-sum",
        "an all-reduce returns a sum that is off by one",
        "all_reduce_device",
        set={"probes": "all_reduce"},
        patch={f"{PROBES}:sums_are_exact": f"{BUGS}:one_too_large"},
    ),
    *exposed_by(
        {"probes": "resize"},
        Fault(
            "kept-memory",
            "storage that is resized to nothing keeps its memory",
            "resize_gives_back",
            patch={f"{PROBES}:Probes.change_size": f"{BUGS}:keeps_its_size"},
        ),
        Fault(
            "moved-bytes",
            "two words of a buffer change places while its storage grows again",
            "resize_views",
            patch={f"{PROBES}:weighted_sum": f"{BUGS}:swaps_two_words"},
        ),
    ),
    *exposed_by(
        {"probes": "absent_peer"},
        Fault(
            "unnamed-rank",
            "a rank that comes late is not named",
            "absent_peer_named",
            where="notebook",
            patch={"kit.world.calls:blame": "kit.labs.box.bugs:names_nobody"},
        ),
        Fault(
            "late-deadline",
            "a group waits three times as long as its deadline",
            "absent_peer_deadline",
            patch={f"{PROBES}:DEADLINE_S": f"{BUGS}:LONGER_S"},
        ),
        Fault(
            "deaf-wait",
            "a wait for an absent peer ends without an error",
            "absent_peer_deadline",
            patch={f"{PROBES}:join_alone": f"{BUGS}:gives_up_silently"},
        ),
    ),
    Fault(
        "kept-name",
        "a killed rank leaves a name in /dev/shm",
        "killed_rank_leaves_nothing",
        set={"probes": "killed_rank"},
        patch={f"{PROBES}:Probes.hold": f"{BUGS}:leaves_a_name"},
    ),
    *exposed_by(
        {"probes": "rebuild"},
        Fault(
            "leaked-descriptor",
            "every reload of groups keeps a file descriptor",
            "rebuild_counts",
            patch={"kit.megatron.groups:reload": f"{BUGS}:keeps_a_descriptor"},
        ),
        Fault(
            "dropped-option",
            "groups come back with the default timeout",
            "rebuild_options",
            patch={"kit.megatron.groups:_make": f"{BUGS}:drops_timeouts"},
        ),
    ),
    Fault(
        "unlike-twin",
        "the second of two equal jobs starts from other weights",
        "job_tp_bits",
        set={"probes": "job_tp"},
        patch={f"{PROBES}:Probes.job": f"{BUGS}:other_seed_at_second"},
    ),
    Fault(
        "not-finite",
        "the loss of a job with experts is not a number",
        "job_experts_finite",
        set={"probes": "job_experts"},
        patch={"kit.megatron.model:Training.step": f"{BUGS}:loss_is_nan"},
    ),
)
