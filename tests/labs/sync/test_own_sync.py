"""A synchroniser in place of the kit's is judged as the kit's is: right ones pass, and each bug fails the check that is meant to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kit
from kit.labs.discover import find, validate
from kit.labs.sync.lab import LAB, SyncConfig
from tests.labs.parts import failed, unanswered, why

Sync = Callable[..., kit.Run]
ROOT = Path(__file__).resolve().parents[3]
BROADCASTS, FOLDERS, BUCKETS = (
    f"docs.examples.{name}"
    for name in ("broadcast_sync:Broadcasts", "checkpoint_sync:Folders", "bucket_sync:HostBuckets")
)
SMALL = {"ranks": 3, "replicas": 2, "tp": 1}
VLLM = {"receiver": "kit.sync.protocols:VllmCalls"}
APART = {"ranks": 3, "replicas": 2, "tp": 1, "placement": "apart"}
TWO_RANKS = {"ranks": 5, "replicas": 2, "tp": 1, "infer_tp": 2}
MINE = '''
import contextlib
import torch
import torch.distributed as dist
from docs.examples.broadcast_sync import Broadcasts
from docs.examples.bucket_sync import HostBuckets
from docs.examples.checkpoint_sync import Folders
LEFT = []


class FoldersWithAStaleTensor(Folders):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.first = {}
    def write(self, version, tensors):
        self.first = self.first or {name: tensor.clone() for name, tensor in tensors.items()}
        last = max(tensors)
        super().write(version, {**tensors, last: self.first[last]})


class SkipsAReplica(Broadcasts):
    def write(self, version, tensors):
        super().write(version, {} if self.ctx.rank == self.ctx.replicas[-1][0] else tensors)


class WithoutTheGate(Broadcasts):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.gate = contextlib.nullcontext
    def write(self, version, tensors):
        for name, tensor in tensors.items():
            self.ctx.load(name, tensor)
        with self.ctx.writing():
            self.ctx.publish(version)


class OneByOne(WithoutTheGate):
    """Each replica for itself: one that fails leaves the others with the new version."""
    def write(self, version, tensors):
        with self.ctx.writing():
            Broadcasts.write(self, version, tensors)


class KeepsAtOnce(Broadcasts):
    """After a sync that failed, an expansion brings what that sync had."""
    def expand(self, version, targets, sent=None):
        self.kept = sent or self.kept
        super().expand(version, targets, sent)


class FailsAlone(Broadcasts):
    """No replica has the new version, and the trainer is not told."""
    def expand(self, version, targets, sent=None):
        try:
            super().expand(version, targets, sent)
        except RuntimeError:
            if self.ctx.role == "replica":
                raise


class PublishesInTheMiddle(HostBuckets):
    def received(self, group):
        tensors = super().received(group)
        if tensors and self.ctx.role == "replica":
            self.ctx.publish(self.version)
        return tensors
    def expand(self, version, targets):
        self.version = version
        super().expand(version, targets)


class PublishesAfterTheGate(Folders):
    """A forward between the two runs on new weights and reports the old version."""
    def write(self, version, tensors):
        with self.ctx.writing():
            for name, tensor in tensors.items():
                self.ctx.load(name, tensor)
        self.ctx.publish(version)


class GateForEveryBucket(HostBuckets):
    """Forwards may run between two buckets."""
    def expand(self, version, targets):
        if self.ctx.role == "trainer":
            super().expand(version, targets)
            return
        while tensors := self.received(self.groups[targets]):
            with self.ctx.writing():
                for name, tensor in tensors:
                    self.ctx.load(name, tensor)
        with self.ctx.writing():
            self.ctx.publish(version)


class KeepsTheOldCopy(Broadcasts):
    """Waking replicas get the version before the active one."""
    def sync(self, version, targets):
        before = self.kept
        super().sync(version, targets)
        self.kept = before or self.kept


class KeepsWhatArrived(Broadcasts):
    """From the base on."""
    def write(self, version, tensors):
        super().write(version, tensors)
        self.copy = {name: tensor.clone() for name, tensor in tensors.items()}


class PublishesNothing(Broadcasts):
    def write(self, version, tensors):
        with self.ctx.writing():
            for name, tensor in tensors.items():
                self.ctx.load(name, tensor)


class PublishesThoughItFailed(Broadcasts):
    def expand(self, version, targets, sent=None):
        try:
            super().expand(version, targets, sent)
        except Exception:
            if self.ctx.role == "replica":
                self.ctx.publish(version)


class LeavesAFileOpen(Broadcasts):
    def expand(self, version, targets, sent=None):
        try:
            super().expand(version, targets, sent)
        except Exception:
            LEFT.append(open("/dev/null"))
            raise


class Named:
    """As NeMo-RL's weight synchronizers are called: live weights to all, without a version."""
    def __init__(self, ctx):
        self.ctx = ctx
        self.group = dist.new_group([0, *ctx.awake])

    def sync_weights(self, *, timer=None, kv_scales=None):
        if self.ctx.role == "trainer":
            scales = {name: torch.tensor(value) for name, value in (kv_scales or {}).items()}
            tensors = {**dict(self.ctx.full_tensors()), **scales}
            if self.ctx.rank == 0:
                dist.broadcast_object_list([tensors], src=0, group=self.group)
            return
        tensors = [None]
        dist.broadcast_object_list(tensors, src=0, group=self.group)
        for name, tensor in tensors[0].items():
            self.ctx.load(name, tensor)


class NamedWithoutScales(Named):
    def sync_weights(self, *, timer=None, kv_scales=None):
        super().sync_weights(timer=timer)


class NamedWithoutATensor(Named):
    def sync_weights(self, *, timer=None, kv_scales=None):
        load = self.ctx.load if self.ctx.role == "replica" else None
        if load:
            object.__setattr__(self.ctx, "load", lambda name, tensor: None if "norm" in name else load(name, tensor))
        super().sync_weights(timer=timer, kv_scales=kv_scales)
        if load:
            object.__setattr__(self.ctx, "load", load)


class Calls(Broadcasts):
    """Drives an engine call by call: the kit's double of it."""
    def __init__(self, ctx):
        super().__init__(ctx)
        if ctx.role == "replica":
            ctx.receiver.init_weight_transfer_engine()
    def write(self, version, tensors):
        with self.ctx.writing():
            self.ctx.receiver.start_weight_update()
            self.ctx.receiver.update_weights(tensors.items())
            self.ctx.receiver.finish_weight_update(version)
            self.ctx.publish(version)


class CallsWithoutAFinish(Calls):
    def write(self, version, tensors):
        with self.ctx.writing():
            if not self.ctx.receiver.updating:
                self.ctx.receiver.start_weight_update()
            self.ctx.receiver.update_weights(tensors.items())
            self.ctx.publish(version)


class CallsWithoutAStart(Calls):
    def write(self, version, tensors):
        with self.ctx.writing():
            self.ctx.receiver.update_weights(tensors.items())


class Disturbs(Broadcasts):
    """Right on the replicas; the trainer trains on in another mode, with other random numbers."""
    def sync(self, version, targets):
        super().sync(version, targets)
        if self.ctx.role == "trainer":
            for chunk in self.ctx.chunks:
                chunk.eval()
            torch.manual_seed(1234 + version)


class ByNumpy(Broadcasts):
    """Sends copies that numpy made of the live weights."""
    def sync(self, version, targets):
        live = self.ctx.full_tensors() if self.ctx.role == "trainer" else ()
        sent = {name: torch.from_numpy(tensor.cpu().numpy().copy()) for name, tensor in live}
        self.expand(version, targets, sent)
        self.kept = sent


class Sent(dict):
    def __bool__(self):  # `Broadcasts` sends one that is empty too
        return True


class Changed(Broadcasts):
    """Sends what changed since the version that arrived last; replicas that wake get everything."""
    def sync(self, version, targets):
        live = self.ctx.full_tensors() if self.ctx.role == "trainer" else ()
        now = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live}
        self.bring(version, targets, now, {name: tensor for name, tensor in now.items() if self.differs(name, tensor)})
    def differs(self, name, tensor):
        return name not in self.kept or not torch.equal(tensor, self.kept[name])
    def bring(self, version, targets, now, changed):
        super().expand(version, targets, Sent(changed))
        self.kept = now


class ChangedTooSure(Changed):
    """Takes what it sends as arrived, even if the sync fails."""
    def bring(self, version, targets, now, changed):
        self.kept = now
        super().bring(version, targets, now, changed)


class Session(Broadcasts):
    """The engine closes the gate."""
    def write(self, version, tensors):
        with self.ctx.writing():
            self.ctx.receiver.begin_weight_update()
            self.ctx.receiver.update_weights_from_tensor(tensors.items())
            self.ctx.receiver.end_weight_update(version)
            self.ctx.publish(version)


class Nothing:
    def __init__(self, ctx):
        pass
'''


@pytest.fixture(scope="module", autouse=True)
def _mine(_places: None) -> Iterator[None]:
    """Ranks find `mine` in the working folder, and the examples beside the kit."""
    Path("mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "config"),
    [
        (BROADCASTS, SMALL),
        (BROADCASTS, {**TWO_RANKS, "tp": 1}),
        (BROADCASTS, APART),
        (FOLDERS, {**APART, "refresh": "paused"}),
        (BUCKETS, {"ranks": 5, "tp": 2, "replicas": 3, "receiver": "docs.examples.own_receiver:ByName"}),
        ("mine:Named", APART),
        ("mine:Named", {**APART, "ranks": 4, "pp": 2, "kv_scales": True}),
        ("mine:Calls", {**SMALL, **VLLM}),
        ("mine:ByNumpy", SMALL),
        ("mine:Changed", SMALL),
        ("mine:Changed", APART),
        ("mine:Session", {**SMALL, "receiver": "kit.sync.protocols:SglangSession"}),
    ],
)
def test_right_ones_pass(sync: Sync, code: str, config: dict[str, object]) -> None:
    verdict = sync(implementation=code, **config).verdict()
    assert failed(verdict) == set()
    null = {"others_untouched", "cache_bounded", "sweep_arrived", "weights_once"}
    null |= {"sleepers_release", "trainer_restored"} if config.get("placement") == "apart" else set()
    null |= {"failure_is_clean"} if code in {BUCKETS, FOLDERS, "mine:Named"} else set()
    assert unanswered(verdict) - {"nothing_piles_up"} == null
    if "failure_is_clean" in null:
        assert "no retries = True" in why(verdict, "failure_is_clean")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "check", "says"),
    [
        ("mine:FoldersWithAStaleTensor", "bit_exact", "tensors_differ: 1"),
        ("mine:SkipsAReplica", "trained_changed", "tensors_unchanged"),
        ("mine:WithoutTheGate", "no_torn_reads", "tensors changed while the gate was open"),
        ("mine:GateForEveryBucket", "no_torn_reads", "weights changed within several gates of one sync"),
        ("mine:PublishesInTheMiddle", "version_order", "published"),
        (
            "mine:PublishesAfterTheGate",
            "version_order",
            "`publish` was called outside of the gate in 5 syncs on receivers",
        ),
        ("mine:KeepsTheOldCopy", "bit_exact", "tensors_differ"),
        ("mine:KeepsWhatArrived", "no_second_copy", "after base"),
        ("mine:PublishesNothing", "no_double_bump", "version"),
        ("mine:Disturbs", "trainer_untouched", "training mode"),
        ("mine:PublishesThoughItFailed", "failure_is_clean", "failures without an error"),
        ("mine:LeavesAFileOpen", "failure_is_clean", "file descriptors left behind: 1 (rank"),
    ],
)
def test_a_wrong_one_fails_the_right_check(sync: Sync, code: str, check: str, says: str) -> None:
    verdict = sync(implementation=code, **SMALL).verdict()
    assert check in failed(verdict)
    assert says in why(verdict, check)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("mine:OneByOne", "wrong versions after the failure: 1 (rank 1, scene gate)"),
        ("mine:FailsAlone", "failures without an error: 1 (rank 0, scene gate)"),
    ],
)
def test_no_replica_has_a_version_that_another_one_lacks(sync: Sync, code: str, says: str) -> None:
    verdict = sync(implementation=code, **APART).verdict()
    assert "failure_is_clean" in failed(verdict)
    assert says in why(verdict, "failure_is_clean")


@pytest.mark.slow
def test_an_expansion_after_a_sync_that_failed_brings_the_version_before(sync: Sync) -> None:
    assert "bit_exact" in failed(sync(implementation="mine:KeepsAtOnce", **SMALL).verdict())


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, APART])
def test_a_sync_that_failed_has_not_brought_its_changes(sync: Sync, config: dict[str, object]) -> None:
    assert "bit_exact" in failed(sync(implementation="mine:ChangedTooSure", **config).verdict())


@pytest.mark.slow
def test_a_wrong_one_without_versions_fails_too(sync: Sync) -> None:
    verdict = sync(implementation="mine:NamedWithoutATensor", **APART).verdict()
    assert {"bit_exact", "trained_changed", "every_parameter_written"} <= failed(verdict)


@pytest.mark.slow
def test_one_that_drops_the_scales_of_keys_and_values_fails_too(sync: Sync) -> None:
    verdict = sync(implementation="mine:NamedWithoutScales", kv_scales=True, **APART).verdict()
    assert {"bit_exact", "every_parameter_written"} <= failed(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["VllmCalls", "SglangSession"])
def test_a_double_passes_with_the_kits_sender(sync: Sync, receiver: str) -> None:
    assert failed(sync(receiver=f"kit.sync.protocols:{receiver}", **SMALL).verdict()) == set()


@pytest.mark.slow
def test_an_update_that_is_never_finished_keeps_its_label_and_its_prefixes(sync: Sync) -> None:
    verdict = sync(implementation="mine:CallsWithoutAFinish", **VLLM, **SMALL).verdict()
    assert {"no_double_bump", "logits_equal"} <= failed(verdict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("mine:Nothing", r"has no sync\(version, targets\)"),
        ("mine:Named", "has no expand"),
        ("mine:CallsWithoutAStart", "call start_weight_update first"),
    ],
)
def test_what_it_lacks_is_named(code: str, says: str) -> None:
    with pytest.raises(kit.RankError, match=says):
        kit.run("sync", device="cpu", implementation=code, layers=2, **SMALL, **(VLLM if "Calls" in code else {}))


def test_a_transport_of_the_kit_is_refused_with_it() -> None:
    with pytest.raises(kit.BadInput, match="transport=shm belongs to the kit's own synchroniser"):
        validate(find("sync"), {"implementation": BROADCASTS, "transport": "shm"})


def test_transports_are_not_compared_for_it() -> None:
    assert "sweep" not in {step.phase for step in LAB.plan(SyncConfig(implementation=BROADCASTS))}
    assert "sweep" in {step.phase for step in LAB.plan(SyncConfig())}


def test_the_examples_stay_short() -> None:
    for module in (BROADCASTS, FOLDERS, BUCKETS):
        path = ROOT / f"{module.partition(':')[0].replace('.', '/')}.py"
        assert len(path.read_text().splitlines()) <= 60, path.name
