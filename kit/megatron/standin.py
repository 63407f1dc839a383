"""A stand-in that makes Megatron's "cuda" mean the CPU on a box without a GPU, so that the real megatron-core runs there.

Megatron names the device "cuda" in hundreds of places. `install()` pushes a torch-function mode that rewrites that name
wherever torch is called, and replaces the handful of `torch.cuda` functions that Megatron calls directly. It also makes
Megatron take torch's optimizer where Transformer Engine or Apex is installed, as theirs need a GPU. Where a GPU is
there, `install()` only defines a name that Megatron forgot. Limits: no memory statistics, streams do nothing (the CPU
has one), the mode holds on the thread that installed it and on threads of Python that start later, and torch-compiled
fusions are not covered (the model is built without them).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(a) for a in args)
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            # Megatron's optimizers sort parameters by the name of their type.
            out = out.replace("torch.", "torch.cuda.", 1)
        return out


class _Stream:
    """One stream for everything: the CPU runs what it is given, in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def _replacements() -> list[tuple[Any, str, Any]]:
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.tensor_parallel import random

    stream = _Stream()
    mixed: Any = sys.modules[f"{optimizer.__name__}.optimizer"]  # the package has a name that hides it

    def give(value: Any) -> Any:
        # A separate function for every name: torch's compiler refuses to load where two names share one.
        return lambda *_, **__: value

    cuda: Any = torch.cuda
    return [
        (cuda, "current_device", give(CPU)),
        (cuda, "set_device", give(None)),
        (cuda, "synchronize", give(None)),
        (cuda, "empty_cache", give(None)),
        (cuda, "current_stream", give(stream)),
        (cuda, "default_stream", give(stream)),
        (cuda, "stream", lambda _: contextlib.nullcontext()),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),  # noqa: PLW0108 - one function, one name
        (cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (cuda, "FloatTensor", torch.FloatTensor),
        (cuda, "HalfTensor", torch.HalfTensor),
        (cuda, "BFloat16Tensor", torch.BFloat16Tensor),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (optimizer, "Adam", torch.optim.AdamW),
        (optimizer, "USING_PYTORCH_OPTIMIZER", True),
        (distrib_optimizer, "Adam", torch.optim.Adam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", False),
        (distrib_optimizer, "USING_TE_OPTIMIZER", False),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", False),
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
        (clip_grads, "multi_tensor_scale_tensor_impl", None),  # newer versions of Megatron clip with it if it is there
        *((module, "multi_tensor_applier", utils.local_multi_tensor_applier) for module in (clip_grads, mixed)),
        *((module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale) for module in (clip_grads, mixed)),
    ]


def _define_missing() -> None:
    """Megatron 0.16 never defines this name where Transformer Engine is missing, and its router then tests it for None
    (megatron/core/transformer/moe/moe_utils.py): on a GPU too. Newer versions define it as None themselves, so it stays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


_undo: list[contextlib.ExitStack] = []
_start_thread: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]  # `run` may be overridden


def _start_with_the_mode(thread: threading.Thread) -> None:
    """Each thread has modes of its own."""
    mode: Any = _CudaMeansCpu()
    with mode:
        _start_thread(thread)


def stands_in() -> bool:
    return bool(_undo)


def install() -> None:
    """Make "cuda" mean the CPU where there is no GPU. Once per process; repeating it changes nothing."""
    _define_missing()
    if torch.cuda.is_available() or _undo:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of every optional package that is missing
        replacements = _replacements()
    undo = contextlib.ExitStack()
    for owner, name, new in replacements:
        undo.enter_context(mock.patch.object(owner, name, new, create=True))
    from megatron.core.tensor_parallel import random

    # Megatron warns at each dropout that the CPU's generator moved; here it is the one that is meant.
    logger = logging.getLogger(random.__name__)
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    mode: Any = _CudaMeansCpu()
    undo.enter_context(mode)
    undo.enter_context(mock.patch.object(threading.Thread, "_bootstrap_inner", _start_with_the_mode))
    _undo.append(undo)


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Run code without the mode, if the stand-in is active. The code must take devices from tensors or `current_device()` only.

    The mode takes 40 % of the time of a tiny model's forward."""
    with torch._C.DisableTorchFunction() if _undo else contextlib.nullcontext():
        yield


def uninstall() -> None:
    """Put everything back as it was before `install()`."""
    while _undo:
        _undo.pop().close()
