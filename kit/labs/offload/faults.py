"""Known bugs of releasing and reloading. Each is switched on in `ranks/broken.py` or in the phases, and caught by the check it names."""

from kit.labs.definition import Fault
from kit.labs.offload.config import EXACT

# Enough bytes that a second copy of them, or a leak, stands out beside the interpreter's own memory.
HEAVY = {"size": "125m", "layers": 1, "seq": 16, "cycles": 2, "steps": 1}
# With mode=manual and official groups stay, handles go stale and memory grows anyway, and nobody trains on after that.
DESTROYED = {"mode": EXACT, "groups": (True,)}
WHOLE = {"mode": (*EXACT, "suspend")}
GROUPS = {**WHOLE, "groups": (True,)}

FAULTS = (
    Fault("leak-gloo", "a gloo group of every cycle is not destroyed", "groups_return_to_baseline", needs=DESTROYED),
    Fault(
        "leak-device", "a device group of every cycle is not destroyed", "groups_return_to_baseline", needs=DESTROYED
    ),
    Fault(
        "lossy-snapshot",
        "the snapshot keeps tp, pp, cp, ep and vpp alone, so expert tensor parallelism is lost",
        "membership_unchanged",
        set={"ranks": 4, "tp": 2, "ep": 2, "etp": 1, "cycles": 1},
        needs={"groups": (True,)},
    ),
    Fault(
        "stale-globals",
        "groups are forgotten and the other globals stay, so Megatron refuses to initialise again",
        "model_parallel_uninitialised",
        exit=3,
        needs={"groups": (True,)},
    ),
    Fault(
        "swallowed-failure",
        "a group that cannot be destroyed is passed over in silence",
        "destroy_failure_raises",
        needs=DESTROYED,
    ),
    Fault("stale-handles", "a layer keeps a group of before the release", "handles_alive", needs=GROUPS),
    Fault(
        "dropped-timeout",
        "groups are made again without their timeout, and get torch's default",
        "options_unchanged",
        needs=DESTROYED,
    ),
    Fault(
        "double-patch",
        "new_group is patched twice, and the group of the inner patch is never destroyed",
        "groups_return_to_baseline",
        needs=DESTROYED,
    ),
    Fault(
        "missing-rank-in-destroy",
        "the last rank does not take part when groups are destroyed",
        "groups_return_to_baseline",
        exit=3,
        set={"meet_timeout_s": 3.0},
        needs=GROUPS,
    ),
    Fault("bit-flip", "one bit of one weight comes back wrong", "tensors_restored"),
    Fault("lost-optimizer-state", "Adam's first moments come back as zeros", "training_continues_bitwise", needs=WHOLE),
    Fault(
        "grads-not-zeroed",
        "the first step after a reload adds to the gradients of before",
        "training_continues_bitwise",
        needs=WHOLE,
    ),
    Fault(
        "alias-broken",
        "a parameter's main_grad comes back as a copy that is no view of its bucket",
        "training_continues_bitwise",
        set={"tp": 1},
        needs=WHOLE,
    ),
    Fault("slow-leak", "16 MiB stay behind in every cycle", "memory_slope", set={"cycles": 5, "steps": 1}, needs=WHOLE),
    Fault("double-copy", "a second copy of everything is made on the way back", "reload_peak", set=HEAVY),
    Fault("kept-handle", "one forgotten holder keeps a destroyed group alive", "old_groups_dead", needs=DESTROYED),
    Fault("reseeded", "random numbers begin anew with every reload", "random_unchanged"),
    Fault(
        "kept-world",
        "WORLD is left as it is where it was to be destroyed too",
        "world_released",
        set={"include_world": True},
        needs={"mode": EXACT},
    ),
    Fault("leaked-file", "every cycle leaves a file in /dev/shm that nobody has open", "nothing_piles_up"),
    Fault("slow-at-last", "the last two reloads take 1.5 s longer than those before", "time_steady"),
    Fault("patch-left", "a function of torch.distributed stays replaced at the end", "names_restored"),
    Fault("leaves-default-group", "a default group that was made inside is left behind", "state_as_found"),
    Fault("masks-original-error", "cleaning up raises its own error in place of the first one", "state_as_found"),
)
