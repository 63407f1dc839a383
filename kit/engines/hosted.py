"""What a replica needs from the model that it serves with, and the models that have it.

`HostedModel` is the protocol. `MegatronModel` is the kit's own, whose ranks cut their shards out of full tensors. `LoadedModel` is
every other: an engine that takes whole tensors by name, on one rank. `OwnSide` puts a user's receiving side in front of the kit's model.

Limits: the undo of a `LoadedModel` loads a copy of the tensors that it held before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from kit.engines.contents import Holder, ModuleTensors, Named, is_declared, poison_of
from kit.errors import BadInput
from kit.measure.observers.tensors import TensorState
from kit.megatron import serve, shards
from kit.megatron.config import Geometry, ModelConfig
from kit.sync.adopting import let_go
from kit.sync.buckets import Cut, Destination

Destinations = Mapping[str, Sequence[Destination]]
Storage = tuple[int, int]  # identity and size
ENGINES = {
    "transformers": "kit.engines.hugging:TransformersModel",
    "vllm": "kit.engines.vllm:VllmModel",
}


class HostedModel(Holder, Protocol):
    """A model on a rank of a replica. Names are those of the trainer's full tensors, in Hugging Face's spelling.

    `full_tensors` gives every tensor as the model holds it, all of them on the replica's first rank. `destinations` says where each goes,
    `weights` fills them. `finalize` follows the last tensor of a version, and the old ones after a failure. `counterparts` are the names
    here of a tensor that the trainer's module has under `name`. `resident` are weights that still have bytes, `bytes_elsewhere` those of
    tensors in other processes."""

    @property
    def asleep(self) -> bool: ...
    def full_tensors(self) -> Named: ...
    def destinations(self) -> Destinations: ...
    def weights(self, destinations: Destinations) -> Cut: ...
    def finalize(self) -> None: ...
    def logits(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def cached_logits(self, tokens: torch.Tensor) -> torch.Tensor | None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def counterparts(self, name: str) -> tuple[str, ...]: ...
    def resident(self) -> list[str]: ...
    def bytes_elsewhere(self) -> int: ...


class MegatronModel(ModuleTensors):
    """The kit's model. Its calls are made inside `as_world` of the replica's group."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = serve.ServingModel(config)
        super().__init__(self.model.chunks)

    @property
    def asleep(self) -> bool:
        return self.model.asleep

    def full_tensors(self) -> Named:
        return shards.full_tensors(self.chunks)

    def destinations(self) -> Destinations:
        return shards.destinations(self.chunks)

    def parameters(self) -> list[torch.Tensor]:
        scales = [scale for _, scale in shards.named_scales(self.chunks[0])]
        return [*self.chunks[0].parameters(), *scales]

    def weights(self, destinations: Destinations) -> Cut:
        return Cut(destinations, self.parameters())

    def finalize(self) -> None:
        """Nothing is derived from these weights."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.logits(tokens)

    def cached_logits(self, tokens: torch.Tensor) -> None:  # noqa: ARG002 - no forward keeps anything for the next one
        return None

    def sleep(self) -> None:
        let_go(self.parameters())
        self.model.sleep()

    def wake(self) -> None:
        self.model.wake()
        self.poison()

    def counterparts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def resident(self) -> list[str]:
        resident = TensorState(chunks=self.chunks).resident(self.model.device.type)
        return [str(item) for item in resident if item.kind == "weights"]

    def bytes_elsewhere(self) -> int:
        return 0


class OwnSide(MegatronModel):
    """The kit's model with a user's receiving side, an object with `load` and perhaps `finalize`, `abandon`, `forward`, `sleep` and `wake`,
    and with lists of the tensors in the model that it has `derived`, and of `frozen` ones, which no version brings."""

    def receive_by(self, own: Any, target: str) -> None:
        if not hasattr(own, "load"):
            raise BadInput(f"receiver={target}: the object it returned has no load(name, tensor)")
        self.own = own
        self.derived, self.frozen = (tuple(getattr(own, names, ())) for names in ("derived", "frozen"))

    def versioned(self) -> Named:
        yield from (named for named in super().versioned() if not is_declared(named[0], self.frozen))

    def constants(self) -> Named:
        yield from (named for named in super().constants() if not is_declared(named[0], self.derived))
        yield from (named for named in super().versioned() if is_declared(named[0], self.frozen))

    def weights(self, destinations: Destinations) -> Cut:
        # Your code works on parameters, which may not be written in place where gradients are recorded.
        return Cut(destinations, self.parameters(), torch.no_grad()(self.own.load))

    def finalize(self) -> None:
        call_if_there(self.own, "finalize")

    def abandon(self) -> None:
        call_if_there(self.own, "abandon")

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        forward: Callable[[torch.Tensor], torch.Tensor] = getattr(self.own, "forward", super().logits)
        return forward(tokens)

    def sleep(self) -> None:
        call_if_there(self.own, "sleep")
        super().sleep()

    def wake(self) -> None:
        super().wake()
        call_if_there(self.own, "wake")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineContext:
    """`ctx` for an engine: the model to serve, and its base weights by name, which are yours to read while `attr(ctx)` runs."""

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    weights: Mapping[str, torch.Tensor]
    timeout_s: float
    python: str  # the interpreter of an engine that has its own
    config: Any
    writes: bool = False  # whether the engine also writes answers


class LoadedModel:
    """An engine that takes whole tensors: an object with `full_tensors()`, `load(name, tensor)` and `logits(tokens)`.

    It may have `constants()`, `begin()`, `finalize()`, `abandon()`, `sleep()` and `wake()`. `begin` comes before the first tensor of a
    version, `abandon` after one that failed. `cached_logits` may use what the engine keeps of earlier requests. `live_bytes()` are those
    of its tensors in other processes, `resident()` the names of weights with memory there."""

    def __init__(self, engine: Any, target: str, device: torch.device) -> None:
        if lacking := [call for call in ("full_tensors", "load", "logits") if not hasattr(engine, call)]:
            raise BadInput(
                f"serve={target}: the object it returned has no {lacking[0]}; it needs full_tensors, load and logits"
            )
        self.engine = engine
        self.device = device
        self.asleep = False
        self.shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        shown: set[Storage] = set()
        for name, tensor in self.full_tensors():  # once: an engine may convert or send its weights for it
            self.shapes[name] = tensor.dtype, tensor.shape
            shown.add(storage_of(tensor))
        # Where the weights lie at first. Tensors that the engine makes only to show them are not its own.
        self.homes = shown.intersection(storage_of(tensor) for _, tensor in self.tensors())

    def full_tensors(self) -> Named:
        yield from self.engine.full_tensors()

    def versioned(self) -> Named:
        return self.full_tensors()

    def constants(self) -> Named:
        yield from self.engine.constants() if hasattr(self.engine, "constants") else ()

    def poison(self) -> None:
        self.begin()
        for name, (dtype, shape) in self.shapes.items():
            self.load(name, torch.full(shape, poison_of(dtype), dtype=dtype))
        self.finalize()

    def destinations(self) -> Destinations:
        """Places with the right dtype and shape and without memory: they are compared with what comes, and nothing is written to them."""
        places = {name: torch.empty(1, dtype=dtype).expand(shape) for name, (dtype, shape) in self.shapes.items()}
        return {name: [(place, lambda full: full)] for name, place in places.items()}

    def weights(self, destinations: Destinations) -> Cut:
        return LoadedWeights(destinations, self)

    def begin(self) -> None:
        call_if_there(self.engine, "begin")

    @torch.no_grad()
    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.engine.load(name, tensor)

    def finalize(self) -> None:
        call_if_there(self.engine, "finalize")

    def abandon(self) -> None:
        """A version failed: an engine with an open update must end it, or it cannot serve."""
        call_if_there(self.engine, "abandon")

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.engine.logits(tokens)
        return logits

    def cached_logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return self.engine.cached_logits(tokens) if hasattr(self.engine, "cached_logits") else None

    def sleep(self) -> None:
        call_if_there(self.engine, "sleep")
        self.asleep = True

    def wake(self) -> None:
        call_if_there(self.engine, "wake")
        self.asleep = False
        self.poison()

    def counterparts(self, name: str) -> tuple[str, ...]:
        return shards.made_of(name)[1]

    def resident(self) -> list[str]:
        """Tensors in the engine with bytes on the device and the size of a weight, whatever its layout is, or where weights lay when it was
        made; and what an engine reports of tensors in another process."""
        elsewhere = self.engine.resident() if hasattr(self.engine, "resident") else ()
        wanted = {(dtype, shape.numel()) for dtype, shape in self.shapes.values()}
        kept = {storage_of(tensor) for _, tensor in self.constants()}
        here = [
            f"{name}: {tensor.untyped_storage().nbytes()} B"
            for name, tensor in self.tensors()
            if ((tensor.dtype, tensor.numel()) in wanted or storage_of(tensor) in self.homes)
            and tensor.device.type == self.device.type
            and tensor.untyped_storage().nbytes()
            and storage_of(tensor) not in kept
        ]
        return [*here, *elsewhere]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that the engine refers to, by their path in it."""
        return ((path, tensor) for path, _, tensor in TensorState(engine=self.engine).tensors)

    def bytes_elsewhere(self) -> int:
        return int(self.engine.live_bytes()) if hasattr(self.engine, "live_bytes") else 0


class LoadedWeights(Cut):
    """The weights of a `LoadedModel`. What it held is put back by loading it."""

    def __init__(self, destinations: Destinations, model: LoadedModel) -> None:
        super().__init__(destinations, [], self.load_next)
        self.model = model
        self.begun = False

    def load_next(self, name: str, tensor: torch.Tensor) -> None:
        if not self.begun:
            self.model.begin()
            self.begun = True
        self.model.load(name, tensor)

    def keep(self) -> Callable[[], None]:
        before: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.full_tensors():
            before.setdefault(name, tensor.detach().clone())

        def put_back() -> None:
            self.model.begin()
            for name, tensor in before.items():
                self.model.load(name, tensor)

        return put_back


def storage_of(tensor: torch.Tensor) -> Storage:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def call_if_there(owner: Any, method: str) -> None:
    getattr(owner, method, lambda: None)()
