"""The known bugs of the lab `offload` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault

KIT_RELEASER = "kit.labs.offload.ranks.releaser:KitReleaser"
EXACT = ("exact", "abort")  # modes after which every holder's group lives again

# Enough bytes that a second copy of them, or a leak, stands out beside the interpreter's own memory.
HEAVY = {"size": "125m", "layers": 1, "seq": 16, "cycles": 2, "steps": 1}

KITS = {"implementation": (KIT_RELEASER,)}
WHOLE = {**KITS, "mode": (*EXACT, "suspend")}
GROUPS = {**WHOLE, "groups": (True,)}
# With mode=manual and official groups stay, handles go stale, memory grows anyway, and training stops.
DESTROYED = {**KITS, "mode": EXACT, "groups": (True,)}

BUGS = "kit.labs.offload.ranks.bugs"
DESTROY, RELOAD, RELEASE, RESTORE = (
    f"{KIT_RELEASER}.{method}" for method in ("destroy", "reload", "release_tensors", "restore_tensors")
)
AS_FOUND = "kit.megatron.ownership:as_found"

FAULTS = (
    Fault(
        "leak-gloo",
        "a gloo group of every cycle is not destroyed",
        "groups_return_to_baseline",
        needs=DESTROYED,
        patch={DESTROY: f"{BUGS}:leaks_a_gloo_group"},
    ),
    Fault(
        "leak-device",
        "a device group of every cycle is not destroyed",
        "groups_return_to_baseline",
        needs=DESTROYED,
        patch={DESTROY: f"{BUGS}:leaks_a_device_group"},
    ),
    Fault(
        "lossy-snapshot",
        "the snapshot keeps only tp, pp, cp, ep and vpp, so expert tensor parallelism is lost",
        "membership_unchanged",
        set={"ranks": 4, "tp": 2, "ep": 2, "etp": 1, "cycles": 1},
        needs={**KITS, "groups": (True,)},
        patch={RELOAD: f"{BUGS}:reloads_from_five_sizes"},
    ),
    Fault(
        "stale-globals",
        "only the groups are reset, not Megatron's other globals, so Megatron refuses to initialise again",
        "model_parallel_uninitialised",
        exit=3,
        needs={**KITS, "groups": (True,)},
        patch={DESTROY: f"{BUGS}:forgets_only_the_groups", RELOAD: f"{BUGS}:reloads_from_five_sizes"},
    ),
    Fault(
        "swallowed-failure",
        "a group that cannot be destroyed is skipped without an error",
        "destroy_failure_raises",
        needs=DESTROYED,
        patch={DESTROY: f"{BUGS}:swallows_a_failure"},
    ),
    Fault(
        "failure-leaks",
        "a release that fails leaves a descriptor open",
        "rehearsals_leave_nothing",
        needs=DESTROYED,
        patch={DESTROY: f"{BUGS}:leaks_a_descriptor_on_failure"},
    ),
    Fault(
        "never-meets-again",
        "ranks that gave up waiting for a late rank count one meeting more than it does, and never meet it again",
        "rehearsals_leave_nothing",
        set={"meet_timeout_s": 5.0},
        needs=DESTROYED,
        patch={"kit.megatron.groups:meet": f"{BUGS}:forgets_to_withdraw"},
    ),
    Fault(
        "name-taken",
        "after a reload of WORLD torch counts groups from 1, so a new group would get a name that another group has",
        "every_group_communicates",
        set={"include_world": True},
        needs={**KITS, "mode": EXACT, "groups": (True,)},
        patch={RELOAD: f"{BUGS}:counts_groups_from_one"},
    ),
    Fault(
        "restore-fails-alone",
        "when the reload of one rank fails, the other ranks keep their tensors and know nothing of it",
        "restore_failure_is_clean",
        needs=WHOLE,
        patch={RESTORE: f"{BUGS}:restores_alone"},
    ),
    Fault(
        "restore-keeps-part",
        "a reload that fails keeps the memory that it had already got",
        "restore_failure_is_clean",
        bugs=("vllm-project/vllm#34602",),
        needs=WHOLE,
        patch={"kit.megatron.tensors:Mover.restore": f"{BUGS}:keeps_what_came_back"},
    ),
    Fault(
        "second-copy",
        "a second copy of all tensors is kept from each reload to the next",
        "no_copy_kept",
        set={"cycles": 2},
        needs=KITS,
        patch={RESTORE: f"{BUGS}:keeps_a_second_copy"},
    ),
    Fault(
        "second-copy-at-once",
        "a second copy of all tensors is made before the first release and never dropped",
        "no_copy_kept",
        set={"cycles": 2},
        needs=KITS,
        patch={RELEASE: f"{BUGS}:copies_before_the_first_release"},
    ),
    Fault(
        "stale-handles",
        "a layer keeps a group from before the release",
        "handles_alive",
        bugs=("NVIDIA/Megatron-LM#7029",),
        needs=GROUPS,
        patch={RELOAD: f"{BUGS}:leaves_a_dead_group_in_a_layer"},
    ),
    Fault(
        "dropped-timeout",
        "groups are rebuilt without their timeout and get torch's default",
        "options_unchanged",
        needs=DESTROYED,
        patch={"torch.distributed.distributed_c10d:_new_process_group_helper": f"{BUGS}:makes_groups_without_timeout"},
        during=("reload",),
    ),
    Fault(
        "double-patch",
        "new_group is patched twice, and the group of the inner patch is never destroyed",
        "groups_return_to_baseline",
        needs={"mode": EXACT, "groups": (True,)},
        patch={"kit.labs.offload.ranks.phases:Offload.make_job": f"{BUGS}:makes_the_job_under_a_second_patch"},
        during=("build",),
    ),
    Fault(
        "missing-rank-in-destroy",
        "the last rank does not take part in the destroy",
        "groups_return_to_baseline",
        exit=3,
        set={"meet_timeout_s": 3.0},
        needs=GROUPS,
        patch={DESTROY: f"{BUGS}:stays_away_on_the_last_rank"},
    ),
    Fault(
        "bit-flip",
        "one bit of one weight is flipped by the reload",
        "tensors_restored",
        needs=KITS,
        patch={RESTORE: f"{BUGS}:flips_a_bit"},
    ),
    Fault(
        "lands-late",
        "the reload returns 0.3 s before the bytes of its largest weight are there",
        "tensors_restored",
        needs={**KITS, "weights": (True,)},
        patch={RESTORE: f"{BUGS}:returns_before_the_last_bytes"},
    ),
    Fault(
        "rate-halved",
        "the optimizer has half its learning rate after the reload",
        "tensors_restored",
        needs=WHOLE,
        patch={RESTORE: f"{BUGS}:halves_the_learning_rate"},
    ),
    Fault(
        "schedule-rewound",
        "the schedule of the learning rate is back at its beginning after the reload",
        "tensors_restored",
        needs=WHOLE,
        patch={RESTORE: f"{BUGS}:rewinds_the_schedule"},
    ),
    Fault(
        "lost-optimizer-state",
        "Adam's first moments are zeros after the reload",
        "training_continues_bitwise",
        bugs=("NVIDIA/Megatron-LM#6920",),
        needs=WHOLE,
        patch={RESTORE: f"{BUGS}:loses_the_first_moments"},
    ),
    Fault(
        "grads-not-zeroed",
        "the first step after a reload adds to old gradients",
        "training_continues_bitwise",
        needs=WHOLE,
        patch={RESTORE: f"{BUGS}:skips_the_next_zeroing_of_gradients"},
    ),
    Fault(
        "alias-broken",
        "a parameter's main_grad is a copy after the reload, not a view of its bucket",
        "training_continues_bitwise",
        bugs=("NVIDIA/Megatron-LM#7448",),
        set={"tp": 1},
        needs=WHOLE,
        patch={RESTORE: f"{BUGS}:copies_a_main_grad"},
    ),
    Fault(
        "slow-leak",
        "every cycle leaks 16 MiB",
        "memory_slope",
        set={"cycles": 5, "steps": 1},
        needs=WHOLE,
        patch={RESTORE: f"{BUGS}:leaks_memory"},
    ),
    Fault(
        "double-copy",
        "the reload makes a second copy of everything",
        "reload_peak",
        set=HEAVY,
        needs=KITS,
        patch={RESTORE: f"{BUGS}:copies_everything_twice"},
    ),
    Fault(
        "kept-handle",
        "a forgotten reference keeps a destroyed group alive",
        "old_groups_dead",
        needs=DESTROYED,
        patch={DESTROY: f"{BUGS}:keeps_a_group_alive"},
    ),
    Fault(
        "reseeded",
        "every reload seeds the random numbers again",
        "random_unchanged",
        needs=KITS,
        patch={RESTORE: f"{BUGS}:seeds_again"},
    ),
    Fault(
        "kept-world",
        "WORLD is not destroyed although include_world=true",
        "world_released",
        set={"include_world": True},
        needs={**KITS, "mode": EXACT},
        patch={DESTROY: f"{BUGS}:keeps_world"},
    ),
    Fault(
        "leaked-file",
        "every cycle leaves a file in /dev/shm that no process has open",
        "nothing_piles_up",
        needs=KITS,
        patch={RESTORE: f"{BUGS}:leaves_a_file"},
    ),
    Fault(
        "slow-at-last",
        "the last two reloads take 1.5 s longer than the earlier ones",
        "time_steady",
        needs=KITS,
        patch={"kit.labs.offload.ranks.phases:Offload.reload": f"{BUGS}:reloads_slowly_in_the_last_two_cycles"},
    ),
    Fault(
        "slower-each-cycle",
        "from the third cycle on each reload takes 0.5 s longer than the one before",
        "times_do_not_rise",
        set={"cycles": 6},
        needs=KITS,
        patch={"kit.labs.offload.ranks.phases:Offload.reload": f"{BUGS}:reloads_more_slowly_in_each_cycle"},
    ),
    Fault(
        "patch-left",
        "a function of torch.distributed stays patched at the end",
        "names_restored",
        needs=KITS,
        patch={f"{KIT_RELEASER}.__init__": f"{BUGS}:leaves_a_patch"},
    ),
    Fault(
        "leaves-default-group",
        "a default group that the job created is left behind",
        "state_as_found",
        patch={AS_FOUND: f"{BUGS}:leaves_a_default_group"},
        during=("ownership",),
    ),
    Fault(
        "tracker-moved",
        "random states of Megatron's tracker stay where the borrowed code left them",
        "state_as_found",
        needs=KITS,
        patch={AS_FOUND: f"{BUGS}:leaves_the_tracker_as_drawn"},
        during=("rehearse_failure",),
    ),
    Fault(
        "handle-keeps-group",
        "after an error a group lives on as long as its handle is kept",
        "state_as_found",
        needs=KITS,
        patch={AS_FOUND: f"{BUGS}:leaves_groups_in_their_handles"},
        during=("rehearse_failure",),
    ),
    Fault(
        "masks-original-error",
        "an error in the cleanup replaces the original error",
        "state_as_found",
        patch={AS_FOUND: f"{BUGS}:fails_in_its_cleanup"},
        during=("ownership",),
    ),
)
