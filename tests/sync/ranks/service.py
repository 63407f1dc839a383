"""A sender and receivers with small made-up weights: on threads of a test, or as processes of which one is killed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kit.errors import KitError
from kit.measure import resource_counts
from kit.sync.buckets import Cut, Whole, lay_out, specs_of
from kit.sync.cache import Cache
from kit.sync.hashes import digest
from kit.sync.link import Listener, address_of
from kit.sync.receiver import Call, Receiver
from kit.sync.sender import Sender, Sending, Target
from kit.sync.transports import RankPlace
from kit.target import replaced
from tests.holdings import memory_files, wait_for

CPU = torch.device("cpu")
HERE, THERE = RankPlace("here", 0), RankPlace("there", 1)
KINDS = {  # `large` does not fit into a bucket
    "small": ((3, 5), torch.float32),
    "half": ((64, 16), torch.bfloat16),
    "eighth": ((32, 32), torch.float8_e4m3fn),
    "large": ((40, 64), torch.float32),
    "one": ((), torch.float32),
    "last": ((16, 8), torch.bfloat16),
}
Tensors = dict[tuple[str, int], torch.Tensor]


def tensors(version: int) -> Tensors:
    """The trainer's weights, different in each version."""
    made = {}
    for number, (name, (shape, dtype)) in enumerate(KINDS.items()):
        generator = torch.Generator().manual_seed(1000 * version + number)
        made[name, 0] = torch.randn(shape, generator=generator).to(dtype)
    return made


LAYOUT = lay_out(specs_of(tensors(0)), 4096, oversize="split")


def table(found: Mapping[Any, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor, "sha256") for (name, _), tensor in found.items()}


class Host:
    """The least that a receiver needs of a replica; `does` lists the calls made on it."""

    def __init__(self, version: int = 0, *, cut: bool = False) -> None:
        self.tensors = tensors(version)
        self.does: list[str] = []
        self.cut = cut

    def weights(self) -> Any:
        if not self.cut:
            return Whole(self.tensors)
        # Half of `large` is kept here, in strided memory; everything else is kept whole.
        half = self.tensors.setdefault(("wide", 0), torch.zeros(20, 128))[:, :64]
        places: dict[str, Any] = {name: [(self.tensors[name, 0], lambda full: full)] for name in KINDS}
        return Cut({**places, "large": [(half, lambda full: full[20:])]}, [*self.tensors.values()])

    def has(self, version: int) -> bool:
        """Whether all weights are those of a version."""
        wanted, mine = tensors(version), dict(self.tensors)
        if self.cut:
            wanted["large", 0] = wanted["large", 0][20:]
            mine["large", 0] = mine.pop(("wide", 0))[:, :64]
        return table(wanted) == table(mine)

    def wake(self) -> None:
        self.does.append("wake")
        self.tensors = {key: torch.full_like(tensor, float("nan")) for key, tensor in tensors(0).items()}

    def sleep(self) -> None:
        self.does.append("sleep")
        for tensor in self.tensors.values():
            tensor.untyped_storage().resize_(0)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            self.does.append("in")
            yield
            self.does.append("out")

        return inside()

    def finalize(self) -> None:
        self.does.append("finalize")

    def digests(self, algorithm: str) -> dict[str, str]:
        return {name: digest(tensor, algorithm) for (name, _), tensor in self.tensors.items()}


def sender_of(listener: Listener, **config: Any) -> Sender:
    """Return a sender; the caller closes its cache."""
    cache = config.pop("cache", None) or Cache(LAYOUT, timeout_s=10.0)
    given: dict[str, Any] = {"place": HERE, "rank": 0, "device": CPU, "timeout_s": 5.0, **config}
    return Sender(cache, listener, **given)


def receiver_of(name: str, host: Host, address: dict[str, Any], call: type[Call] = Call, **config: Any) -> Receiver:
    made = Receiver(name, host.weights, host, address=address, device=CPU, **{"timeout_s": 5.0, **config})
    made.calls, made.version, made.routed = call, 0, True
    return made


def target(name: str, place: RankPlace = HERE, state: Any = "serving", replica: str = "") -> Target:
    return Target(name=name, rank=1, place=place, state=state, replica=replica)


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """Run each act on a thread of its own, and return their results or errors."""
    gave: list[Any] = [None] * len(acts)

    def run(place: int) -> None:
        try:
            gave[place] = acts[place]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            gave[place] = error.with_traceback(None)

    threads = [threading.Thread(target=run, args=(place,), name=f"act {place}") for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return gave


def held() -> dict[str, int]:
    gc.collect()
    return {**resource_counts()._asdict(), "segments": len(memory_files())}


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Fail if more is held at the end than at the beginning. A thread that has closed its end may still be about to return."""
    before = held()

    def kept() -> dict[str, tuple[int, int]]:
        return {key: (before[key], count) for key, count in held().items() if count > before[key]}

    yield
    wait_for(lambda: not kept(), 5.0)
    assert kept() == {}


# -- processes -------------------------------------------------------------------------------------------------------------


class Dies(Call):
    """Is killed when its middle bucket has arrived."""

    def look(self, index: int, buffer: torch.Tensor) -> None:
        if index == len(self.layout.buckets) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().look(index, buffer)


class DiesLate(Call):
    """Is killed when its weights are new."""

    def finalize(self, message: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def dies(sending: Sending) -> None:
    """When all receivers have applied the version and none has published it."""
    os.kill(os.getpid(), signal.SIGKILL)


DIES: dict[str, type[Call]] = {"early": Dies, "late": DiesLate}


def process(folder: Path, meeting: str, who: str, transport: str, who_dies: str) -> None:
    """Sync version 1, then kill one process in version 2; each survivor writes its outcome."""
    gave: dict[str, Any]
    if who == "sender":
        with Listener(name=meeting) as listener:
            (folder / "listens").touch()
            sender = sender_of(listener, transport=transport, timeout_s=20.0)
            targets = [target(name) for name in ("receiver 1", "receiver 2")]
            sender.sync(1, targets, lambda: tensors(1))
            kept = sender.cache.blocks
            before, began = held(), time.monotonic()
            with replaced({"kit.sync.sender:Sending.publish": dies} if who_dies == "sender" else {}):
                error = raised(lambda: sender.sync(2, targets, lambda: tensors(2)))
            before["segments"] += sender.cache.blocks - kept
            gave = {"version": sender.version, "copies": sender.cache.copies}
    else:
        end = time.monotonic() + 30
        while not (folder / "listens").exists() and time.monotonic() < end:
            time.sleep(0.01)
        host = Host()
        receiver = receiver_of(who, host, address_of(meeting), timeout_s=20.0)
        receiver.join()
        before, began = held(), time.monotonic()
        receiver.calls = DIES.get(who_dies, Call) if who == "receiver 2" else Call
        error = raised(receiver.join)
        gave = {"version": receiver.version, "routed": receiver.routed, "old": host.has(1), "does": host.does}
    seconds = time.monotonic() - began
    about = [type(error).__name__, str(error), getattr(error, "peer", None)]
    del error  # its frames hold memory
    after = held()
    left = {key: after[key] - before[key] for key in after if after[key] > before[key]}
    (folder / f"{who}.json").write_text(json.dumps({**gave, "error": about, "seconds": seconds, "left": left}))


def raised(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except KitError as error:
        return error.with_traceback(None)
    return None


def main(arguments: Sequence[str]) -> None:
    folder, *rest = arguments
    process(Path(folder), *rest)


if __name__ == "__main__":
    main(sys.argv[1:])
