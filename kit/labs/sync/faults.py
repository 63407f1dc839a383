"""The known bugs of the lab `sync` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

QUICK = {"cycles": 2, "sweep": False}
UNSEEN = {"verify": "none"}  # a comparison in transit would end the run before the check
TWO_RANKS = {"ranks": 6, "replicas": 2, "infer_tp": 2}
SERVING = {"placement": "apart", "ranks": 4, "replicas": 2}

# Known bugs of weight sync. `ranks/broken.py` implements each; the check that it names detects it.
FAULTS = exposed_by(
    QUICK,
    Fault(
        "permuted-rows",
        "two rows of a tensor are swapped on arrival; its sum, minimum and maximum stay the same",
        "bit_exact",
        set=UNSEEN,
    ),
    Fault(
        "stale-bucket",
        "a bucket with changed tensors is not packed again, so old bytes are sent",
        "bit_exact",
        set=UNSEEN,
    ),
    Fault(
        "cache-after-offload",
        "buckets are packed after the weights were offloaded, from empty tensors",
        "bit_exact",
        set=UNSEEN,
    ),
    Fault("double-bump", "an expansion increments the version", "no_double_bump"),
    Fault("activate-before-publish", "replicas get requests before their version is published", "version_order"),
    Fault("publish-before-apply", "the version is published before the new weights are applied", "version_order"),
    Fault("dropped-bucket", "a receiver acknowledges its last bucket without applying it", "bit_exact", set=UNSEEN),
    Fault("swapped-shards", "the ranks of a replica swap their shards", "bit_exact", set=TWO_RANKS),
    Fault("misaligned-offset", "a tensor is read at an offset that is one element too far", "bit_exact", set=UNSEEN),
    Fault(
        "leaked-group",
        "the temporary process group of a sync is not destroyed",
        "groups_return_to_baseline",
        set={"transport": "broadcast"},
    ),
    Fault(
        "leaked-segment",
        "a receiver keeps the sender's memory mapped",
        "segments_return_to_baseline",
        set={"transport": "shm"},
        needs={"transport": ("shm",)},
    ),
    Fault(
        "torn-read",
        "weights change while the gate is open, and a forward runs on torn weights",
        "no_torn_reads",
        set=SERVING,
        needs={"refresh": ("staged",)},
    ),
    Fault(
        "early-gate",
        "the gate opens before the last bucket is applied",
        "no_torn_reads",
        set=SERVING,
        needs={"refresh": ("staged",)},
    ),
    Fault(
        "reads-ahead",
        "a forward reads one tensor before it passes the gate and the others after",
        "no_torn_reads",
        set=SERVING,
    ),
    Fault("resumed-trainer", "the trainer resumed with other weights and still publishes the base", "base_equal"),
    Fault(
        "receiver-dies",
        "a receiver is killed in the middle of a sync",
        "receivers_answer",
        exit=3,
        set={"deadline_s": 5},
    ),
    Fault(
        "receiver-stalls",
        "a receiver stops answering in the middle of a sync",
        "receivers_answer",
        exit=3,
        set={"deadline_s": 3},
    ),
    Fault(
        "activates-alone",
        "a rank runs the new version before all ranks of its replica are ready and keeps it if one of them fails",
        "failure_is_clean",
        set=TWO_RANKS,
    ),
    Fault("keeps-new-weights", "a failed receiver keeps the new weights and serves with them", "failure_is_clean"),
)
