"""Changes in place of whole versions: what is sent, to whom, and what happens where a receiver has lost the version before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit.errors import BadInput, KitError
from kit.sync.buckets import GAPS, WORDS, Cut, Whole, lay_out, specs_of
from kit.sync.cache import Ring
from kit.sync.hashes import digest
from kit.sync.receiver import Call
from kit.sync.sender import STEPS, SyncFailed
from kit.sync.transports import Serialize
from kit.sync.words import changed_words, gaps_of, positions_of, write_words
from kit.target import replaced
from tests.sync import test_service
from tests.sync.ranks import service
from tests.sync.test_service import Scene, failing, gloo, scene, trouble

__all__ = ["gloo", "scene"]
BASES = service.tensors(0)
WORDS_EACH = 7  # of every tensor with more, in each version


def slightly(version: int) -> service.Tensors:
    """The base with a few changed words more in each version."""
    made = {key: tensor.clone() for key, tensor in BASES.items()}
    for number in range(1, version + 1):
        generator = torch.Generator().manual_seed(number)
        for (name, _), tensor in made.items():
            if name not in {"small", "one"}:
                flat = tensor.view(-1)
                flat[torch.randperm(len(flat), generator=generator)[:WORDS_EACH]] = float(number)
    return made


def changed_positions(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return changed_words(old, new).nonzero().view(-1)


# -- words -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "positions",
    [[0], [254], [255], [256], [509, 510, 511], [0, 1, 2, 255, 256, 257, 1000], [5, 70_000, 3_000_000]],
)
def test_positions_come_back_from_their_gaps(positions: list[int]) -> None:
    given = torch.tensor(positions, dtype=torch.int64)
    assert positions_of(gaps_of(given)).tolist() == positions


def test_gaps_take_a_byte_where_words_are_dense_and_at_most_four() -> None:
    dense = torch.arange(0, 100_000, 80)
    assert gaps_of(dense).nbytes == len(dense)
    sparse = torch.arange(0, 10_000_000, 100_000)
    assert gaps_of(sparse).nbytes == 4 * len(sparse)


def test_words_are_compared_as_bits() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, float("nan"), 1.0, 3.0], dtype=torch.bfloat16)
    assert changed_positions(old, new).tolist() == [0, 3]


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda full: full,
    "rows": lambda full: full.chunk(3)[1],
    "columns": lambda full: full.chunk(3, dim=1)[2],
    "one row": lambda full: full[4:5],
    "one column": lambda full: full[:, 3:4],
    "three dimensions": lambda full: full.chunk(2)[1].view(3, 2, 9),
    "turned": lambda full: full.t(),
    "a copy": lambda full: full.flip(0),
    "every other row": lambda full: full[::2],
    "overlapping": lambda full: full.view(-1)[:20].unfold(0, 5, 3),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_part_gets_the_words_that_lie_in_it(name: str, dtype: torch.dtype) -> None:
    take, generator = PARTS[name], torch.Generator().manual_seed(1)
    old = torch.randn(12, 9, generator=generator).to(dtype)
    new = old.clone()
    new.view(-1)[torch.randperm(108, generator=generator)[:40]] = 7.0
    positions = changed_positions(old, new)
    wide = torch.zeros(*take(old).shape[:-1], take(old).shape[-1] + 3, dtype=dtype)
    for into in (take(old).clone(), wide[..., :-3].copy_(take(old))):  # also in strided memory
        write_words(into, take, old.shape, positions, new.view(-1)[positions])
        assert not len(changed_positions(into.contiguous(), take(new).contiguous()))


@pytest.mark.parametrize(("positions", "words"), [([3], 2), ([12], 1)])
def test_words_that_do_not_fit_are_refused(positions: list[int], words: int) -> None:
    with pytest.raises(KitError, match="do not fit a tensor of 12 words"):
        write_words(torch.zeros(12), lambda full: full, (12,), torch.tensor(positions), torch.zeros(words))


def test_whole_tensors_are_loaded_and_words_refused_where_code_loads_by_name() -> None:
    whole = lay_out(specs_of({("a", 0): torch.zeros(4)}), 4096)
    words = lay_out(specs_of({("a", GAPS): torch.zeros(1, dtype=torch.uint8), ("a", WORDS): torch.zeros(1)}), 4096)
    loaded: list[str] = []
    weights = Cut({"a": [(torch.zeros(4), lambda full: full)]}, (), lambda name, _: loaded.append(name))
    weights.bind(whole, whole).apply(0, torch.zeros(16, dtype=torch.uint8))
    assert loaded == ["a"]
    with pytest.raises(KitError, match="cannot take changed words"):
        weights.bind(whole, words)


def test_a_parameter_takes_a_whole_tensor_of_a_delta() -> None:
    layout = lay_out(specs_of({("a", 0): torch.zeros(4)}), 4096)
    parameter = torch.nn.Parameter(torch.zeros(4))
    sent = torch.arange(4.0)
    Whole({("a", 0): parameter}).bind(layout, layout).apply(0, sent.view(torch.uint8))
    assert torch.equal(parameter.detach(), sent)


# -- syncs -----------------------------------------------------------------------------------------------------------------


class Halves(service.Host):
    """`large` lies in two halves, one of them in strided memory."""

    def weights(self) -> Any:
        halves = self.halves()
        places: dict[str, Any] = {name: [(self.tensors[name, 0], lambda full: full)] for name in service.KINDS}
        places["large"] = [(halves[0], lambda full: full[:20]), (halves[1], lambda full: full[20:])]
        return Cut(places, [*self.tensors.values()])

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        if ("wide", 0) not in self.tensors:
            self.tensors["upper", 0] = self.tensors["large", 0][:20].clone()
            self.tensors["wide", 0] = torch.zeros(20, 128)
            self.tensors["wide", 0][:, :64] = self.tensors["large", 0][20:]
        return self.tensors["upper", 0], self.tensors["wide", 0][:, :64]

    def full(self) -> service.Tensors:
        return {(name, 0): self.tensors[name, 0] for name in service.KINDS} | {("large", 0): torch.cat(self.halves())}

    def has(self, version: int) -> bool:
        return service.table(self.full()) == service.table(slightly(version))

    def digests(self, algorithm: str) -> dict[str, str]:
        return {name: digest(tensor, algorithm) for (name, _), tensor in self.full().items()}


@pytest.fixture
def deltas(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Two receivers of weights that change a little, after a first version that was sent whole."""
    for module in (service, test_service):
        monkeypatch.setattr(module, "tensors", slightly)
    scene.hosts["r2"] = Halves()
    scene.receivers["r2"] = service.receiver_of("r2", scene.hosts["r2"], scene.listener.address)
    scene.sender.delta = "word"
    assert scene.works(1).base is None
    return scene


def words_between(old: int, new: int) -> int:
    before, after = slightly(old), slightly(new)
    return sum(len(changed_positions(before[key].view(-1), after[key].view(-1))) for key in before)


@pytest.mark.drawn(2, of="changes")
@pytest.mark.parametrize("kind", ["auto", "serialize", "rendezvous"])
@pytest.mark.parametrize("by", ["tensor", "word"])
def test_only_what_changed_is_sent_to_receivers_with_the_version_before(deltas: Scene, kind: str, by: str) -> None:
    deltas.sender.transport, deltas.sender.delta = kind, by  # type: ignore[assignment]
    for version, state in ((2, "serving"), (3, "paused"), (4, "serving")):
        report = deltas.works(version, state)
        if by == "tensor":  # more than it is worth
            assert (report.base, report.bytes) == (None, deltas.sender.cache.layout.total)
        else:
            assert (report.base, report.verified) == (version - 1, len(service.KINDS))
            assert report.bytes <= 8 * words_between(version - 1, version)


def test_one_changed_tensor_is_sent_alone(deltas: Scene) -> None:
    deltas.sender.delta = "tensor"
    one = {**slightly(1), ("last", 0): torch.ones(16, 8, dtype=torch.bfloat16)}
    report, *_ = deltas.sync(2, gather=lambda: one)
    assert (report.base, report.bytes) == (1, 256)
    assert all(torch.equal(host.tensors["last", 0], one["last", 0]) for host in deltas.hosts.values())


class OneLargeBuffer(Serialize):
    """The buffer is as large as the largest bucket."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.buffer = torch.empty(max(ctx.sizes))


@pytest.mark.drawn(1, of="no change")
@pytest.mark.parametrize("transport", ["auto", f"{__name__}:OneLargeBuffer"])
@pytest.mark.parametrize("state", ["serving", "paused"])
def test_a_version_in_which_nothing_changed_is_still_one(deltas: Scene, state: str, transport: str) -> None:
    deltas.sender.transport = transport
    report, *received = deltas.sync(2, state, gather=lambda: slightly(1))
    assert (report.base, report.bytes, report.buckets) == (1, 0, 0)
    assert not any(isinstance(one, Exception) for one in received)
    assert {each.version for each in deltas.receivers.values()} == {2}


def test_an_expansion_brings_everything_and_the_next_version_only_changes(deltas: Scene) -> None:
    deltas.works(2)
    assert deltas.works(2, "asleep", "r1").base is None
    assert deltas.works(3).base == 2


@pytest.mark.drawn(2, of="failures")
@pytest.mark.parametrize("step", [*STEPS[:-1], "acknowledge"])
def test_after_a_failure_at_any_step_the_changes_are_those_since_the_version_that_all_have(
    deltas: Scene, step: str
) -> None:
    deltas.receivers["r2"].calls = failing(step, trouble)
    deltas.fails(2)
    deltas.receivers["r2"].calls = Call
    assert deltas.works(3).base == 1


def test_after_a_failure_that_only_some_went_back_from_everything_is_sent(deltas: Scene) -> None:
    deltas.receivers["r2"].calls = failing("activate", trouble)
    deltas.sync(2)
    assert [each.version for each in deltas.receivers.values()] == [2, 1]
    deltas.receivers["r2"].calls = Call
    assert deltas.works(3).base is None


def test_receivers_that_paused_have_lost_their_version_after_a_failure(deltas: Scene) -> None:
    deltas.receivers["r2"].calls = failing("look", trouble)
    deltas.fails(2, "paused")
    deltas.receivers["r2"].calls = Call
    assert deltas.works(3, "paused").base is None
    assert deltas.works(4, "paused").base == 3


def test_a_receiver_that_missed_a_version_gets_everything(deltas: Scene) -> None:
    deltas.works(2, "serving", "r1")
    assert deltas.works(3).base is None
    assert deltas.works(4).base == 3


def test_a_receiver_that_was_made_anew_gets_everything(deltas: Scene) -> None:
    """It has the number of the version, but has not received it."""
    fresh = service.receiver_of("r1", deltas.hosts["r1"], deltas.listener.address)
    fresh.version = 1
    deltas.receivers["r1"] = fresh
    assert deltas.works(2).base is None


def test_a_receiver_that_lost_its_weights_unnoticed_is_named_and_gets_everything_next(deltas: Scene) -> None:
    before = deltas.hosts["r2"].tensors["half", 0]
    before[0, 0] = 9.0
    error, *_ = deltas.sync(2)
    assert isinstance(error, SyncFailed)
    assert (error.peer, error.tensors) == ("r2", ("half",))
    assert "after the changes from version 1 to 2" in str(error)
    assert (float(before[0, 0]), deltas.receivers["r2"].version) == (9.0, 1)
    assert deltas.works(2).base is None
    assert deltas.works(3).base == 2


def test_changes_to_another_version_are_refused_by_the_receiver(deltas: Scene) -> None:
    with replaced({"kit.sync.sender:Sending.all_hold_the_base": f"{__name__}:always"}):
        deltas.receivers["r1"].whole = False
        error, _ = deltas.fails(2)
    assert "the sender sent changes to version 1, but r1 has no whole version" in str(error)


def always(_: Any) -> bool:
    return True


def test_changes_need_digests_of_all_tensors_and_a_cache_that_keeps_versions(scene: Scene) -> None:
    listener, cache = scene.listener, scene.sender.cache
    for config, reason in (
        ({"verify": "none", "cache": cache}, "use it with digests of all tensors"),
        ({"share": 0.5, "cache": cache}, "use it with digests of all tensors"),
        ({"cache": Ring(service.LAYOUT)}, "a ring keeps none"),
    ):
        with pytest.raises(BadInput, match=reason):
            service.sender_of(listener, delta="word", **config)
