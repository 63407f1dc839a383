"""A vLLM engine as the model of a replica: a process with its own interpreter, which has vLLM, driven by this rank.

The engine reads the base weights from a folder that this rank writes; nothing is downloaded. New weights go through vLLM's layerwise
reload: `begin`, `load` for each tensor, `finalize`. Every call has a deadline. The process ends with its socket, or with its rank.

Limits: a CPU, one rank, a dense model with heads of a size that vLLM's attention has; a sleeping engine keeps its memory, because vLLM
frees it on GPUs only.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kit.engines.contents import Named
from kit.engines.hosted import EngineContext
from kit.engines.hugging import served_config
from kit.errors import KitError
from kit.megatron.serve import PromptRequest
from kit.sync.buckets import dtype_name
from kit.train.draws import uniform

ALIGNED = 64  # bytes
START_S, CALL_S = 110.0, 60.0
# By what a sync does with requests in flight: vLLM's mode, and whether it clears its cache. It has no mode `wait` inside one process: with
# `drain` the controller has let all requests end.
PAUSES = {"keep": ("keep", False), "recompute": ("keep", True), "abort": ("abort", True), "drain": ("abort", True)}
SIDE = Path(__file__).with_name("vllmside.py")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class EngineFailed(KitError):  # noqa: N818 - it is what happened
    """The engine's process raised, ended, or did not answer."""


class VllmModel:
    # vLLM packs weights for the CPU, and its own reload leaves the packed copy of a tied head old: here weights stay as they are.
    linear = "kept"
    # What vLLM records of the tokens that it samples. Its default, raw_logprobs, is without the temperature.
    recorded = "processed_logprobs"

    def __init__(self, ctx: EngineContext) -> None:
        self.open = False  # an update of the weights
        self._calls = threading.Lock()  # forwards come from another thread
        self._lines = [Connection(end.detach()) for end in socket.socketpair()]
        line, theirs = self._lines
        self._arena = Arena(ctx.weights)
        folder = self._folder = tempfile.TemporaryDirectory(prefix="kit-vllm-")
        write_folder(Path(folder.name), ctx)
        settings = {
            "folder": folder.name,
            "linear": self.linear,
            "recorded": self.recorded if ctx.writes else "raw_logits",
            "dtype": dtype_name(ctx.dtype),
            "length": ctx.geometry.seq,
            "arena": self._arena.file,
        }
        command = [ctx.python, "-P", str(SIDE), str(theirs.fileno()), json.dumps(settings)]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            command,
            env={**inherited, **ENVIRONMENT},
            pass_fds=[theirs.fileno(), self._arena.file],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        os.close(self._arena.file)  # its mapping stays
        try:
            self._answer(line, START_S)
        except BaseException:
            self.process.kill()
            self.close()
            raise
        finally:
            folder.cleanup()

    def full_tensors(self) -> Named:
        return self._tensors("full_tensors")

    def constants(self) -> Named:
        return self._tensors("constants")

    def begin(self) -> None:
        """The first tensor of a version follows; a version that was not finished is finished first, as vLLM demands."""
        self.abandon()
        self.call("begin")
        self.open = True

    def load(self, name: str, tensor: torch.Tensor) -> None:
        offset = self._arena.put(name, tensor)
        self.call("load", name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), offset=offset)

    def finalize(self) -> None:
        self.abandon()
        self.drop_cache()

    def abandon(self) -> None:
        if self.open:
            self.finish()

    def finish(self) -> None:
        self.call("finish")
        self.open = False

    def drop_cache(self) -> None:
        """Keys and values of the old weights must not answer for the new ones."""
        self.call("drop_cache")

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows the last token of each row. It fills the prefix cache and does not read it, so its bits are always the same."""
        return self._logits(tokens, cached=False)

    def cached_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same with what the prefix cache has."""
        return self._logits(tokens, cached=True)

    def sleep(self) -> None:
        self.call("sleep")

    def wake(self) -> None:
        self.call("wake")

    def resident(self) -> list[str]:
        return [str(name) for name in self.call("resident")]

    # -- answers ----------------------------------------------------------------------------------------------------------

    def start(self, request: PromptRequest) -> None:
        number = uniform(request.seed, request.prompt, request.sample)
        self.call("start", request={**dataclasses.asdict(request), "seed": int(number * 2**53)})

    def step(self) -> list[tuple[str, int, float]]:
        return [(name, token, logprob) for name, token, logprob in self.call("step")]

    def cancel(self, name: str) -> None:
        self.call("cancel", name=name)

    def pause(self, at_sync: str) -> None:
        """vLLM's own pause. To keep requests and clear the cache is to compute their keys and values again."""
        mode, clear = PAUSES[at_sync]
        self.call("pause", mode=mode, clear=clear)

    def resume(self) -> None:
        self.call("resume")

    def live_bytes(self) -> int:
        (named,) = self._tensors("live_bytes")
        return int(named[1])

    def close(self) -> None:
        self._arena.close()
        self._lines[0].close()
        try:
            self.process.wait(CALL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def call(self, name: str, /, **arguments: Any) -> Any:
        with self._calls:
            self._send({"call": name, **arguments})
            return self._answer(self._lines[0])

    def _logits(self, tokens: torch.Tensor, *, cached: bool) -> torch.Tensor:
        with self._calls:
            self._send({"call": "logits", "tokens": tokens.tolist(), "cached": cached})
            (named,) = self._receive(self._answer(self._lines[0]))
        return named[1]

    def _tensors(self, kind: str) -> Named:
        with self._calls:
            self._send({"call": kind})
            tensors = self._receive(self._answer(self._lines[0]))
        yield from tensors

    def _receive(self, described: list[Any]) -> list[tuple[str, torch.Tensor]]:
        tensors = []
        for name, dtype, shape in described:
            raw = bytearray(self._bytes(self._lines[0], CALL_S))
            tensors.append((name, torch.frombuffer(raw, dtype=getattr(torch, dtype)).view(shape)))
        return tensors

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._lines[0].send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise EngineFailed(f"the vLLM engine has ended ({self.process.poll()}): {error}") from None

    def _answer(self, line: Connection, within_s: float | None = None) -> Any:
        answer = json.loads(self._bytes(line, within_s or CALL_S))
        if "error" in answer:
            raise EngineFailed(f"the vLLM engine raised {answer['error']}")
        return answer["result"]

    def _bytes(self, line: Connection, within_s: float) -> bytes:
        try:
            if line.poll(within_s):
                return line.recv_bytes()
        except (EOFError, OSError):
            ended = "closed its line" if (status := self.process.poll()) is None else f"ended with {status}"
            raise EngineFailed(f"the vLLM engine {ended}; its output is in this rank's log") from None
        self.process.kill()  # a late answer would be taken for that of the next call
        raise EngineFailed(f"the vLLM engine did not answer within {within_s:g} s")


class Arena:
    """Memory that the engine's process maps, with a place for each tensor: vLLM reads a tensor when its layer is complete, so none may be
    written over before the next version. Both ends map it once, for as long as the engine runs."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, tensor in weights.items():
            self.places[name] = end, tensor.nbytes
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        self.file = os.memfd_create("kit-vllm")
        os.ftruncate(self.file, end)
        self._mapping = mmap.mmap(self.file, end)
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)  # a tensor keeps it mapped
        self._mapping.close()

    def put(self, name: str, tensor: torch.Tensor) -> int:
        """Copy a tensor to its place; returns where that begins."""
        offset, size = self.places.get(name, (0, 0))
        if tensor.nbytes != size:
            raise EngineFailed(f"{name} has {tensor.nbytes} bytes, but {size} in the base weights")
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        self._memory[offset : offset + size].copy_(flat)
        return offset


def write_folder(folder: Path, ctx: EngineContext) -> None:
    from safetensors.torch import save_file

    config = {**served_config(ctx.geometry), "torch_dtype": dtype_name(ctx.dtype)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**ctx.weights}, folder / "model.safetensors", metadata={"format": "pt"})
