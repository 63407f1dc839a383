"""The known bugs of the lab `offload` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault

EXACT = ("exact", "abort")  # modes after which every holder's group lives again

# Enough bytes that a second copy of them, or a leak, stands out beside the interpreter's own memory.
HEAVY = {"size": "125m", "layers": 1, "seq": 16, "cycles": 2, "steps": 1}
# With mode=manual and official groups stay, handles go stale, memory grows anyway, and training stops.
DESTROYED = {"mode": EXACT, "groups": (True,)}
WHOLE = {"mode": (*EXACT, "suspend")}
GROUPS = {**WHOLE, "groups": (True,)}

# Known bugs of releasing and reloading. `ranks/releaser.py` or the phases implement each; the check that it names detects it.
FAULTS = (
    Fault("leak-gloo", "a gloo group of every cycle is not destroyed", "groups_return_to_baseline", needs=DESTROYED),
    Fault(
        "leak-device", "a device group of every cycle is not destroyed", "groups_return_to_baseline", needs=DESTROYED
    ),
    Fault(
        "lossy-snapshot",
        "the snapshot keeps only tp, pp, cp, ep and vpp, so expert tensor parallelism is lost",
        "membership_unchanged",
        set={"ranks": 4, "tp": 2, "ep": 2, "etp": 1, "cycles": 1},
        needs={"groups": (True,)},
    ),
    Fault(
        "stale-globals",
        "only the groups are reset, not Megatron's other globals, so Megatron refuses to initialise again",
        "model_parallel_uninitialised",
        exit=3,
        needs={"groups": (True,)},
    ),
    Fault(
        "swallowed-failure",
        "a group that cannot be destroyed is skipped without an error",
        "destroy_failure_raises",
        needs=DESTROYED,
    ),
    Fault("stale-handles", "a layer keeps a group from before the release", "handles_alive", needs=GROUPS),
    Fault(
        "dropped-timeout",
        "groups are rebuilt without their timeout and get torch's default",
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
        "the last rank does not take part in the destroy",
        "groups_return_to_baseline",
        exit=3,
        set={"meet_timeout_s": 3.0},
        needs=GROUPS,
    ),
    Fault("bit-flip", "one bit of one weight is flipped by the reload", "tensors_restored"),
    Fault(
        "lost-optimizer-state",
        "Adam's first moments are zeros after the reload",
        "training_continues_bitwise",
        needs=WHOLE,
    ),
    Fault(
        "grads-not-zeroed",
        "the first step after a reload adds to old gradients",
        "training_continues_bitwise",
        needs=WHOLE,
    ),
    Fault(
        "alias-broken",
        "a parameter's main_grad is a copy after the reload, not a view of its bucket",
        "training_continues_bitwise",
        set={"tp": 1},
        needs=WHOLE,
    ),
    Fault("slow-leak", "every cycle leaks 16 MiB", "memory_slope", set={"cycles": 5, "steps": 1}, needs=WHOLE),
    Fault("double-copy", "the reload makes a second copy of everything", "reload_peak", set=HEAVY),
    Fault("kept-handle", "a forgotten reference keeps a destroyed group alive", "old_groups_dead", needs=DESTROYED),
    Fault("reseeded", "every reload seeds the random numbers again", "random_unchanged"),
    Fault(
        "kept-world",
        "WORLD is not destroyed although include_world=true",
        "world_released",
        set={"include_world": True},
        needs={"mode": EXACT},
    ),
    Fault("leaked-file", "every cycle leaves a file in /dev/shm that no process has open", "nothing_piles_up"),
    Fault("slow-at-last", "the last two reloads take 1.5 s longer than the earlier ones", "time_steady"),
    Fault("patch-left", "a function of torch.distributed stays patched at the end", "names_restored"),
    Fault("leaves-default-group", "a default group that the job created is left behind", "state_as_found"),
    Fault("masks-original-error", "an error in the cleanup replaces the original error", "state_as_found"),
)
