"""Known bugs of weight sync. `ranks/broken.py` implements each; the check that it names detects it."""

from kit.labs.definition import Fault

QUICK = {"cycles": 2, "sweep": False}
UNSEEN = {**QUICK, "verify": "none"}  # a comparison in transit would end the run before the check
TWO_RANKS = {**QUICK, "ranks": 6, "replicas": 2, "infer_tp": 2}
SERVING = {**QUICK, "placement": "apart", "ranks": 4, "replicas": 2}

FAULTS = (
    Fault(
        name="permuted-rows",
        breaks="two rows of a tensor are swapped on arrival; its sum, minimum and maximum stay the same",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(
        name="stale-bucket",
        breaks="a bucket with changed tensors counts as clean, so old bytes are sent",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(
        name="cache-after-offload",
        breaks="buckets are packed after the weights were offloaded, from empty tensors",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(name="double-bump", breaks="an expansion increments the version", check="no_double_bump", set=QUICK),
    Fault(
        name="activate-before-publish",
        breaks="replicas get requests before their version is published",
        check="version_order",
        set=QUICK,
    ),
    Fault(
        name="publish-before-apply",
        breaks="the version is published before the new weights are applied",
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
        breaks="the ranks of a replica swap their shards",
        check="bit_exact",
        set=TWO_RANKS,
    ),
    Fault(
        name="misaligned-offset",
        breaks="a tensor is read at an offset that is one element too far",
        check="bit_exact",
        set=UNSEEN,
    ),
    Fault(
        name="leaked-group",
        breaks="the temporary process group of a sync is not destroyed",
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
        breaks="weights change while the gate is open, and a forward runs on torn weights",
        check="no_torn_reads",
        set=SERVING,
        needs={"refresh": ("staged",)},
    ),
    Fault(
        name="early-gate",
        breaks="the gate opens before the last bucket is applied",
        check="no_torn_reads",
        set=SERVING,
        needs={"refresh": ("staged",)},
    ),
    Fault(
        name="reads-ahead",
        breaks="a forward reads one tensor before it passes the gate and the others after",
        check="no_torn_reads",
        set=SERVING,
    ),
    Fault(
        name="resumed-trainer",
        breaks="the trainer resumed with other weights and still publishes the base",
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
        breaks="a rank runs the new version before all ranks of its replica are ready and keeps it if one of them fails",
        check="failure_is_clean",
        set=TWO_RANKS,
    ),
    Fault(
        name="keeps-new-weights",
        breaks="a failed receiver keeps the new weights and serves with them",
        check="failure_is_clean",
        set=QUICK,
    ),
)
