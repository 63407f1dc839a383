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
    Fault(
        name="leak-gloo",
        breaks="a gloo group of every cycle is not destroyed",
        check="groups_return_to_baseline",
        needs=DESTROYED,
    ),
    Fault(
        name="leak-device",
        breaks="a device group of every cycle is not destroyed",
        check="groups_return_to_baseline",
        needs=DESTROYED,
    ),
    Fault(
        name="lossy-snapshot",
        breaks="the snapshot keeps only tp, pp, cp, ep and vpp, so expert tensor parallelism is lost",
        check="membership_unchanged",
        set={"ranks": 4, "tp": 2, "ep": 2, "etp": 1, "cycles": 1},
        needs={"groups": (True,)},
    ),
    Fault(
        name="stale-globals",
        breaks="only the groups are reset, not Megatron's other globals, so Megatron refuses to initialise again",
        check="model_parallel_uninitialised",
        exit=3,
        needs={"groups": (True,)},
    ),
    Fault(
        name="swallowed-failure",
        breaks="a group that cannot be destroyed is skipped without an error",
        check="destroy_failure_raises",
        needs=DESTROYED,
    ),
    Fault(
        name="stale-handles",
        breaks="a layer keeps a group from before the release",
        check="handles_alive",
        needs=GROUPS,
    ),
    Fault(
        name="dropped-timeout",
        breaks="groups are rebuilt without their timeout and get torch's default",
        check="options_unchanged",
        needs=DESTROYED,
    ),
    Fault(
        name="double-patch",
        breaks="new_group is patched twice, and the group of the inner patch is never destroyed",
        check="groups_return_to_baseline",
        needs=DESTROYED,
    ),
    Fault(
        name="missing-rank-in-destroy",
        breaks="the last rank does not take part in the destroy",
        check="groups_return_to_baseline",
        exit=3,
        set={"meet_timeout_s": 3.0},
        needs=GROUPS,
    ),
    Fault(name="bit-flip", breaks="one bit of one weight is flipped by the reload", check="tensors_restored"),
    Fault(
        name="lost-optimizer-state",
        breaks="Adam's first moments are zeros after the reload",
        check="training_continues_bitwise",
        needs=WHOLE,
    ),
    Fault(
        name="grads-not-zeroed",
        breaks="the first step after a reload adds to old gradients",
        check="training_continues_bitwise",
        needs=WHOLE,
    ),
    Fault(
        name="alias-broken",
        breaks="a parameter's main_grad is a copy after the reload, not a view of its bucket",
        check="training_continues_bitwise",
        set={"tp": 1},
        needs=WHOLE,
    ),
    Fault(
        name="slow-leak",
        breaks="every cycle leaks 16 MiB",
        check="memory_slope",
        set={"cycles": 5, "steps": 1},
        needs=WHOLE,
    ),
    Fault(name="double-copy", breaks="the reload makes a second copy of everything", check="reload_peak", set=HEAVY),
    Fault(
        name="kept-handle",
        breaks="a forgotten reference keeps a destroyed group alive",
        check="old_groups_dead",
        needs=DESTROYED,
    ),
    Fault(name="reseeded", breaks="every reload seeds the random numbers again", check="random_unchanged"),
    Fault(
        name="kept-world",
        breaks="WORLD is not destroyed although include_world=true",
        check="world_released",
        set={"include_world": True},
        needs={"mode": EXACT},
    ),
    Fault(
        name="leaked-file",
        breaks="every cycle leaves a file in /dev/shm that no process has open",
        check="nothing_piles_up",
    ),
    Fault(
        name="slow-at-last",
        breaks="the last two reloads take 1.5 s longer than the earlier ones",
        check="time_steady",
    ),
    Fault(name="patch-left", breaks="a function of torch.distributed stays patched at the end", check="names_restored"),
    Fault(
        name="leaves-default-group",
        breaks="a default group that the job created is left behind",
        check="state_as_found",
    ),
    Fault(
        name="masks-original-error",
        breaks="an error in the cleanup replaces the original error",
        check="state_as_found",
    ),
)
