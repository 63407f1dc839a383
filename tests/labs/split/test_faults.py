"""Each fault fails its check, which passes in the same config without the fault. Other checks that the bug fails are listed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kit
from kit.errors import BadInput
from kit.labs.definition import Fault
from kit.labs.split.faults import FAULTS, KIT_LOSS, KIT_SPLIT
from tests.labs.parts import failed, why

Split = Callable[..., kit.Run]
CONFIGS = {repr(fault.set): fault for fault in FAULTS}  # faults with equal configs share one run without a fault
HERE = {fault.name: fault for fault in FAULTS if fault.exit == 1 and "cpu" in fault.devices}
GRADIENTS = {"grad_parity", "params_parity", "later_steps", "result_parity"}
NUMBERS = {"loss_parity", "metric_parity", "later_steps", "replicas_counted_once"}
# Other checks that a bug fails, besides the one it is listed under.
ALSO = {
    "double-reduce": GRADIENTS,
    "no-reduce": GRADIENTS | {"one_reduction", "ranks_agree"},
    "per-chunk-finalize": GRADIENTS | {"one_reduction"},
    "one-scalar-metrics": NUMBERS - {"loss_parity"} | {"means_averaged"},
    "counts-normalised": NUMBERS - {"loss_parity"} | {"means_averaged"},
    "late-lr": {"result_parity", "update"},
    "hooks-lost-on-error": set(),
    "moe-aux-unscaled": GRADIENTS,
    "replicas-counted-n-times": NUMBERS,
    "mask-not-shifted": {"extreme_gaps", "masked_places", "replicas_counted_once"},
    "dummy-bins-counted": GRADIENTS | NUMBERS | {"chunk_invariance"},
    "abort-keeps-grads": set(),
    "release-mid-step": GRADIENTS,
    "drops-last-microbatch": GRADIENTS | NUMBERS | {"chunk_invariance", "means_averaged"},
    "metrics-on-rank-0-alone": {"means_averaged", "nonfinite_skipped"},
    "abort-keeps-random": set(),
    "norm-of-sums": {"later_steps", "update"},
    "loses-a-metric": {"metric_parity", "later_steps"},
    "ticks-on-abort": {"abort_is_clean"},
    "nan-applied": set(),
    "unclipped": set(),
    "weights-cancel": {"oracle"},
    "masks-multiply": set(),
    "count-shifted": GRADIENTS | NUMBERS | {"misuse_raises", "update"},
    "wrong-clip": {"params_parity", "later_steps"},
    "scales-up": set(),
    "routers-left": {"later_steps", "params_parity", "nonfinite_skipped", "abort_is_clean"},
    "routers-moved-twice": {"later_steps", "params_parity", "nonfinite_skipped", "abort_is_clean"},
    "lost-on-interrupt": {"misuse_raises", "version_ticks", "abort_is_clean"},
    "twice-divided": GRADIENTS | {"update"},
    "keeps-graphs": {"nothing_piles_up"},
    "hook-per-step": set(),
    "left-in-eval": set(),
    "file-per-abort": set(),
    "drops-remainder": set(),
    "group-per-step": {"nothing_piles_up", "nothing_stays"},
    "moe-aux-summed": {"metric_parity", "later_steps"},
    "schedule-by-steps": {"later_steps", "result_parity", "update"},
    "sums-means": set(),
    "keeps-rows": set(),
    "keys-gradient-of-own-part": {"backends_agree"},
    "scaled-by-cp": {"backends_agree"},
    "context-ranks-counted": GRADIENTS | NUMBERS | {"misuse_raises"},
    "norm-of-data-ranks": {"ranks_agree"},
}
WITHIN_ROUNDING = {fault.name for fault in FAULTS if "dtype" in fault.needs}  # of bfloat16, where they are refused
SMALLER = {"layers": 1, "microbatches": 5}
SAID = {
    "twice-divided": "; all gradients are 0.5 times those of the plain step"
}  # in the reason of the check that catches it


def own(fault: Fault) -> dict[str, object]:
    """Return the config of a fault on a smaller job; the fault's own settings win."""
    return {**SMALLER, "chunks": [1, 2, 5], **fault.set}


@pytest.mark.slow
@pytest.mark.drawn(2, of="faults")
@pytest.mark.parametrize("name", HERE)
def test_a_fault_fails_its_check_and_hardly_another(split: Split, name: str) -> None:
    verdict = split(fault=name, **own(HERE[name])).verdict()
    assert {HERE[name].caught_by} <= failed(verdict) <= {HERE[name].caught_by} | ALSO[name]
    if name in SAID:
        assert SAID[name] in why(verdict, HERE[name].caught_by)


@pytest.mark.slow
@pytest.mark.drawn(1, of="without faults")
@pytest.mark.parametrize("fault", CONFIGS.values(), ids=lambda fault: fault.name)
def test_without_the_fault_its_check_passes(split: Split, fault: Fault) -> None:
    verdict = split(**own(fault)).verdict()
    assert failed(verdict) == set()
    named = {other.caught_by for other in FAULTS if other.set == fault.set}
    assert {row.check: row.passed for row in verdict if row.check in named} == dict.fromkeys(named, True)


@pytest.mark.slow
@pytest.mark.drawn(1, of="faults in bfloat16")
@pytest.mark.parametrize("name", sorted(HERE.keys() - WITHIN_ROUNDING))
def test_rounding_in_bfloat16_hides_no_fault(split: Split, name: str) -> None:
    settings, check = {**own(HERE[name]), "dtype": "bfloat16"}, HERE[name].caught_by
    right = split(**settings).verdict()
    assert failed(right) == set()
    assert {row.passed for row in right if row.check == check} == {True}
    assert check in failed(split(fault=name, **settings).verdict())


def test_a_fault_within_the_rounding_of_bfloat16_is_refused_there() -> None:
    assert {"moe-aux-unscaled", "keys-gradient-of-own-part"} == WITHIN_ROUNDING
    for name in sorted(WITHIN_ROUNDING):
        with pytest.raises(BadInput, match="cannot be detected with dtype=bfloat16; use dtype=float32"):
            kit.run("split", fault=name, dtype="bfloat16")


@pytest.mark.slow
def test_a_leak_into_the_next_step_breaks_the_run() -> None:
    (fault,) = (fault for fault in FAULTS if fault.exit == 3)
    with pytest.raises(kit.RankError, match="Should not have multiple communication calls outstanding") as caught:
        kit.run("split", fault=fault.name, **own(fault))
    assert caught.value.phase == "split"


def test_every_fault_is_known_here() -> None:
    assert ALSO.keys() == HERE.keys()
    assert {fault.name for fault in FAULTS} - HERE.keys() == {"no-sync-leak", "missing-sync"}


@pytest.mark.parametrize(
    ("fault", "config", "instead"),
    [
        ("late-lr", {"backend": "fsdp2"}, "use backend=megatron"),
        ("late-lr", {"implementation": "own_split:Trainer"}, f"use implementation={KIT_SPLIT}"),
        ("dummy-bins-counted", {"backend": "megatron", "batching": "fixed"}, "use backend=fsdp2"),
        ("weights-cancel", {"recipe": "nll"}, "use recipe=grpo or dapo"),
        ("scaled-by-cp", {"cp": 1}, "use cp=2 or 3"),
        ("mask-not-shifted", {"loss": "mine:Reinforce"}, f"use loss={KIT_LOSS}"),
    ],
)
def test_a_fault_is_refused_where_its_code_does_not_run(fault: str, config: dict[str, str], instead: str) -> None:
    with pytest.raises(BadInput, match=f"fault '{fault}' cannot be detected with .*{instead}"):
        kit.lab("split", fault=fault, **config)
