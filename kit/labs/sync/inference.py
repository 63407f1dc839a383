"""A replica's ranks in the sync lab: they serve, sleep, and receive. Each rank cuts its own shards out of what comes."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs import outcome
from kit.labs.sync import broken, rehearse, sweep
from kit.labs.sync.config import replica_model
from kit.labs.sync.side import Side, fill, name_of
from kit.labs.sync.trainer import PROOF
from kit.megatron import model, serve, shards, standin
from kit.sync.hashes import digest
from kit.sync.link import call
from kit.sync.receiver import SENDER, Receiver
from kit.sync.serving import Serving
from kit.sync.transports.serialize import memory
from kit.sync.weights import Cut

if TYPE_CHECKING:
    from kit.labs.rankside import Context
    from kit.sync.receiver import Received


class Inference(Side):
    """One rank of a replica; it is its receiver's host, too."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        place = ctx.rank - self.config.trainer_ranks
        self.sleeper = self.config.sleeps(place // self.config.infer_tp)
        self.sweeps = ctx.rank == self.config.ranks - 1
        self.finalized = 0
        self.replica: serve.Replica
        self.receiver: Receiver
        self.serving: Serving

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """A replica with the base weights."""
        self.enter()
        config = replica_model(self.config)
        with self.as_job():
            self.replica = serve.Replica(config)
            fill(self.replica.chunks, config.geometry, model.DTYPES[config.dtype], self.config.seed)
        tokens = self.prompt(config.geometry.vocab)
        wait = self.config.deadline_s

        def forward() -> torch.Tensor:
            if self.ctx.device.type == "cuda":
                torch.cuda.set_device(self.ctx.device)  # every thread begins with the first card
            with standin.on_this_thread():
                return self.replica.logits(tokens)

        self.serving = Serving(forward, group=self.group, timeout_s=wait)
        self.receiver = Receiver(
            name_of(self.ctx.rank), self.weights, self, address=self.address, device=self.ctx.device, timeout_s=wait
        )
        self.receiver.calls = broken.call_of(self.ctx.fault, last=self.sweeps)
        self.count()

    def base(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.told(self.receiver.join())
        if self.sleeper:
            self.leave()
        self.count()

    def train(self, cycle: int) -> None:
        """The trainer's."""

    def refresh(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """While weights arrive forwards go on, one after the other; each must have been made by one version."""
        if not self.sleeper:
            with self.hammered():
                self.told(self.receiver.join())
        self.count()

    def offload(self, cycle: int) -> None:
        """The trainer's."""

    def expand(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.sleeper:
            self.told(self.receiver.join())
        self.count()

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """What this replica has against what the trainer had: a digest of every tensor, and logits."""
        with call(self.address, name_of(self.ctx.rank), peer=SENDER, timeout_s=self.config.deadline_s) as link:
            truth, _ = link.expect("truth")
            wanted = torch.empty(truth["shape"], dtype=torch.float32)
            link.receive_bytes(memory(wanted.view(-1).view(torch.uint8)))
            own = self.digests(PROOF)
            differing = sorted(
                name for name in {*own, *truth["digests"]} if own.get(name) != truth["digests"].get(name)
            )
            logits = self.replica.logits(self.prompt(wanted.shape[1])).cpu()
            apart = (logits.double() - wanted.double()).abs().max() / wanted.double().abs().max()
            link.send({"kind": "judged"})
        for name in differing[:5]:
            print(f"differs from the trainer's: {name}")
        record = self.ctx.record
        record("tensors_hashed", len(own))
        record("digest", outcome.digest(own))
        record("tensors_differ", len(differing))
        record("logits_error", float(apart) if math.isfinite(float(apart)) else math.inf)
        record("logits_same", int(torch.equal(logits, wanted)))
        self.tell_state()
        self.count()

    def shrink(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.sleeper:
            self.leave()
        self.count()

    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.sweeps:
            sweep.receive(self)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        rehearse.inference(self)
        self.count()

    def end(self, cycle: int) -> None:
        del self.replica
        super().end(cycle)

    # -- the receiver's host -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self.replica.wake()

    def sleep(self) -> None:
        self.replica.sleep()

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return self.serving.writing()

    def finalize(self) -> None:
        """Nothing is derived from these weights; it is counted that it was asked for."""
        self.finalized += 1

    def digests(self, algorithm: str) -> dict[str, str]:
        """Of every full tensor of the replica, on each of its ranks. Collective over the replica."""
        with self.as_job():
            own = {name: digest(tensor, algorithm) for name, tensor in shards.full_tensors(self.replica.chunks)}
            said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(said, own)
        table: dict[str, str] = said[0]
        return table

    def weights(self) -> Cut:
        with self.as_job():
            places = shards.destinations(self.replica.chunks)
        return Cut(broken.places_of(self.ctx.fault, places), [p.data for p in self.replica.chunks[0].parameters()])

    # -- how -----------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Make room for the trainer."""
        self.receiver.routed = False
        self.replica.sleep()

    @contextlib.contextmanager
    def hammered(self) -> Any:
        """Serve through all of it, and count forwards whose output belongs to neither the old nor the new weights."""
        if self.config.refresh == "paused":
            yield
            return
        self.serving.start()
        try:
            old = self.serving.next()
            yield
            new = self.serving.next()
        except BaseException:
            with contextlib.suppress(KitError):  # what went wrong first is what is told
                self.serving.stop()
            raise
        self.serving.stop()
        made = self.serving.served
        first = made.index(new)
        self.ctx.record("served", len(made))
        self.ctx.record("versions_differ", int(old != new))
        self.ctx.record("torn", sum(one not in (old, new) for one in made) + made[first:].count(old) * int(old != new))

    def told(self, received: Received) -> None:
        self.tell(received.log, received.began)
        self.ctx.record("wall", received.log.events[-1][1] - received.began, "s")
        self.ctx.record("finalized", received.finalized)
        self.tell_state()

    def tell_state(self) -> None:
        self.ctx.record("version", self.receiver.version)
        self.ctx.record("routed", int(self.receiver.routed))
