"""The catalogue: the setups in which mutants run, the mutants written by hand, and the drawn ones.

To add one: a `Mutant(setup, module, function, old=..., new=..., check=..., bug=...)` in `offload.py`, `split.py` or `sync.py`. `old` must
occur exactly once in the function's body. `check` is the check that should fail, `bug` is what a reviewer would call the mistake. A mutant
with `origin="docs"` breaks a promise of the docs; its author knew the code, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.mutants import offload, split, sync
from tests.mutants.draw import Target, drawn
from tests.mutants.mutant import Mutant


@dataclass(frozen=True, slots=True)
class Setup:
    """A lab with the smallest config that runs a part of the code under test and every check about it."""

    name: str
    ranks: int
    config: Mapping[str, Any]
    alone: bool = False  # slow: only for mutants that name it, not for survivors of the lab's other setups

    @property
    def lab(self) -> str:
        return self.name.partition(":")[0]

    @property
    def key(self) -> str:
        return f"{self.name} {json.dumps(self.config, sort_keys=True)}"

    def changed(self, settings: Mapping[str, Any]) -> Setup:
        ranks = settings.get("ranks", self.ranks)
        return replace(self, ranks=ranks, config={**self.config, **settings}) if settings else self


OFFLOAD = {"cycles": 2, "steps": 1, "timeout_s": 30, "meet_timeout_s": 5}
SPLIT = {"chunks": [1, 2], "microbatches": 4, "steps": 2, "dtype": "float32", "timeout_s": 45}
TOKENS = {**SPLIT, "level": "tokens"}
SYNC = {"cycles": 2, "sweep": False, "tp": 1, "replicas": 2, "timeout_s": 60, "deadline_s": 10}
APART = {**SYNC, "placement": "apart"}
PARALLEL = {"tp": 1, "distributed_optimizer": True, "overlap_grad_reduce": True}

SETUPS = {
    setup.name: setup
    for setup in (
        Setup("offload", 2, OFFLOAD),
        Setup("offload:data", 2, {**OFFLOAD, **PARALLEL, "include_world": True}),
        Setup("offload:stages", 2, {**OFFLOAD, "tp": 1, "pp": 2, "mode": "abort"}),
        Setup("offload:experts", 2, {**OFFLOAD, "tp": 1, "ep": 2, "experts": 4}),
        Setup("offload:cycles", 2, {**OFFLOAD, "cycles": 8}, alone=True),
        Setup("offload:heavy", 2, {**OFFLOAD, "size": "125m", "layers": 1, "seq": 16}, alone=True),
        Setup("split", 2, SPLIT),
        Setup("split:tensor", 2, {**TOKENS, "tp": 2}),
        Setup("split:stages", 2, {**TOKENS, "pp": 2}),
        Setup("split:overlap", 2, {**TOKENS, **PARALLEL}),
        Setup("split:experts", 2, {**SPLIT, "level": "sequences", "ep": 2, "experts": 4, "reduce": "mean"}),
        Setup("split:empty", 2, {**SPLIT, "masks": "empty-rank"}),
        *(
            Setup(f"split:{recipe}", 2, {**SPLIT, "recipe": recipe})
            for recipe in ("dapo", "cispo", "tis", "icepop", "seq-mask-tis", "on-policy", "nll")
        ),
        Setup("split:gspo", 2, {**SPLIT, "recipe": "gspo", "level": "sequences"}),
        Setup("sync", 3, SYNC),
        Setup("sync:buckets", 3, {**SYNC, "bucket_mib": 0.05}),
        Setup("sync:paused", 3, {**APART, "refresh": "paused"}),
        Setup("sync:rendezvous", 3, {**SYNC, "transport": "rendezvous"}),
        Setup("sync:serialize", 3, {**SYNC, "transport": "serialize"}),
        Setup("sync:broadcast", 4, {**APART, "tp": 2, "transport": "broadcast"}),
        Setup("sync:per-tensor", 4, {**APART, "tp": 2, "transport": "per-tensor"}),
        Setup("sync:stages", 4, {**APART, "pp": 2}),
        Setup("sync:shards", 6, {**SYNC, "tp": 2, "infer_tp": 2}),
    )
}


def others(name: str) -> list[str]:
    """The names of the lab's other setups, without those that run alone."""
    lab = SETUPS[name].lab
    return [each for each, setup in SETUPS.items() if setup.lab == lab and each != name and not setup.alone]


LOOK = "the lab looks through it, or it counts what no check asks for"
TEXT = "what people read"
REFUSES = "only refuses bad input"
GPU = "only a GPU gets here"
SPEED = "changes how long it takes, and no result"
UNUSED = "no setup here runs it"
SAME = "its place by hash changes nothing: the value is set again, or the collector does the same"


def leave_out(**names: str) -> dict[str, str]:
    """Map each function to its reason; the input maps each reason's name to its functions."""
    return {name: globals()[why] for why, those in names.items() for name in those.split()}


TARGETS = (
    Target(
        "offload",
        "kit.labs.offload.ranks.releaser",
        "tensors_restored",
        left_out=leave_out(
            LOOK="reported",
            UNUSED="PairReleaser.__init__ PairReleaser.destroy PairReleaser.reload",
        ),
    ),
    Target(
        "offload",
        "kit.megatron.groups",
        "old_groups_dead",
        others={
            "destroy": ("offload", "handles_alive"),
            **dict.fromkeys(("_make_world", "_place"), ("offload:data", "handles_alive")),
        },
        left_out=leave_out(
            LOOK="registered_left talk",
            TEXT="DestroyFailed.__init__",
            UNUSED="reload _manual",
            GPU="finalize refuse_keeping unbuilt brief suspend resume communicators on_gpu picked",
        ),
    ),
    Target(
        "offload",
        "kit.megatron.handles",
        "handles_alive",
        others=dict.fromkeys(
            (
                "megatron_globals",
                "groups_in",
                "megatron_groups",
                "maker",
                "snapshot",
                "describe_group",
                "_backend",
                "_encode",
                "decode",
            ),
            ("offload", "membership_unchanged"),
        ),
        left_out=leave_out(TEXT="title Handle.__repr__", GPU="make_options _settings", UNUSED="current_groups"),
    ),
    Target(
        "offload",
        "kit.megatron.tensors",
        "tensors_restored",
        others=dict.fromkeys(
            ("named_tensors", "ddp_buffers", "_grads", "inner_optimizers", "inventory"), ("offload", "tensors_released")
        ),
        left_out=leave_out(
            LOOK="process_memory Mover._stats hashes _by_kind",
            GPU="_bytes Arena._pin Arena.view copy_on_streams pieces offload_natively reload_natively",
        ),
    ),
    Target(
        "offload",
        "kit.measure.host",
        "tensors_restored",
        left_out=leave_out(SPEED="workers trim huge_pages populate _advise _runs", UNUSED="transfer"),
    ),
    Target("offload", "kit.megatron.ownership", "state_as_found", left_out=leave_out(LOOK="describe_state")),
    Target(
        "split",
        "kit.megatron.split",
        "grad_parity",
        others={
            "from_last_stage": ("split:stages", "ranks_agree"),
            **dict.fromkeys(
                ("MegatronSplit._aux_guess", "MegatronSplit._need_even", "MegatronSplit._correct_aux", "nothing"),
                ("split:experts", "grad_parity"),
            ),
            **dict.fromkeys(("balances", "aux_scale", "clear_aux", "aux_metric"), ("split:experts", "grad_parity")),
        },
        left_out=leave_out(
            LOOK="step_hooks reduced counted",
            UNUSED="rank_share logprobs _forward",
            SAME="MegatronSplit.__init__ random_states",
        ),
    ),
    Target(
        "split",
        "kit.train.protocol",
        "metric_parity",
        others=dict.fromkeys(
            ("kind", "of_microbatches", "over_ranks", "normalised", "_over", "_sum"), ("split", "oracle")
        ),
        left_out=leave_out(REFUSES="make_split", UNUSED="Packed.unpack microbatches alike bins pack _trimmed"),
    ),
    Target(
        "split",
        "kit.train.losses",
        "oracle",
        others={
            "ClippedPolicyGradient._weight": ("split:seq-mask-tis", "oracle"),
            **{f"NegativeLogLikelihood.{name}": ("split:nll", "oracle") for name in ("normalizers", "__call__")},
        },
        left_out=leave_out(REFUSES="NegativeLogLikelihood.__post_init__"),
    ),
    Target(
        "sync:shards",
        "kit.megatron.shards",
        "bit_exact",
        left_out=leave_out(
            LOOK="merge _shared",
            UNUSED="load_full Folder.__init__ Folder.kind Folder.__getitem__ Folder.__iter__ Folder.__len__ _read_index _opened "
            "Writer.__init__ Writer.put Writer.__enter__ Writer.__exit__ load export _fitting _prepared _receive _together",
            REFUSES="check_full _some",
        ),
    ),
    Target(
        "sync",
        "kit.megatron.serve",
        "logits_equal",
        left_out=leave_out(
            UNUSED="PromptRequest.__post_init__ AnswerSpan.places Flight.write Flight.ended Flight.answer Prefix.size PrefixCache.__init__ "
            "PrefixCache.__len__ PrefixCache.get PrefixCache.put PrefixCache.clear Engine.__init__ Engine.in_flight Engine.start "
            "Engine.decode Engine.cancel Engine.weights_changed Engine._sample Engine._feed Engine._prefill Engine._forward "
            "Engine._leave distribution pick _lengthened",
        ),
    ),
    Target(
        "sync:buckets",
        "kit.sync.buckets",
        "bit_exact",
        others={"automatic": ("sync", "bit_exact")},
        left_out=leave_out(
            UNUSED="Bound.apply _Plan.holds Bound._copy_by_torch specs_of Whole.__init__ Whole.bind Whole.own",
            REFUSES="_check_buffer _unlike Mismatch.__init__ Layout.check _refuse_twice _dtype _refuse _uncut _emptied",
        ),
    ),
    Target(
        "sync",
        "kit.sync.cache",
        "bit_exact",
        others={
            **dict.fromkeys(("Ring.__init__", "Ring._free_segment"), ("sync:paused", "bit_exact")),
            **dict.fromkeys(
                ("Segment.__init__", "Segment.attach", "Segment._map", "Segment.tensor", "Segment.close"),
                ("sync", "segments_return_to_baseline"),
            ),
        },
        left_out=leave_out(
            REFUSES="Cache._check_room Cache._refuse_emptied Cache._refuse_closed",
            TEXT="_gib",
            UNUSED="KeptMappings.__init__ KeptMappings.attach KeptMappings.close",
            SPEED="Segment.populate",
        ),
    ),
    Target(
        "sync",
        "kit.sync.sender",
        "failure_is_clean",
        others=dict.fromkeys(
            ("Sender.__post_init__", "Sender.version", "Sender.sync", "Sender.build", "Sender._path"),
            ("sync", "version_order"),
        ),
        left_out=leave_out(UNUSED="OtherBase.__init__"),
    ),
    Target("sync", "kit.sync.receiver", "failure_is_clean", left_out=leave_out(GPU="landing")),
    Target(
        "sync:shards",
        "kit.sync.serving",
        "no_torn_reads",
        others=dict.fromkeys(
            ("Gate.__init__", "Gate.reading", "Gate.writing", "Gate._wait"), ("sync", "no_torn_reads")
        ),
        left_out=leave_out(UNUSED="Serving.running", TEXT="GateTimeout.__init__"),
    ),
    Target("sync", "kit.sync.hashes", "failure_is_clean", others={"Digests.wait": ("sync:paused", "bit_exact")}),
    Target(
        "sync",
        "kit.sync.link",
        "failure_is_clean",
        left_out=leave_out(UNUSED="PeerSilent.__init__ Link.last_words", SAME="Link.close Link.__exit__"),
    ),
    Target(
        "sync:broadcast",
        "kit.sync.groups",
        "groups_return_to_baseline",
        others={
            "PerTensor.broadcast": ("sync:per-tensor", "receivers_answer"),
            **dict.fromkeys(
                ("Rendezvous.offer", "Rendezvous.join", "Rendezvous.leave", "Rendezvous.close"),
                ("sync:rendezvous", "groups_return_to_baseline"),
            ),
        },
        left_out=leave_out(
            GPU="Grouped.slot", UNUSED="Grouped.explained", TEXT="Grouped.described", REFUSES="Broadcast.meet"
        ),
    ),
    Target(
        "sync",
        "kit.sync.transports",
        "bit_exact",
        others={
            **dict.fromkeys(("choose", "by_name", "make"), ("sync", "receivers_answer")),
            **dict.fromkeys(
                ("Shm.__init__", "Shm.send", "Shm.receive", "Shm.close", "attach", "await_bucket"),
                ("sync", "segments_return_to_baseline"),
            ),
            **dict.fromkeys(
                ("Serialize.send", "Serialize.receive", "Serialize.close", "memory"),
                ("sync:serialize", "receivers_answer"),
            ),
        },
        left_out=leave_out(
            UNUSED="Serialize.skip Transport.trouble Transport.absent",
            GPU="Serialize.host Ipc.__init__ Ipc.slot Ipc.send Ipc.receive Ipc.done Ipc.close needs_permission handle_of opened",
        ),
    ),
)
DRAWN = 62

WRITTEN = (*offload.MUTANTS, *split.MUTANTS, *sync.MUTANTS)
CATALOGUE: tuple[Mutant, ...] = (*WRITTEN, *drawn(TARGETS, DRAWN))
