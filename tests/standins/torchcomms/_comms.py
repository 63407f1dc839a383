"""The stand-in's backend: torch's gloo with a mark that identifies it."""

from __future__ import annotations

import datetime as dt
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo


def get_comm(backend: Any) -> Any:
    return Finalizable()


class Finalizable:
    """The interface that torch calls when a group is destroyed; gloo has nothing to finalize."""

    def finalize(self) -> None: ...


ProcessGroupGloo.get_comm = get_comm  # type: ignore[attr-defined]  # torch asks the backend object for it
MARK = "made by the stand-in for torchcomms"


class _Marked(type):
    """torch returns a backend as its C++ object, gloo, so the mark is kept in its options."""

    def __instancecheck__(cls, backend: Any) -> bool:
        return type(backend) is ProcessGroupGloo and backend.options.group_name == MARK


class _BackendWrapper(metaclass=_Marked):
    def __new__(cls, comm: Any) -> Any:
        made: Any = ProcessGroupGloo(comm.store, comm.rank, comm.size, comm.timeout or dt.timedelta(minutes=10))
        made.options.group_name = MARK
        return made
