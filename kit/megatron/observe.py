"""Megatron's groups as an observer sees them: what stands in `parallel_state`, who holds it, over which ranks it talks.

Nothing of `kit.megatron.groups` is asked, since that is code under test, and neither is torch's registry of names: a wrapper that is in no
table stands for its group here as a plain group does. A group is followed by what a collective over it would reach, and its ranks are
those that answer an all-gather.
"""

from __future__ import annotations

import datetime as dt
import functools
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from kit.measure.observers import births, tensors
from kit.measure.observers.births import is_group
from kit.measure.observers.tensors import children_of

PATIENCE = dt.timedelta(seconds=10)  # for one collective over a group
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_LEAVES = (torch.Tensor, str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType)
WORLD = "WORLD"


def megatron_state() -> Any:
    from megatron.core import parallel_state as module

    return module


def globals_now() -> dict[str, Any]:
    """The module's private names that hold data."""
    return {
        name: value
        for name, value in vars(megatron_state()).items()
        if name.startswith("_") and not name.startswith("__") and not isinstance(value, _CODE)
    }


def standing() -> dict[str, Any]:
    """What stands for a group in Megatron's globals, by name and place, in the order of the module; WORLD is no part of it."""
    default = dist.group.WORLD
    groups = {}
    for name, value in globals_now().items():
        groups.update({path: group for path, group in _groups_in(name, value) if group is not default})
    return groups


def _groups_in(path: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, _LEAVES) and is_group(value):
        return [(path, value)]
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return []
    return [nested for key, item in items for nested in _groups_in(f"{path}[{key}]", item)]


@dataclass(slots=True)
class Seen:
    """Megatron's groups at one moment. References to groups are weak or by identity: this keeps none alive.

    `ranks` are those that answered, by name; `options` what each group says of itself, and `others` what groups say that no name leads
    to; `plain` other values among the globals, as text; `holders` the name of the group that each place leads to; `wrong` what did not
    work, in words.
    """

    ranks: dict[str, list[int]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    holders: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def look(made: list[Any], **roots: Any) -> Seen:
    """Everything but `ranks`, which takes collectives: see `talk`. `made` are the groups that are known by their births."""
    plain = (int, float, str, list, tuple, type(None))
    now = globals_now()
    seen = Seen(plain={k: repr(v) for k, v in now.items() if isinstance(v, plain) and not _groups_in(k, v)})
    reached: dict[int, str] = {}
    keep = []  # identities are good only while their objects live
    with births.doors():
        for name, group in {WORLD: dist.group.WORLD, **standing()}.items():
            try:
                real = births.reach(group)
            except Exception as error:  # noqa: BLE001 - whatever it raises: this name leads to no group that works
                seen.wrong.append(f"{name}: {first_line(error)}")
                continue
            keep.append(real)
            reached.setdefault(id(real), name)
            seen.options[name] = births.group_facts(real)
        seen.others = sorted(str(births.group_facts(group)) for group in made if id(group) not in reached)
        for path, group in holders(**roots):
            seen.holders[path] = _leads_to(group, reached, keep)
    return seen


def _leads_to(group: Any, reached: dict[int, str], keep: list[Any]) -> str:
    """The name under which Megatron knows what a holder's group reaches, or what is wrong with it."""
    try:
        real = births.reach(group)
    except Exception as error:  # noqa: BLE001 - as above
        return f"nothing: {first_line(error)}"
    keep.append(real)
    if id(real) in reached:
        return reached[id(real)]
    listed = any(listed_group is real or listed_group is group for listed_group in births.registered_groups())
    about = births.group_facts(real)["description"]
    return f"{about} (outside of Megatron's globals)" if listed else f"{about} (not registered with torch)"


def holders(**roots: Any) -> list[tuple[str, Any]]:
    """Every place that the roots lead to and that holds what stands for a group."""
    places = []
    todo = deque(roots.items())  # breadth first: the shortest way is the name
    seen: set[int] = set()
    while todo:
        path, value = todo.popleft()
        if isinstance(value, _LEAVES):
            continue
        if is_group(value):
            places.append((path, value))
        elif id(value) not in seen:
            seen.add(id(value))
            todo += [(f"{path}.{key}", child) for key, child in _parts(value)]
    return sorted(places, key=lambda place: place[0])


def _parts(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return [(f"closure{i}", cell.cell_contents) for i, cell in enumerate(cells) if cell != types.CellType()]
    return children_of(value)


def talk_by_name() -> tuple[dict[str, list[int]], list[str]]:
    """All-gather of ranks and a sum over each of Megatron's groups, and over WORLD: who answered by name, and what went wrong.

    Every rank goes through the names in the order of the module, so that two ranks meet at each group that they share. After a first
    failure the rest is not tried: each would wait for its deadline.
    """
    answered: dict[str, list[int]] = {}
    wrong: list[str] = []
    for name, group in {WORLD: dist.group.WORLD, **standing()}.items():
        try:
            first, *others = [_gather(group, device) for device in _devices(group)]
            answered[name] = first
            text = wrong_sum(group, first) if all(ranks == first for ranks in others) else f"ranks {first} and {others}"
        except Exception as error:  # noqa: BLE001 - as above
            wrong.append(f"{name}: {first_line(error)}")
            break
        wrong += [f"{name}: {text}"] if text else []
    return answered, wrong


def wrong_sum(group: Any, ranks: Sequence[int]) -> str:
    """What is wrong with a sum over a group of these ranks, by any of its backends; empty if nothing is."""
    expected = sum((rank + 1) ** 2 for rank in ranks)
    totals = {device: _sum_of_squares(group, device) for device in _devices(group)}
    wrong = [f"{total:g} on {device}" for device, total in totals.items() if total != expected]
    return f"a sum over ranks {[*ranks]} is {', '.join(wrong)}, not {expected}" if wrong else ""


def _gather(group: Any, device: str) -> list[int]:
    own_rank = torch.tensor([dist.get_rank()], dtype=torch.int64, device=device)
    out = [torch.full_like(own_rank, -1) for _ in range(dist.get_world_size(group))]
    _wait(dist.all_gather(out, own_rank, group=group, async_op=True))
    return [int(rank.item()) for rank in out]


def _sum_of_squares(group: Any, device: str) -> float:
    value = torch.tensor([(dist.get_rank() + 1) ** 2], dtype=torch.float64, device=device)
    _wait(dist.all_reduce(value, group=group, async_op=True))
    return float(value.item())


def _wait(work: Any) -> None:
    if work is not None:
        work.wait(PATIENCE)


def _devices(group: Any) -> list[str]:
    """The kinds of device that a group serves here, each by its own backend: `cpu:gloo,cuda:nccl` has two."""
    served = {str(torch.device(device).type) for device in group._device_types}
    return [kind for kind in ("cpu", "cuda") if kind in served and (kind == "cpu" or torch.cuda.is_available())]


def moved_names(before: Seen, after: Seen) -> list[str]:
    """Names that stand for other ranks, or for the same in another order, and plain globals of another value."""
    names = before.ranks | after.ranks
    changes = [f"{name}: ranks {change}" for name, change in _became(before.ranks, after.ranks)]
    return changes + [f"{name}: {change}" for name, change in _became(before.plain, after.plain) if name not in names]


def _became(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            yield name, f"{old.get(name)} became {new.get(name)}"


def changed(before: Seen, after: Seen) -> list[str]:
    """Groups that say something else of themselves than before: timeout, backend, options, description."""
    named = [
        f"{name}: {'; '.join(_apart(old, after.options[name]))}"
        for name, old in before.options.items()
        if name in after.options and after.options[name] != old
    ]
    lost = Counter(before.others) - Counter(after.others)
    return named + [f"a group that no name leads to came back otherwise: {change}" for change in lost.elements()]


def _apart(old: dict[str, Any], new: dict[str, Any], within: str = "") -> Iterator[str]:
    """Each value that differs, however deep it lies."""
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _apart(was, now, f"{within}{key} ")
        elif was != now:
            yield f"{within}{key} {was!r} became {now!r}"


def stale_names(before: Seen, after: Seen) -> list[str]:
    """Names of Megatron's, and places, that lead to another group than before, or to none that works."""
    names = [f"{name} leads to no group that works" for name in before.options if name not in after.options]
    return names + [
        f"{path} led to {group} and leads to {after.holders[path]}"
        for path, group in before.holders.items()
        if after.holders.get(path, group) != group
    ]


@dataclass(frozen=True, slots=True)
class Old:
    """Something that stood for a group before a release, weakly."""

    name: str
    description: str
    group: Any


def remember() -> list[Old]:
    """What stands for Megatron's groups now, to be tried while they are released."""
    old_groups: list[Old] = []
    with births.doors():
        for name, group in standing().items():
            if all(group is not old.group() for old in old_groups):
                old_groups.append(Old(name, str(births.reach(group).group_desc), weakref.ref(group)))
    return old_groups


def usable(old: list[Old], *, but_gloo: bool) -> list[str]:
    """Old groups over which a collective would still run, or that raise an error which does not name them. Nothing is sent.
    `but_gloo`: leave out groups without NCCL, which stay in use where NCCL's are suspended."""
    alive = []
    with births.doors():
        for old_group in old:
            group = old_group.group()
            if group is None:
                continue  # nobody can use what is gone
            try:
                real = births.reach(group)
            except Exception as error:  # noqa: BLE001 - whatever it raises, the question is whether the group is named
                # By its description or Megatron's name: torch's name is a bare number, which any message may hold.
                words = (old_group.description, old_group.name.lstrip("_"))
                if not any(word in str(link) for link in births.chain(error) for word in words):
                    alive.append(
                        f"{old_group.name}: the error contains none of {', '.join(words)}: {first_line(error)}"
                    )
                continue
            backends = [backend["backend"] for backend in births.group_facts(real)["backends"].values()]
            if not but_gloo or any("Gloo" not in name for name in backends):
                alive.append(f"{old_group.name}: a collective would run over {real.group_desc}")
    return alive


def model_parallel_exists() -> bool:
    return bool(megatron_state().model_parallel_is_initialized()) if dist.is_initialized() else False


def stage() -> int:
    return int(megatron_state().get_pipeline_model_parallel_rank())


def random_state() -> dict[str, str]:
    """The generators of this process, and the states that Megatron's tracker keeps."""
    from megatron.core.tensor_parallel import random

    tracker = random._CUDA_RNG_STATE_TRACKER
    states = tracker.get_states() if tracker is not None and hasattr(tracker, "get_states") else {}
    tracked = {
        f"tracker {name}": tensors.tensor_digest(tensor)
        for name, tensor in states.items()
        if isinstance(tensor, torch.Tensor)
    }
    return {**tensors.generators(), **tracked}


def draw_from_tracker(device: torch.device) -> None:
    from megatron.core.tensor_parallel import random

    tracker = random._CUDA_RNG_STATE_TRACKER
    for name in tracker.get_states() if tracker is not None else ():
        with tracker.fork(name):
            torch.rand(1, device=device)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
