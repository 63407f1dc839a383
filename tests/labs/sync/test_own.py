"""A user's transport goes through the same phases and checks; a wrong one is caught, and an error that it raises is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kit
from kit.labs.sync import rules
from tests.holdings import nothing_added

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"ranks": 3, "cycles": 2, "layers": 2, "sweep": False, "replicas": 2, "tp": 1}
OWN = '''
import os
import mmap
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d as c10d
from kit.sync.transports import Transport
from own_receiver import ByNameWithAPackedHead
from own_transport import Files


class AsksAtOnce:
    """Asks for the kit's own load before the model serves."""
    def __init__(self, ctx):
        self.load = ctx.loader()


class OneBuffer(Transport):
    """What the notebook tries: right for those who apply at once, wrong for those who store."""
    def __init__(self, ctx):
        super().__init__(ctx)
        if ctx.role == "sender":
            fd = os.memfd_create("one-buffer")
            os.ftruncate(fd, max(ctx.sizes))
            for link in ctx.links.values():
                link.send({"kind": "buffer"}, [fd])
        else:
            _, (fd,) = ctx.sender.expect("buffer")
        self.buffer = torch.frombuffer(mmap.mmap(fd, max(ctx.sizes)), dtype=torch.uint8)
        os.close(fd)

    def send(self, index, buffer):
        self.wait_for(index - 1)
        self.buffer[: len(buffer)] = buffer
        for link in self.ctx.links.values():
            link.send({"kind": "bucket"})

    def receive(self, index, into):
        self.ctx.sender.expect("bucket")
        return self.buffer[: self.ctx.sizes[index]]

    def close(self):
        self.buffer = None


class Group:
    """A process group for each sync, over a store of its own, as NeMo-RL and slime make it: no base class, no acknowledgements. A rank that
    leaves breaks the group for all others."""
    def __init__(self, ctx):
        self.buckets = len(ctx.sizes)
        wait = timedelta(seconds=ctx.timeout_s)
        if ctx.role == "sender":
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
            place, size, port = 0, 1 + len(ctx.links), self.store.port
            for number, link in enumerate(ctx.links.values(), start=1):
                link.send({"kind": "meet", "port": port, "size": size, "place": number})
        else:
            message, _ = ctx.sender.expect("meet")
            place, size, port = message["place"], message["size"], message["port"]
            self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
        store, name = PrefixStore("weights", self.store), f"weights-{port}"
        self.group, _ = c10d._new_process_group_helper(size, place, [], "gloo", store, name, timeout=wait)
        c10d._world.pg_group_ranks[self.group] = {rank: rank for rank in range(size)}

    def send(self, index, buffer):
        dist.broadcast(buffer, group=self.group, group_src=0)

    def receive(self, index, into):
        self.send(index, into)
        return into

    def flush(self):
        dist.barrier(group=self.group)

    def done(self, index):
        if index == self.buckets - 1:
            self.flush()

    def close(self):
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = self.store = None


class PacksUnnamed(ByNameWithAPackedHead):
    """Keeps its packed copy on the model, which no list declares."""
    @property
    def packed(self):
        return self.model.packed

    @packed.setter
    def packed(self, value):
        self.model.packed = value


class Packs(PacksUnnamed):
    derived = ["packed"]


class FirstTokens(Packs):
    """Like a captured graph with an input buffer that is not filled again."""
    tokens = None

    def forward(self, tokens):
        self.tokens = tokens if self.tokens is None else self.tokens
        return super().forward(self.tokens)


class SameMemory(Packs):
    """Like a captured graph, whose logits are always in the same memory."""
    logits = None

    def forward(self, tokens):
        logits = super().forward(tokens)
        if self.logits is None:
            self.logits = torch.empty_like(logits)
        return self.logits.copy_(logits)


class LoadsNothing:
    def __init__(self, ctx):
        self.size = ctx.world_size


class Raises(Files):
    def receive(self, index, into):
        if index == 1:
            raise LookupError("my own receive failed")
        return super().receive(index, into)
'''


@pytest.fixture(scope="module", autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in a folder of the module, where ranks can import `mine` and the docs' example; nothing may be left behind."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(OWN)
    for example in ("own_receiver.py", "own_transport.py"):
        (folder / example).write_text((ROOT / "docs" / "examples" / example).read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        with nothing_added():
            yield


def run(transport: str, **config: object) -> kit.Run:
    return kit.run("sync", device="cpu", transport=transport, **{**SMALL, **config})


@pytest.mark.slow
def test_the_documentations_transport_passes() -> None:
    finished = run("own_transport:Files")
    assert not finished.verdict().failed
    assert {"bit_exact", "failure_is_clean"} <= {row.check for row in finished.verdict() if row.passed}
    assert set(rules.syncs(finished.frame())["transport"]) == {"own_transport:Files to 1"}


@pytest.mark.slow
def test_a_buffer_that_is_used_again_is_found_out_where_buckets_are_stored() -> None:
    finished = run("mine:OneBuffer", verify="none")
    assert "bit_exact" in {row.check for row in finished.verdict().failed}
    wrong = rules.receiver_digests(finished.frame()).groupby("rank")["differ"].min() > 0
    assert wrong.to_dict() == {1: False, 2: True}  # a waking replica applies at once, a serving one stores


@pytest.mark.slow
def test_a_process_group_for_each_sync_passes() -> None:
    """Two receivers serve, so the failure of one breaks the group for the other as well."""
    two = {"placement": "apart", "ranks": 4, "tp": 2}
    finished = run("mine:Group", **two)
    assert not finished.verdict().failed
    assert "failure_is_clean" in {row.check for row in finished.verdict() if row.passed}


@pytest.mark.slow
def test_one_that_raises_ends_the_run_and_its_error_is_reported() -> None:
    with pytest.raises(kit.RankError, match="my own receive failed") as caught:
        run("mine:Raises")
    assert caught.value.phase == "refresh"
    assert "mine.py" in str(caught.value)


@pytest.mark.slow
def test_a_packed_copy_on_the_model_is_no_constant_if_it_is_declared() -> None:
    assert not run("auto", receiver="mine:Packs", cycles=1).verdict().failed
    (row,) = run("auto", receiver="mine:PacksUnnamed", cycles=1).verdict().failed
    assert row.check == "every_parameter_written"
    assert "packed" in row.why
    assert row.why.endswith("tensors that `finalize` derives must be in your receiver's list `derived`")


@pytest.mark.slow
def test_the_answer_to_another_request_shows() -> None:
    (row,) = run("auto", receiver="mine:FirstTokens", cycles=1).verdict().failed
    assert row.check == "logits_equal"


@pytest.mark.slow
def test_logits_that_are_always_in_the_same_memory_pass() -> None:
    assert not run("auto", receiver="mine:SameMemory", cycles=1).verdict().failed


@pytest.mark.slow
def test_the_kits_own_load_may_be_asked_for_at_once() -> None:
    assert not run("auto", receiver="mine:AsksAtOnce", cycles=1).verdict().failed


@pytest.mark.slow
def test_a_receiving_side_that_cannot_load_is_refused() -> None:
    with pytest.raises(kit.RankError, match=r"mine:LoadsNothing.*has no load\(name, tensor\)") as caught:
        run("auto", receiver="mine:LoadsNothing")
    assert caught.value.phase == "prepare"


def test_the_documentation_names_the_example() -> None:
    page = (ROOT / "docs" / "own-code.md").read_text()
    assert "[examples/own_transport.py](examples/own_transport.py)" in page
    assert "kit run sync --set transport=own_transport:Files" in page


def test_the_documentation_names_every_check() -> None:
    page = (ROOT / "docs" / "sync.md").read_text()
    assert [rule.name for rule in rules.RULES if f"\n| `{rule.name}` |" not in page] == []
