"""Every implementation in docs/examples that the tests run: the lab, its settings, and the expected verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FIELD = {"smoke": "implementation", "offload": "implementation", "split": "implementation", "sync": "transport"}
SMALL: dict[str, dict[str, Any]] = {
    "smoke": {},
    "offload": {"cycles": 2, "steps": 1, "layers": 2},
    "split": {"steps": 2, "layers": 2, "microbatches": 4, "chunks": [1, 2, 0]},
    "sync": {"ranks": 3, "replicas": 2, "tp": 1, "layers": 2, "cycles": 2, "sweep": False, "deadline_s": 10},
}
TENSORS = {"groups": False}
GRADIENTS = {"groups": False, "weights": False, "optimizer": False}
JOB = {"layers": None}
GROWTH = {"groups": False, "cycles": 6, "layers": 12}
FSDP = {"backend": "fsdp2"}
UNVERIFIED = {"verify": "none"}
PILES = {"cycles": 4}
TWO_RANKS = {"ranks": 5, "infer_tp": 2, "verify_share": 0.5}


@dataclass(frozen=True)
class Case:
    """One run. `fails` names the check that must fail; it is empty for a right implementation."""

    lab: str
    code: str
    fails: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    field: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run, including the code under test."""
        return {**self.shared, self.field or FIELD[self.lab]: f"docs.examples.{self.code}"}

    @property
    def shared(self) -> dict[str, Any]:
        """The same settings with the kit's own code."""
        return {"device": "cpu", **SMALL[self.lab], **self.given}


CASES = (
    # the smoke lab, factories of groups
    Case("smoke", "group_factory:Factory"),
    Case("smoke", "group_factory:FactoryThatForgetsAGroup", "groups_return_to_baseline"),
    Case("smoke", "group_factory:FactoryThatKeepsHandles", "threads_return"),
    Case("smoke", "group_factory:FactoryOfRawGroups", "fds_return"),
    Case("smoke", "group_factory:FactoryOfOneGroup", "groups_are_distinct"),
    # the offload lab, groups
    Case("offload", "reloadable:Reloadable"),
    Case("offload", "reloadable:ReloadableThatFallsBackToWorld", "stale_handle_raises"),
    Case("offload", "reloadable:ReloadableThatForgetsTimeouts", "options_unchanged"),
    Case("offload", "reloadable:ReloadableThatLeaksAGroup", "groups_return_to_baseline"),
    Case("offload", "reloadable:ReloadableThatLeavesItsPatch", "names_restored"),
    Case("offload", "repointed:Repointed"),
    Case("offload", "repointed:RepointedThatForgetsToDestroy", "old_groups_dead"),
    Case("offload", "repointed:RepointedThatMissesTheOptimizer", "handles_alive"),
    Case("offload", "repointed:RepointedWithDefaultTimeouts", "options_unchanged"),
    # the offload lab, tensors
    Case("offload", "host_copies:HostCopies", given=TENSORS),
    Case("offload", "host_copies:HostCopiesInHalfPrecision", "tensors_restored", TENSORS),
    Case("offload", "host_copies:HostCopiesThatRestartTheStepCount", "training_continues_bitwise", TENSORS),
    Case("offload", "host_copies:HostCopiesThatDropGradients", "tensors_restored", TENSORS),
    Case("offload", "host_copies:HostCopiesThatLeaveGradients", "tensors_released", TENSORS),
    Case("offload", "host_copies:HostCopiesThatReseed", "training_continues_bitwise", TENSORS),
    Case("offload", "host_copies:HostCopiesThatPileUp", "memory_slope", GROWTH),
    Case("offload", "host_copies:HostCopiesThatLeaveAProcess", "nothing_piles_up", {**TENSORS, "cycles": 4}),
    Case("offload", "host_copies:HostCopiesThatStayOpen", "fds_return", GROWTH),
    Case("offload", "verl_moves:Moves", given={**TENSORS, "dropped_grads": True}),
    Case("offload", "verl_moves:MovesByAlias", "tensors_restored", TENSORS),
    Case("offload", "verl_moves:MovesThatLeaveGarbage", "tensors_restored", TENSORS),
    Case("offload", "megatron_calls:GradBuffers", given={**GRADIENTS, "dropped_grads": True}),
    Case("offload", "megatron_calls:GradBuffersThatAreReplaced", "training_continues_bitwise", GRADIENTS),
    # the offload lab, a job
    Case("offload", "plain_job:Job", given=JOB, field="model"),
    Case("offload", "plain_job:JobWithUnseededRows", "training_continues_bitwise", JOB, "model"),
    Case("offload", "plain_job:JobWithAHiddenAverage", "tensors_released", JOB, "model"),
    # the split lab, trainers
    Case("split", "step_trainer:Adapter"),
    Case("split", "step_trainer:AdapterOfPerMicrobatchNormalizers", "grad_parity"),
    Case("split", "step_trainer:AdapterThatReducesTwice", "one_reduction"),
    Case("split", "step_trainer:AdapterThatLosesHooks", "hooks_restored"),
    Case("split", "step_trainer:AdapterWithAnUnshiftedMask", "replicas_counted_once"),
    Case("split", "step_trainer:AdapterThatAlwaysUpdates", "nonfinite_skipped"),
    Case("split", "step_trainer:AdapterThatDropsARemainder", "misuse_raises"),
    Case("split", "step_trainer:AdapterThatForgetsRandomState", "abort_is_clean"),
    Case("split", "step_trainer:AdapterThatReportsOneRank", "metric_parity"),
    Case("split", "step_trainer:AdapterThatLeaksAGroup", "groups_return_to_baseline"),
    Case("split", "fsdp_loop:Loop", given=FSDP),
    Case("split", "fsdp_loop:LoopThatClipsFirst", given=FSDP),
    Case("split", "fsdp_loop:LoopThatReducesEveryMicrobatch", "one_reduction", FSDP),
    Case("split", "fsdp_loop:LoopThatDividesByItsOwnCount", "replicas_counted_once", FSDP),
    Case("split", "fsdp_loop:LoopThatLeavesReductionOff", "hooks_restored", FSDP),
    # the sync lab, transports
    Case("sync", "file_transport:Files"),
    Case("sync", "file_transport:FilesThatStay", "nothing_piles_up", PILES),
    Case("sync", "file_transport:FilesThatStayAfterAFailure", "failure_is_clean"),
    Case("sync", "file_transport:FilesThatStayOpen", "nothing_piles_up", PILES),
    Case("sync", "file_transport:FilesAnnouncedTooEarly", "bit_exact", UNVERIFIED),
    Case("sync", "resumed_transport:Resumed"),
    Case("sync", "resumed_transport:ResumedByNotes", "bit_exact", UNVERIFIED),
    Case("sync", "shared_transport:Shared"),
    Case("sync", "shared_transport:SharedThatIsNeverUnlinked", "nothing_piles_up", PILES),
    Case("sync", "shared_transport:SharedThatIsNeverDetached", "segments_return_to_baseline"),
    Case("sync", "shared_transport:SharedWithOneSegment", "bit_exact", UNVERIFIED),
    Case("sync", "socket_transport:Sockets"),
    Case("sync", "socket_transport:SocketsReadOnce", "bit_exact", {**UNVERIFIED, "bucket_mib": 0.2}),
    Case("sync", "socket_transport:SocketsThatDropTheLastBucket", "bit_exact", UNVERIFIED),
    Case("sync", "socket_transport:SocketsInHalfPrecision", "bit_exact", UNVERIFIED),
    Case("sync", "socket_transport:SocketsThatStayOpen", "nothing_piles_up", PILES),
    # the sync lab, receiving sides
    Case("sync", "own_receiver:ByName", field="receiver", given=TWO_RANKS),
    Case("sync", "own_receiver:ByNameWithQueriesFirst", "bit_exact", field="receiver"),
    Case("sync", "own_receiver:ByNameWithAPackedHead", field="receiver"),
    Case("sync", "own_receiver:ByNameWithAStaleHead", "logits_equal", field="receiver"),
    # the sync lab, synchronisers
    Case("sync", "broadcast_sync:Broadcasts", field="implementation"),
    Case("sync", "broadcast_sync:BroadcastsWithAStaleTensor", "bit_exact", field="implementation"),
    Case("sync", "checkpoint_sync:Folders", field="implementation"),
    Case("sync", "checkpoint_sync:FoldersThatArePublishedFirst", "version_order", field="implementation"),
    Case("sync", "exported_sync:Exported", field="implementation"),
    Case("sync", "bucket_sync:HostBuckets", field="implementation"),
    # the sync lab, engines
    Case("sync", "own_engine:Plain", field="serve"),
    Case("sync", "own_engine:PlainThatRemembers", "logits_equal", field="serve"),
    Case("sync", "own_engine:PlainThatForgetsInTime", field="serve"),
)
