"""A stand-in for Transformer Engine, as far as Megatron imports it: every name exists, and using one without a GPU raises, as the real
one does. Named `te` one level up so that only tests that ask for it have it on their path."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__version__ = "2.9.0"


def refusing(name: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"Transformer Engine's {name} needs a GPU")

    return refuse


class Refusing(types.ModuleType):
    """A module in which a capitalised name is a class of modules, and any other a function and a module at once."""

    __path__: list[str] = []  # noqa: RUF012 - a package has this

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = type(name, (torch.nn.Module,), {"__init__": refusing(name)})
        else:
            made = Refusing(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *_: Any, **__: Any) -> None:
        refusing(self.__name__)()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        ours = fullname.startswith((f"{__name__}.", "transformer_engine_torch"))
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Refusing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.append(Finder())
for part in ("common", "pytorch", "pytorch.attention", "pytorch.cpu_offload"):
    importlib.import_module(f"{__name__}.{part}")
# Megatron uses these in every block and attention; without offloading and FP8 they are plain PyTorch.
pytorch: Any = sys.modules[f"{__name__}.pytorch"]
pytorch.cpu_offload.get_cpu_offload_context = lambda *_, **__: (contextlib.nullcontext(), None)
pytorch.attention._SplitAlongDim.apply = lambda tensor, dim, sizes, *_: torch.split(tensor, sizes, dim)
