"""What a rehearsed failure leaves behind is counted, whatever it is; what a right one closes late is not."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from kit.errors import KitError, RehearsedError
from kit.labs.sync.lab import SyncConfig
from kit.labs.sync.ranks import sweep
from kit.labs.sync.ranks.rehearsals import counting_leftovers, misnamed, not_derived, of_trainer
from kit.labs.sync.ranks.scenes import WHY, leaves_before_a_bucket_in_the_middle
from kit.labs.sync.ranks.side import miscounted
from kit.labs.sync.ranks.watch import SeenWeights
from kit.labs.sync.rules import failure_is_clean
from kit.sync.buckets import Spec, lay_out
from kit.sync.hashes import Digests
from kit.sync.link import Link, PeerGone
from kit.sync.sender import SyncFailed

KEPT: list[Any] = []
OVER = threading.Event()


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    OVER.set()
    while KEPT:
        KEPT.pop()()


def side() -> Any:
    rows: list[tuple[str, float]] = []
    return SimpleNamespace(
        held=set,
        waiting=lambda: 0,
        leaving=set(),
        ctx=SimpleNamespace(record=lambda metric, value, text, scene: rows.append((metric, value))),
        rows=rows,
    )


def left_by(act: Callable[[], None]) -> dict[str, float]:
    watched = side()
    with counting_leftovers(watched, "middle"):
        act()
    return {metric: value for metric, value in watched.rows if value}


def opens_a_file() -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    KEPT.append(lambda: os.close(fd))


def opens_a_socket() -> None:
    KEPT.append(socket.socket().close)


def starts_a_thread() -> None:
    OVER.clear()
    thread = threading.Thread(target=OVER.wait)
    thread.start()
    KEPT.append(thread.join)


def makes_a_group() -> None:
    """As torch's tables do not list it."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dist.default_pg_timeout)
    KEPT.append(group.shutdown)


@pytest.mark.parametrize(
    ("act", "metrics"),
    [
        (opens_a_file, {"left_fds"}),
        (opens_a_socket, {"left_fds", "left_sockets"}),
        (starts_a_thread, {"left_threads"}),
        (makes_a_group, {"left_unlisted"}),
    ],
)
def test_what_is_left_is_counted_by_kind(act: Callable[[], None], metrics: set[str]) -> None:
    assert metrics <= left_by(act).keys()


def test_a_bucket_that_begins_like_the_one_before_is_seen_whatever_its_size() -> None:
    watched: Any = SimpleNamespace(point=lambda *_: None, beginnings={}, repeats=set())
    weights = SeenWeights(SimpleNamespace(bind=lambda *_: SimpleNamespace(apply=lambda *_: None)), watched).bind(None)
    for index, values in enumerate(([1, 2, 3], [4, 5], [4, 5, 6], [4, 6, 6])):
        weights.apply(index, torch.tensor(values, dtype=torch.uint8))
    assert watched.repeats == {2}
    weights.apply(2, torch.tensor([7], dtype=torch.uint8))
    assert watched.repeats == set()


def test_what_closes_soon_is_not_counted() -> None:
    ends = socket.socketpair()
    closing = threading.Timer(0.1, lambda: [end.close() for end in ends])
    assert left_by(closing.start) == {}
    closing.join()
    assert left_by(lambda: None) == {}


def test_a_group_that_a_thread_destroys_soon_is_not_counted() -> None:
    groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dist.default_pg_timeout)]
    groups.clear()  # the first may start threads that stay

    def makes_one() -> None:
        groups.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dist.default_pg_timeout))
        threading.Timer(0.1, groups.clear).start()

    assert left_by(makes_one) == {}


def rows_of(*left: tuple[int, str, str, float]) -> pd.DataFrame:
    columns = ["rank", "metric", "ids", "value"]
    rows = [(rank, metric, json.dumps({"scene": scene}), value) for rank, metric, scene, value in left]
    return pd.DataFrame(rows, columns=columns).assign(phase="rehearse", cycle=0, text="")


def test_what_one_failure_left_may_be_made_once_and_two_leave_a_leak() -> None:
    clean = (1, "kept_wrong", "middle", 0.0)
    others = (1, "left_fds", "late", 1.0), (2, "left_fds", "gone", 1.0)
    once = failure_is_clean(rows_of(clean, (1, "left_fds", "gone", 1.0), (1, "left_fds", "gone", 0.0), *others), {})
    assert once.value == 0
    twice = failure_is_clean(rows_of(clean, (1, "left_fds", "gone", 1.0), (1, "left_fds", "gone", 2.0), *others), {})
    assert twice.value == 3
    assert twice.why.startswith("file descriptors left behind: 1 (rank 1, scene gone); ")
    group = failure_is_clean(rows_of(clean, (1, "left_unlisted", "late", 1.0)), {})
    assert "process groups that torch does not list, still there after 0.5 s: 1 (rank 1, scene late)" in group.why


@pytest.mark.parametrize(
    ("scene", "peer", "tensors", "sentences", "share"),
    [
        ("late", "rank 4", (), [], 1.0),
        ("missing", "rank 4", ("b",), [], 1.0),
        ("packed", "rank 3", ("a",), [], 1.0),  # whichever receiver saw it first
        ("late", "rank 3", (), ["the error names rank 3 instead of rank 4"], 1.0),
        ("missing", "rank 4", ("a",), ["the error names tensor a instead of tensor b"], 1.0),
        ("wrong-bytes", "rank 4", ("a",), ["the error names tensor a instead of 2 tensors (a, b)"], 1.0),
        ("alone", "rank 4", (), ["the error names rank 4 instead of the sender"], 1.0),
        ("gone", "rank 4", (), [], 1.0),
        ("gone", "rank 3", (), ["the error names rank 3 instead of rank 4"], 1.0),
        ("wrong-bytes", "rank 4", ("a",), [], 0.5),  # the other one was not compared
        ("wrong-bytes", "rank 4", (), ["the error names no tensor instead of 2 tensors (a, b)"], 0.5),
        ("wrong-bytes", "rank 4", ("c",), ["the error names tensor c instead of 2 tensors (a, b)"], 0.5),
    ],
)
def test_what_is_wrong_with_an_error_is_told(
    scene: str, peer: str, tensors: tuple[str, ...], sentences: list[str], share: float
) -> None:
    class RehearsedFailureError(KitError):
        pass

    failure = RehearsedFailureError(f"{peer} failed: {WHY.get(scene, '')} in bucket 0 ({', '.join(tensors)})")
    failure.peer, failure.tensors, failure.bucket = peer, tensors, 0  # type: ignore[attr-defined]
    layout = lay_out([Spec(name, 0, torch.uint8, (8,)) for name in "ab"], 512)
    trainer: Any = SimpleNamespace(
        digests={"a": "", "b": ""}, cache=SimpleNamespace(layout=layout), config=SyncConfig(verify_share=share)
    )
    error = SyncFailed("the refresh with version 3", 2, failure)
    assert [*misnamed(trainer, scene, error, 2, ["rank 3", "rank 4"])] == sentences
    assert next(misnamed(trainer, scene, error, 3, ["rank 4"])) == "the error does not say that version 3 stays"
    silent = SyncFailed("the refresh with version 3", 2, KitError(f"{peer} failed"))
    lacking = [sentence for sentence in misnamed(trainer, scene, silent, 2, [peer]) if "why" in sentence]
    assert lacking == [f"the error does not say why: {WHY[scene]}" for scene in [scene] if scene in WHY]
    assert [*misnamed(trainer, scene, KeyError(3), 2, [])] == ["KeyError was raised instead of SyncFailed"]
    assert [*misnamed(trainer, scene, None, 2, [])] == ["no error was raised"]


@pytest.mark.parametrize(
    ("points", "wrong"),
    [
        (["bucket", "write", "derive", "undo", "derive", "undone"], 0),
        (["bucket", "write", "derive", "undo", "undone"], 1),
        (["bucket", "undo", "undone"], 0),  # nothing was written
        (["bucket", "write", "derive"], 0),
    ],
)
def test_after_an_undo_of_new_weights_everything_is_derived_again(points: list[str], wrong: int) -> None:
    replica: Any = SimpleNamespace(watch=SimpleNamespace(points=[SimpleNamespace(name=name) for name in points]))
    assert not_derived(replica) == wrong


@pytest.mark.parametrize(
    ("scene", "tensors", "right"),
    [
        ("wrong-bytes", ("b",), True),
        ("wrong-bytes", ("a", "b"), True),  # everything was sent
        ("wrong-bytes", ("a",), False),
        ("packed", ("b",), True),
        ("packed", ("c",), False),
        ("lost", ("a", "b"), True),
        ("lost", ("b",), False),
    ],
)
def test_an_error_names_the_changed_tensors_or_all(scene: str, tensors: tuple[str, ...], right: bool) -> None:
    failure = KitError(f"rank 4 failed: {', '.join(tensors)}")
    failure.peer, failure.tensors = "rank 4", tensors  # type: ignore[attr-defined]
    layout = lay_out([Spec(name, 0, torch.uint8, (8,)) for name in "ab"], 512)
    trainer: Any = SimpleNamespace(
        digests={"a": "", "b": ""}, cache=SimpleNamespace(layout=layout), config=SyncConfig(delta="word")
    )
    error = SyncFailed("the refresh with version 3", 2, failure)
    assert (not [*misnamed(trainer, scene, error, 2, ["rank 4"], changed=["b"])]) == right


def test_with_a_delta_an_error_may_name_only_the_tensors_of_one_bucket_of_everything() -> None:
    failure = KitError("rank 4 failed: bucket 0 differs: a; so does bucket 1")
    failure.peer, failure.tensors, failure.bucket = "rank 4", ("a", "b"), 0  # type: ignore[attr-defined]
    layout = lay_out([Spec(name, 0, torch.uint8, (512,)) for name in "ab"], 512)
    trainer: Any = SimpleNamespace(
        digests={"a": "", "b": ""}, cache=SimpleNamespace(layout=layout), config=SyncConfig(delta="word")
    )
    error = SyncFailed("the refresh with version 3", 2, failure)
    assert [*misnamed(trainer, "wrong-bytes", error, 2, ["rank 4"], changed=["b"])] == []


def test_a_receiver_that_leaves_says_nothing() -> None:
    ours, theirs = socket.socketpair()
    link, sender = Link(ours, "the sender", 5.0), Link(theirs, "rank 4", 5.0)
    transport: Any = SimpleNamespace(buckets=3, links={"the sender": link})
    with pytest.raises(RehearsedError):
        leaves_before_a_bucket_in_the_middle(transport, 1, torch.empty(0))
    with pytest.raises(PeerGone, match=WHY["gone"]), sender:
        sender.message("bytes")


FIVE = ("a", "b", "layers.1.b", "d", "e")


@pytest.mark.parametrize(
    ("words", "tensors", "wrong"),
    [
        ("a (shard 0) is missing", FIVE[:1], []),
        ("a, b and 3 more are empty", FIVE, []),
        ("5 of 9 tensors, a first", FIVE, []),
        ("a, b, layers.1.b, d, e", FIVE, []),
        ("layers.1.b is missing", FIVE[:1], ["name layers.1.b instead of a"]),
        ("5 tensors, e first", FIVE, ["name e instead of a, b, layers.1.b and 2 more"]),
        ("a, b and 2 more are empty", FIVE, ["name 2 of 5 tensors, and count others"]),
        ("a and 15 tensors, all of 15 of 15", FIVE, ["name 1 of 5 tensors, and count others"]),
        ("a, b are empty", FIVE, ["name 2 of 5 tensors, and count others"]),
        ("a and -4 more are empty", FIVE[:1], ["name 1 of 1 tensors, and count others"]),
        ("", FIVE[:1], ["name no tensor instead of a", "name 0 of 1 tensors, and count others"]),
    ],
)
def test_the_tensors_in_the_words_of_an_error_are_compared_and_counted(
    words: str, tensors: tuple[str, ...], wrong: list[str]
) -> None:
    found = [*miscounted(words, tensors, {*FIVE, "c"})]
    assert found == [f"the words {sentence}" for sentence in wrong]


@pytest.mark.parametrize(
    ("bucket", "words", "wrong"),
    [
        (0, "bucket 0 differs: a", []),
        (1, "bucket 1 differs: b", ["the error names bucket 1 instead of bucket 0"]),
        (0, "bucket 1 differs: a", ["the error has bucket 0 and does not say it"]),
    ],
)
def test_the_bucket_of_an_error_is_compared(bucket: int, words: str, wrong: list[str]) -> None:
    failure = KitError(f"rank 4 failed: {words}")
    failure.peer, failure.tensors, failure.bucket = "rank 4", ("a", "b"), bucket  # type: ignore[attr-defined]
    layout = lay_out([Spec(name, 0, torch.uint8, (512,)) for name in "ab"], 512)
    trainer: Any = SimpleNamespace(
        digests={"a": "", "b": ""}, cache=SimpleNamespace(layout=layout), config=SyncConfig()
    )
    error = SyncFailed("the refresh with version 3", 2, failure)
    found = [*misnamed(trainer, "wrong-bytes", error, 2, ["rank 4"])]
    assert found[: len(wrong)] == wrong
    assert bool(found) == bool(wrong)


class ComparingTrainer:
    """A trainer whose syncs fail on the tensors that the version has compared. `chosen_by` makes the version that chooses them."""

    def __init__(self, chosen_by: Callable[[int], int]) -> None:
        self.chosen_by = chosen_by
        self.config = SyncConfig(placement="apart", replicas=1, verify_share=0.5)
        self.ctx = SimpleNamespace(record=lambda metric, value, text, scene: self.rows.append((metric, scene, value)))
        self.rows: list[tuple[str, str, float]] = []
        self.names = [f"layer {number}" for number in range(40)]
        self.digests = dict.fromkeys(self.names, "")
        self.cache = SimpleNamespace(layout=lay_out([Spec(name, 0, torch.uint8, (8,)) for name in self.names], 4096))
        self.sender = SimpleNamespace(version=1, sync=self.sync)
        self.job = SimpleNamespace(step=lambda: None, chunks=[])
        self.listener = SimpleNamespace(accept=lambda *_: {})
        self.leaving: set[str] = set()
        self.sends, self.held, self.waiting = True, set, lambda: 0
        self.as_job, self.everywhere, self.update_truth, self.send_truth = (
            nullcontext,
            set,
            lambda: None,
            lambda _: None,
        )

    def targets(self, *, sleeping: bool) -> list[Any]:
        return [] if sleeping else [SimpleNamespace(name="rank 1")]

    def sync(self, version: int, targets: Any, gather: Any = None) -> None:
        digests = Digests(self.cache.layout, self.chosen_by(version), algorithm="xxh3", share=self.config.verify_share)
        for bucket in range(len(self.cache.layout.buckets)):
            digests.add_packed(bucket, torch.zeros(self.cache.layout.sizes[bucket], dtype=torch.uint8))
        failure = KitError("rank 1 failed")
        failure.tensors = [name for _, name in digests.differences(self.cache.layout, {})]  # type: ignore[attr-defined]
        digests.close()
        raise SyncFailed(f"the refresh with version {version}", self.sender.version, failure)

    def deliver(self, version: int, targets: Any, *, asleep: bool) -> None:
        self.sender.version = version


@pytest.mark.parametrize(("chosen_by", "again"), [(lambda version: version, 0), (lambda _: 1, 1)])
def test_a_share_that_compares_the_same_tensors_of_two_versions_is_counted(
    chosen_by: Callable[[int], int], again: int
) -> None:
    trainer: Any = ComparingTrainer(chosen_by)
    of_trainer(trainer)
    assert [row for row in trainer.rows if row[0] == "compared_again"] == [("compared_again", "wrong-bytes", again)]
    judged = failure_is_clean(rows_of((0, "compared_again", "wrong-bytes", float(again))), {})
    assert (judged.value, "versions with the same compared tensors as the one before" in judged.why) == (
        again,
        bool(again),
    )


@pytest.mark.parametrize("mebibytes", [1, 16, 64])
def test_the_sweep_reloads_its_tensors_elsewhere(mebibytes: int) -> None:
    """Whatever place the allocator prefers: at the old one, who still reads there would read the right bytes."""
    tensors = sweep.contents(SyncConfig(sweep_mib=mebibytes))
    before = {key: (tensor.data_ptr(), tensor.clone()) for key, tensor in tensors.items()}
    in_the_way = sweep.reload_elsewhere(tensors)
    for key, (place, content) in before.items():
        assert tensors[key].data_ptr() != place
        assert torch.equal(tensors[key], content)
    assert not any(tensor.any() for tensor in in_the_way)
