"""Known bugs of weight sync. Each is switched on in `broken.py` and caught by the check it names."""

from kit.labs.definition import Fault

QUICK = {"cycles": 2, "sweep": False}
UNSEEN = {**QUICK, "verify": "none"}  # what is compared on the way would end the run before the check sees it
TWO_RANKS = {**QUICK, "ranks": 6, "replicas": 2, "infer_tp": 2}
SERVING = {**QUICK, "placement": "apart", "ranks": 4, "replicas": 2}

FAULTS = (
    Fault(
        name="permuted-rows",
        breaks="two rows of a tensor change places on arrival: its sum, least and largest number stay",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(
        name="stale-bucket",
        breaks="a bucket is taken for clean after its tensors have changed, and goes out as it was",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(
        name="cache-after-offload",
        breaks="buckets are built when the weights are off the device already, from tensors without bytes",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(name="double-bump", breaks="an expansion counts as a new version", check="no_double_bump", set=QUICK),
    Fault(
        name="activate-before-publish",
        breaks="replicas are routed to before they know their version",
        check="version_order",
        set=QUICK,
    ),
    Fault(
        name="publish-before-apply",
        breaks="the version is published while the old weights are still there",
        check="version_order",
        set=QUICK,
    ),
    Fault(
        name="dropped-bucket",
        breaks="a receiver acknowledges its last bucket without applying it",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(
        name="swapped-shards",
        breaks="the ranks of a replica take each other's shards",
        check="bit_exact",
        set=TWO_RANKS,
    ),
    Fault(
        name="misaligned-offset",
        breaks="a tensor is read from a place that is off by one number",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(
        name="leaked-group",
        breaks="the temporary group of a sync is not destroyed",
        check="groups_return_to_baseline",
        set={**QUICK, "transport": "broadcast"},
    ),
    Fault(
        name="leaked-segment",
        breaks="a receiver keeps the sender's memory mapped",
        check="segments_return_to_baseline",
        set={**QUICK, "transport": "shm"},
        needs={"transport": ("shm",)},
    ),
    Fault(
        name="torn-read",
        breaks="weights change with the gate open, and a forward runs when half of them are new",
        check="no_torn_reads",
        set=SERVING,
        needs={"refresh": ("staged",)},
    ),
    Fault(
        name="early-gate",
        breaks="the gate opens when one bucket is still to be applied",
        check="no_torn_reads",
        set=SERVING,
        needs={"refresh": ("staged",)},
    ),
    Fault(
        name="reads-ahead",
        breaks="a forward reads one tensor before it goes through the gate, and the others after",
        check="no_torn_reads",
        set=SERVING,
    ),
    Fault(
        name="resumed-trainer",
        breaks="the trainer resumed from elsewhere, and publishes the base all the same",
        check="base_equal",
        set=QUICK,
    ),
    Fault(
        name="receiver-dies",
        breaks="a receiver is killed in the middle of a sync",
        check="receivers_answer",
        exit=3,
        set={**QUICK, "deadline_s": 5},
    ),
    Fault(
        name="receiver-stalls",
        breaks="a receiver stops answering in the middle of a sync",
        check="receivers_answer",
        exit=3,
        set={**QUICK, "deadline_s": 3},
    ),
    Fault(
        name="activates-alone",
        breaks="a rank runs the new version before all ranks of its replica are ready, and keeps it when one of them fails",
        check="failure_is_clean",
        set=TWO_RANKS,
    ),
    Fault(
        name="keeps-new-weights",
        breaks="a receiver that fails leaves the new weights in place, and serves with them",
        check="failure_is_clean",
        set=QUICK,
    ),
)
