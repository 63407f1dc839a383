"""The training state, found by walking objects: modules, their parameters and buffers, gradients, and what optimizers keep.

The code that moves tensors is not asked. The walk follows attributes, items and the attributes of parameters (`main_grad`), through the
tree of modules first and else breadth first, so that a tensor gets its module's name or its shortest path. `TensorState` counts the bytes
of each kind, takes a digest of every tensor and of the plain values of optimizers and their schedules (learning rate, weight decay, steps
so far), and notes which tensors share memory. A tensor that is neither parameter, buffer, gradient nor optimizer state is of the kind
"other": scratch. Limits: a tensor that only C++ or a closure refers to is not found; above `SAMPLE` elements the largest difference is
that of a sample.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kit.measure.observers.births import attributes, is_group
from kit.measure.phase import shared_bytes, shared_spans
from kit.results.records import ZEROS

KINDS = ("weights", "grads", "optimizer", "other")
GRADIENTS = ("grad", "main_grad", "decoupled_grad")
COUNTS_OF_SCHEDULES = ("num_steps", "last_epoch")  # by Megatron's name and by torch's
OF_MODULES = ("_parameters", "_buffers", "_modules")
SAMPLE = 4096  # elements of each tensor that are kept to say how far it is off
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_LEAVES = (str, bytes, int, float, complex, type(None), *_CODE)


class Tensor(NamedTuple):
    """One tensor of the state: the shortest path to it, and its kind."""

    name: str
    kind: str
    tensor: torch.Tensor


def walk(roots: Mapping[str, Any], shared: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Every module, optimizer and tensor that the roots lead to, each once, with the shortest path to it. `shared` gets the longer paths to
    tensors, with the shortest."""
    todo = deque(roots.items())
    seen: dict[int, str] = {}
    while todo:
        path, value = todo.popleft()
        if isinstance(value, _LEAVES):
            continue
        if id(value) in seen:
            if isinstance(value, torch.Tensor):
                shared[path] = seen[id(value)]
            continue
        seen[id(value)] = path
        if not isinstance(value, torch.Tensor) and is_group(value):
            continue
        yield path, value
        below = [(f"{path}.{key}", child) for key, child in children_of(value)]
        own = sum(map(len, _named(value))) if isinstance(value, torch.nn.Module) else 0
        todo.extendleft(reversed(below[:own]))  # a parameter is called what its module calls it, however long that is
        todo.extend(below[own:])


def children_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """What an object refers to, by attribute or place."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, torch.nn.Module):  # parameters by their own names, before the dicts in which they lie
        own = [item for named in _named(value) for item in named.items()]
        return [*own, *((name, item) for name, item in vars(value).items() if name not in OF_MODULES)]
    if isinstance(value, dict):
        # What is no text or number counts by its place.
        return [(key if isinstance(key, str | int) else at, child) for at, (key, child) in enumerate(value.items())]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(enumerate(value))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    named = [(name, child) for name in slots if not name.startswith("__") for child in _slot(value, name)]
    return [*named, *attributes(value).items()]


def _slot(value: Any, name: str) -> list[Any]:
    """What is in a slot, if anything is. Its class may raise any error for a name that it does not have."""
    try:
        return [object.__getattribute__(value, name)]
    except AttributeError:
        return []


def _named(module: torch.nn.Module) -> list[dict[str, Any]]:
    """What a module knows by name, kind by kind."""
    return [getattr(module, name) for name in OF_MODULES]


def _of_tensor(value: torch.Tensor) -> list[tuple[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a gradient of a view is odd to torch
        gradient = value.grad
    return [("grad", gradient), *vars(value).items()]


class TensorState:
    """The state at the moment this is made. It keeps tensors alive: do not keep it across a release; keep `prints()`."""

    def __init__(self, **roots: Any) -> None:
        self.shared: dict[str, str] = {}  # further names of tensors, with the name under which they are listed
        tensors = list(walk(roots, self.shared))
        self._kinds = _kinds([value for _, value in tensors])
        self._settings: dict[str, Any] = {}  # plain values of optimizers and of their schedules
        for path, value in tensors:
            if isinstance(value, torch.optim.Optimizer):
                self._settings |= _settings_of(path, value)
            elif not {*COUNTS_OF_SCHEDULES}.isdisjoint(own := attributes(value)):
                self._settings |= {f"{path}.{name}": item for name, item in own.items() if _is_plain(item)}
        self.tensors = [
            Tensor(path, self._kinds.get(_storage(value), "other"), value)
            for path, value in tensors
            if isinstance(value, torch.Tensor) and value.layout == torch.strided
        ]

    def resident(self, device: str) -> list[Resident]:
        """Every storage on a type of device that has bytes, under the first name that leads to it."""
        residents: dict[tuple[str, int], Resident] = {}
        for name, kind, tensor in self.tensors:
            size = tensor.untyped_storage().nbytes()
            if tensor.device.type == device and size:
                residents.setdefault((kind, _storage(tensor)), Resident(name, kind, size))
        return list(residents.values())

    def names_by_storage(self) -> dict[int, list[str]]:
        """All names of all tensors in each storage, by its identity."""
        longer: dict[str, list[str]] = {}
        for name, shortest in self.shared.items():
            longer.setdefault(shortest, []).append(name)
        names: dict[int, list[str]] = {}
        for name, _, tensor in self.tensors:
            names.setdefault(_storage(tensor), []).extend([name, *longer.get(name, [])])
        return names

    def prints(self) -> dict[str, Print]:
        """A digest of every tensor by name. A flat buffer with other tensors in it is represented by those tensors."""
        filled = [entry for entry in self.tensors if entry.tensor.numel()]
        spans: dict[int, list[tuple[int, int, str]]] = {}
        for name, _, tensor in filled:
            start = _start(tensor)
            spans.setdefault(_storage(tensor), []).append((start, start + _extent(tensor), name))
        whole = {
            place: max(of, key=lambda span: (span[1] - span[0], -len(span[2]), span[2])) for place, of in spans.items()
        }
        params = [entry.tensor for entry in self.tensors if isinstance(entry.tensor, torch.nn.Parameter)]
        grads = [tensor for param in params for name, tensor in _of_tensor(param) if name in GRADIENTS]
        named = {id(tensor) for tensor in (*params, *grads)}  # they get a digest although others lie within them
        prints: dict[str, Print] = {}
        for name, kind, tensor in filled:
            base, _, container = whole[_storage(tensor)]
            if kind == "optimizer" or id(tensor) in named or not _has_parts(tensor, spans):
                prints[name] = _print(tensor, kind, container, _start(tensor) - base)
        return prints | {name: _print_of_value(value) for name, value in self._settings.items()}

    def samples(self) -> Samples:
        """A few values of every tensor, as they are at this moment; nothing waits for the device."""
        samples = {}
        for name, _, tensor in self.tensors:
            # While released a tensor is a view of a storage without bytes: reading it would read foreign memory.
            if tensor.numel() and tensor.untyped_storage().nbytes() >= _start(tensor) + _extent(tensor):
                samples[name] = _sample(tensor).clone()
        return samples


class Resident(NamedTuple):
    name: str
    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.size} B"


class Print(NamedTuple):
    """A tensor as it was: kind, shape, place within its memory, digest, and a sample of its values."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    part_of: str
    at: int
    digest: str
    sample: torch.Tensor


Samples = dict[str, torch.Tensor]


def late(before: Mapping[str, Print], arrived: Samples) -> list[str]:
    """The names of the tensors that had no memory, or other values than before."""
    names = []
    for name, print_ in before.items():
        if not print_.device:
            continue  # a plain value of an optimizer, of which there is no sample
        expected, came = print_.sample, arrived.get(name)
        if came is None or came.dtype != expected.dtype or tensor_digest(came) != tensor_digest(expected):
            names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor changed: gone, new, moved (no longer a view of the same memory), or with other values."""

    name: str
    kind: str
    what: str
    largest: float | None = None

    def __str__(self) -> str:
        far = "" if self.largest is None else f", largest difference {self.largest:.3g}"
        return f"{self.kind} {self.name}: {self.what}{far}"


def tensor_differences(
    before: Mapping[str, Print],
    after: Mapping[str, Print],
    *,
    zeroed: bool = False,
    shared: Mapping[str, str] | None = None,
) -> list[Difference]:
    """What changed, by name. `zeroed`: gradients, and nothing else, may be gone or come back as zeros. `shared`: further names of tensors
    that are there after."""
    changed = []
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        kind = (old or new or _NOTHING).kind
        if zeroed and kind == "grads" and _is_dropped(old, new):
            continue
        attribute, largest = _difference(old, new)
        if new is None and name in (shared or {}):
            attribute = f"is the same tensor as {(shared or {})[name]} now"
        if attribute:
            changed.append(Difference(name, kind, attribute, largest))
    return changed


def _difference(old: Print | None, new: Print | None) -> tuple[str, float | None]:
    if old is None or new is None:
        return ("did not exist before" if old is None else "is gone, or became part of another tensor"), None
    for attribute, field in (("shape", "shape"), ("type", "dtype"), ("device", "device")):
        if (was := getattr(old, field)) != (current := getattr(new, field)):
            return f"{attribute} {was} became {current}", None
    if (old.part_of, old.at) != (new.part_of, new.at):
        return f"was a part of {old.part_of} and lies in other memory now", None
    if old.digest != new.digest:
        apart = (old.sample.double() - new.sample.double()).abs().nan_to_num(nan=float("inf"))
        return (ZEROS if _is_zeros(new) else "other numbers"), float(apart.max()) if len(apart) else None
    return "", None


def _is_dropped(old: Print | None, new: Print | None) -> bool:
    """Whether a gradient is gone, or came back to its place as zeros."""
    if new is None:
        return True
    if old is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        return False
    return (old.part_of, old.at) == (new.part_of, new.at) and _is_zeros(new)


def _is_zeros(print_: Print) -> bool:
    """Whether a tensor has zeros only; a plain value of an optimizer is no tensor."""
    if not print_.device or bool(print_.sample.count_nonzero()):
        return False
    zeros = torch.zeros(print_.shape, dtype=getattr(torch, print_.dtype.removeprefix("torch.")))
    return print_.digest == tensor_digest(zeros)


def _kinds(values: list[Any]) -> dict[int, str]:
    """The kind of every storage: a parameter's or buffer's of a module is weights, whatever else lies in it."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    weights = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    every = [tensor for tensor in (*weights, *params) if tensor is not None]
    grads = [tensor for param in every for name, tensor in _of_tensor(param) if name in GRADIENTS]
    state = [tensor for optimizer in optimizers for of in optimizer.state.values() for tensor in _tensors_in(of)]
    kinds: dict[int, str] = {}
    for kind, tensors in (("weights", weights), ("grads", grads), ("optimizer", [*params, *state])):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                kinds.setdefault(_storage(tensor), kind)
    return kinds


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _has_parts(tensor: torch.Tensor, spans: Mapping[int, list[tuple[int, int, str]]]) -> bool:
    start, end = _start(tensor), _start(tensor) + _extent(tensor)
    return any(start <= a and b <= end and b - a < end - start for a, b, _ in spans[_storage(tensor)])


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _start(tensor: torch.Tensor) -> int:
    """The byte of its storage at which a tensor begins."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last; it has elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _print(tensor: torch.Tensor, kind: str, part_of: str, at: int) -> Print:
    sample = _sample(tensor).to("cpu", copy=True)
    return Print(
        kind, tuple(tensor.shape), str(tensor.dtype), str(tensor.device), part_of, at, tensor_digest(tensor), sample
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLE)]


def _settings_of(path: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The plain values of an optimizer by name: those of its groups, and of its state beside tensors."""
    settings = {}
    for kind, tables in (("param_groups", optimizer.param_groups), ("state", optimizer.state.values())):
        for place, table in enumerate(tables):
            for key, item in table.items():
                if _is_plain(item):
                    settings[f"{path}.{kind}.{place}.{key}"] = item
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _print_of_value(value: Any) -> Print:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    kind = "number" if is_number else type(value).__name__  # 1 is 1.0
    shown = repr(float(value) if is_number else value)
    sample = torch.tensor([float(value)] if is_number else [], dtype=torch.float64)
    return Print("optimizer", (), kind, "", "", 0, hashlib.sha256(shown.encode()).hexdigest(), sample)


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in the order of its elements."""
    flat = tensor.detach().cpu().contiguous()
    # Not through numpy(): that marks the storage as never to be resized again.
    raw = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
    return hashlib.sha256(raw).hexdigest()


_NOTHING = Print("other", (), "", "", "", 0, "", torch.empty(0))


def live_bytes() -> int:
    """Bytes of every tensor that Python refers to anywhere, on any device, each storage once. It walks all objects: some 30 ms."""
    storages = (tensor.untyped_storage() for tensor in live_tensors())
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def held_bytes() -> int:
    """Bytes of every tensor on any device, and of the pages of shared memory that this process has touched or holds by a descriptor alone.
    Tensors in shared memory count as that."""
    spans = shared_spans()
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in live_tensors())}
    private = (
        storage.nbytes()
        for storage in storages.values()
        if not any(start <= storage.data_ptr() < end for start, end in spans)
    )
    return sum(private) + shared_bytes()


def live_graphs() -> int:
    """The number of tensors with a graph behind them, which keeps what its backward pass would need."""
    return sum(tensor.grad_fn is not None for tensor in live_tensors())


def live_tensors() -> Iterator[torch.Tensor]:
    for value in gc.get_objects():
        kind = type(value)  # `isinstance` would ask proxies for their class, which may import or raise
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            yield value


def generators() -> dict[str, str]:
    """A digest of each random generator: Python's, numpy's, torch's, and each CUDA device's. Nothing is drawn."""
    state = {"python": _digest_of(random.getstate()), "torch": tensor_digest(torch.default_generator.get_state())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _digest_of(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number, generator in enumerate(torch.cuda.default_generators):
            state[f"cuda:{number}"] = tensor_digest(generator.get_state())
    return state


def _digest_of(state: Any) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()
