"""The setting `serve` of the labs that have it: which models replicas can serve with, what each of them needs, and whether it is there."""

from __future__ import annotations

import os
from typing import Any

from kit.errors import BadInput, refuse_if
from kit.labs.definition import Option
from kit.machine import has_gpu_driver
from kit.megatron.config import ModelConfig
from kit.world.asked import find_python, python_has

KITS_ENGINES = ("transformers", "vllm")
SERVED = ("megatron", *KITS_ENGINES)
VLLM_BYTES = 7 * 2**28  # of a vLLM process without weights, 1 GiB of it for keys and values: 1.65 GiB measured
FOR_ENGINES = " and for engines"  # what host memory is for, in a refusal
HEAD = 32  # the least width of a head, and its step, in vLLM's attention on a CPU
SERVE = Option(
    "model that replicas serve with: megatron (the kit's), transformers (Hugging Face), vllm, or your own engine as module:attr",
    target=True,
    names=SERVED,
)
REPLICA_PYTHON = Option("Python interpreter with vLLM, for serve=vllm; empty: KIT_VLLM_PYTHON in the environment")


def check_served(config: Any, replica: ModelConfig) -> None:
    """Refuse what an engine cannot serve. `replica`: the model of one replica."""
    serve = config.serve
    if serve == "megatron":
        return
    refuse_if(
        config.infer_tp > 1,
        f"serve={serve} puts a whole model on each rank, but infer_tp={config.infer_tp}: use infer_tp=1",
    )
    refuse_if(
        serve == "vllm" and (config.device == "cuda" or (config.device == "auto" and has_gpu_driver())),
        f"serve=vllm runs on a CPU here, but device={config.device}: use device=cpu",
    )
    shape = replica.geometry
    refuse_if(
        serve == "vllm" and shape.hidden // shape.heads % HEAD > 0,
        f"serve=vllm needs heads whose width is a multiple of {HEAD}, but those of size={config.size} have "
        f"{shape.hidden // shape.heads}: use size=small",
    )


def engine_bytes(config: Any, weights: int) -> int:
    """Host memory of a replica's engine beside its rank and its weights. `weights`: their bytes, which vLLM's process gets through memory
    that both ends map."""
    return VLLM_BYTES + weights if config.serve == "vllm" else 0


def check_engine_there(config: Any) -> None:
    """Refuse an engine whose package is not in the interpreter that would run it."""
    if config.serve == "vllm":
        python = vllm_python(config)
        if not python or not python_has(python, "vllm"):
            named = f"{python} does not have it" if python else "none was named"
            raise BadInput(
                f"serve=vllm needs a Python that has vLLM, and {named}: make env-vllm, then set KIT_VLLM_PYTHON=build/vllm/bin/python"
            )
        return
    python = find_python(config.python or None).path if config.serve == "transformers" else ""
    if python and not python_has(python, config.serve):
        raise BadInput(
            f"serve={config.serve} needs the package {config.serve} in the ranks' Python {python}: "
            f"pip install 'lifecycle-kit[hf]'"
        )


def vllm_python(config: Any) -> str:
    """The interpreter that `replica_python` or the environment names; empty if none."""
    return getattr(config, "replica_python", "") or os.environ.get("KIT_VLLM_PYTHON", "")
