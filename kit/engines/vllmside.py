"""The engine's side of `kit.engines.vllm`: a script for an interpreter that has vLLM and no kit. It answers calls until its socket closes.

A layer that packed its weight for the CPU computes with the packed copy, and may have no other: the weight that counts is what the layer
makes of the identity, bit for bit.
Limits of that: a negative zero reads as zero.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import mmap
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

Named = Iterator[tuple[str, torch.Tensor]]
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EMBEDDING = "model.embed_tokens.weight"  # the tied head's name too, where that has memory of its own


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm
        from vllm.model_executor.layers import linear, utils

        if settings["linear"] == "kept":
            for module in (linear, utils):
                if hasattr(module, "dispatch_cpu_unquantized_gemm"):
                    module.dispatch_cpu_unquantized_gemm = keep_weight
        self.llm = vllm.LLM(
            model=settings["folder"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=settings["dtype"],
            max_model_len=settings["length"],
            max_num_seqs=4,
            block_size=32,
            async_scheduling=False,  # a step gives the tokens of its own forward
            enable_prefix_caching=True,
            logprobs_mode=settings["recorded"],
            max_logprobs=-1,
        )
        self.config: Any = self.llm.llm_engine.vllm_config
        self.model: Any = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.arena = mmap.mmap(settings["arena"], 0)  # where tensors come
        self.open = False
        self.salt = 0  # of the prefix cache: its blocks answer for prompts with the same salt only

    def full_tensors(self) -> Named:
        modules = dict(self.model.named_modules())
        for name, parameter in self.model.named_parameters():
            path, _, kind = name.rpartition(".")
            tensor = parameter if parameter.numel() else read_packed(modules[path])
            owner, _, packed = path.rpartition(".")
            parts = PARTS.get(packed)
            sizes = modules[path].output_sizes if parts else None
            for part, piece in zip(parts or (packed,), tensor.split(sizes) if sizes else [tensor], strict=True):
                yield f"{owner}.{part}.{kind}" if owner else EMBEDDING, piece

        head = modules["lm_head"]  # has the embedding's weight, and perhaps a packed copy
        if getattr(head, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear:
            yield EMBEDDING, read_packed(head)

    def constants(self) -> Named:
        yield from self.model.named_buffers()

    def live_bytes(self) -> Named:
        from torch._subclasses.fake_tensor import is_fake

        gc.collect()
        kinds = [
            each for each in gc.get_objects() if type(each) is torch.Tensor or isinstance(each, torch.nn.Parameter)
        ]
        tensors = [tensor for tensor in kinds if tensor.device.type == "cpu" and not is_fake(tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        yield "live_bytes", torch.tensor(sum(storages.values()))

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        if self.open:
            raise RuntimeError("begin, but an update is open: finish it first")
        with self.in_engine():
            initialize_layerwise_reload(self.model)
        self.open = True

    def load(self, name: str, dtype: str, shape: list[int], offset: int) -> None:
        if not self.open:
            raise RuntimeError("load before begin")
        tensor = torch.frombuffer(self.arena, dtype=getattr(torch, dtype), count=math.prod(shape), offset=offset).view(
            shape
        )
        with self.in_engine(), torch.no_grad():
            self.model.load_weights([(name, tensor)])

    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        if not self.open:
            raise RuntimeError("finish before begin")
        with self.in_engine(), torch.no_grad():
            finalize_layerwise_reload(self.model, self.config.model_config)
        self.open = False

    def keep(self) -> None:
        """A copy of the weights in this process, for `reload_kept`."""
        self.kept = [(name, tensor.detach().clone()) for name, tensor in self.full_tensors()]

    def reload_kept(self) -> None:
        """The engine's own load from memory: all tensors at once, without another process."""
        self.begin()
        with self.in_engine(), torch.no_grad():
            self.model.load_weights(iter(self.kept))
        self.finish()
        self.drop_cache()

    def in_engine(self) -> Any:
        from vllm.config import set_current_vllm_config

        scope: Any = set_current_vllm_config(self.config)
        return scope

    def drop_cache(self) -> None:
        """vLLM does not free blocks that requests in flight use. Prompts of later requests have another salt and do not find them."""
        self.salt += 1
        if not self.llm.reset_prefix_cache() and not self.llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("the prefix cache could not be dropped")

    def salted(self, tokens: list[int]) -> Any:
        return {"prompt_token_ids": tokens, "cache_salt": f"weights {self.salt}"}

    def start(self, request: dict[str, Any]) -> None:
        import vllm

        how = vllm.SamplingParams(
            temperature=request["temperature"],
            max_tokens=request["max_tokens"],
            min_tokens=request["min_tokens"],
            stop_token_ids=[request["end"]],
            seed=request["seed"],
            logprobs=0,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        self.llm.llm_engine.add_request(request["id"], self.salted(request["prompt"]), how)

    def step(self) -> list[list[Any]]:
        rows = []
        for output in self.llm.llm_engine.step():
            (piece,) = output.outputs
            for token, entries in zip(piece.token_ids, piece.logprobs, strict=True):
                rows.append([output.request_id, token, entries[token].logprob])
        return rows

    def cancel(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def pause(self, mode: str, *, clear: bool) -> None:
        self.core.pause_scheduler(mode, clear_cache=clear)
        if mode == "abort":
            # vLLM's front end goes on waiting for what its core has aborted, and so would every later `generate`.
            engine = self.llm.llm_engine
            engine.abort_request([*engine.output_processor.request_states], internal=True)

    def resume(self) -> None:
        self.core.resume_scheduler()

    def sleep(self) -> None:
        """Level 2 discards the weights, where the device lets vLLM do so: on a CPU they stay, and only requests are refused."""
        self.llm.sleep(level=2)

    def wake(self) -> None:
        self.llm.wake_up()

    def resident(self) -> list[str]:
        """Weights that have memory."""
        return [name for name, tensor in self.model.named_parameters() if tensor.untyped_storage().nbytes()]

    def logits(self, tokens: list[list[int]], *, cached: bool) -> torch.Tensor:
        import vllm

        if self.core.is_sleeping():
            raise RuntimeError("the engine is asleep: wake it and load its weights before it serves")
        how = vllm.SamplingParams(
            temperature=0, max_tokens=1, logprobs=-1, detokenize=False, skip_reading_prefix_cache=not cached
        )
        in_flight = self.llm.llm_engine.output_processor.request_states
        before = {*in_flight}
        try:
            outputs = self.llm.generate([self.salted(row) for row in tokens], how, use_tqdm=False)
        except Exception:  # vLLM keeps requests whose step raised, and has room for few
            self.llm.llm_engine.abort_request([*({*in_flight} - before)], internal=True)
            raise
        rows = []
        for output in outputs:
            (answer,) = output.outputs
            row = torch.empty(len(answer.logprobs[0]))
            for token, entry in answer.logprobs[0].items():
                row[token] = entry.logprob
            if int(row.argmax()) != answer.token_ids[0]:
                raise RuntimeError(
                    f"the engine wrote token {answer.token_ids[0]}, and its logits favour {int(row.argmax())}"
                )
            rows.append(row)
        return torch.stack(rows)


def keep_weight(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001 - as vLLM calls it
    layer.cpu_linear = torch.nn.functional.linear


def read_packed(layer: Any) -> torch.Tensor:
    width = getattr(layer, "input_size_per_partition", 0) or layer.embedding_dim
    identity = torch.eye(width, dtype=layer.weight.dtype)
    made: torch.Tensor = layer.quant_method.apply(layer, identity, None)
    return made.t()


def serve(line: Connection, engine: Engine) -> None:
    while True:
        try:
            message = json.loads(line.recv_bytes())
        except EOFError:
            return
        name = message.pop("call")
        try:
            if name == "logits":
                answer(line, [("logits", engine.logits(message["tokens"], cached=message["cached"]))])
            elif name in ("step", "resident"):
                line.send_bytes(json.dumps({"result": getattr(engine, name)()}).encode())
            else:
                answer(line, list(getattr(engine, name)(**message) or ()))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is reported
            traceback.print_exc()
            line.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())


def answer(line: Connection, tensors: list[tuple[str, torch.Tensor]]) -> None:
    flat = [(name, tensor.detach().contiguous()) for name, tensor in tensors]
    described = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in flat]
    line.send_bytes(json.dumps({"result": described}).encode())
    for _, tensor in flat:
        line.send_bytes(tensor.view(-1).view(torch.uint8).numpy().tobytes())


def main(engine: type[Engine]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its rank
    connection = Connection(int(sys.argv[1]))
    made = engine(json.loads(sys.argv[2]))
    answer(connection, [])
    serve(connection, made)


if __name__ == "__main__":
    main(Engine)
