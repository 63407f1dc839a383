"""A real Megatron training job: parallel state, GPTModel, DDP, optimizer, scheduler, built in this one place.

`build(config)` on every rank gives a `Training`; `Training.step(n)` runs n optimizer steps through Megatron's own
forward-backward schedules. Batches are a pure function of (seed, step, data rank, microbatch), so a run can be cut and
continued bit for bit. Limits: the local layer spec (no Transformer Engine), whose attention cannot split a sequence: with context
parallelism the groups are all there and gradients are reduced over them, and each of their ranks trains on sequences of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.megatron import groups, standin, tensors
from kit.megatron.config import ModelConfig, check
from kit.megatron.handles import parallel_state
from kit.train.options import DEFAULTS, Settings
from kit.train.plain import deterministic

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(kw_only=True, slots=True)
class Training:
    """A live training job on this rank. `steps_done` counts optimizer steps and picks the next batch."""

    config: ModelConfig
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    device: torch.device
    steps_done: int = 0
    mover: tensors.Mover = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.mover = tensors.Mover(self.chunks, self.optimizer, self.device)

    def step(self, n: int = 1) -> list[dict[str, float]]:
        """Train n steps. Loss (mean over microbatches and data ranks) and gradient norm of each, the same on every rank."""
        if self.mover.away:
            raise KitError(f"{', '.join(self.mover.away)} are off the device: restore them before training")
        return [self._step() for _ in range(n)]

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every tensor of the job, by "kind/name"."""
        return tensors.hashes(self.chunks, self.optimizer)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self.chunks):
            for name, param in chunk.module.named_parameters():
                yield f"chunk{index}.{name}", param

    def _step(self) -> dict[str, float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [_batches(self.config, self.steps_done, self.device) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=batches if self.config.vpp else batches[0],
            model=self.chunks,
            num_microbatches=self.config.microbatches,
            seq_length=self.config.geometry.seq,
            micro_batch_size=self.config.micro_batch,
            forward_only=False,
        )
        ok, grad_norm, _ = self.optimizer.step()
        if not ok:
            raise RuntimeError(f"the optimizer refused step {self.steps_done}: gradients are not finite")
        self.scheduler.step(increment=1)
        self.steps_done += 1
        return {"loss": _mean_loss(losses, self.device), "grad_norm": float(grad_norm)}


def _forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    out = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return out, loss_func


def _batches(config: ModelConfig, step: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    g = config.geometry
    replica = parallel_state().get_data_parallel_rank(with_context_parallel=True)
    for microbatch in range(config.microbatches):
        generator = torch.Generator().manual_seed(
            ((config.seed * 1_000_003 + step) * 4099 + replica) * 257 + microbatch
        )
        tokens = torch.randint(0, g.vocab, (config.micro_batch, g.seq + 1), generator=generator).to(device)
        positions = torch.arange(g.seq, device=device).expand(config.micro_batch, -1)
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "positions": positions}


def _mean_loss(losses: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    total = torch.zeros(1, dtype=torch.float64, device=device)
    if parallel_state().is_pipeline_last_stage():
        total += torch.stack([microbatch["loss"] for microbatch in losses]).double().mean()
        dist.all_reduce(total, group=parallel_state().get_data_parallel_group(with_context_parallel=True))
        total /= parallel_state().get_data_parallel_world_size(with_context_parallel=True)
    if parallel_state().get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state().get_pipeline_model_parallel_last_rank()
        dist.broadcast(total, last, group=parallel_state().get_pipeline_model_parallel_group())
    return float(total.item())


def initialise(config: ModelConfig) -> torch.device:
    """Megatron's parallel state for this config: stand-in and group handles first. Gives the device to build on."""
    if not dist.is_initialized():
        raise BadInput("torch.distributed is not initialised: call init_process_group (or start a World) first")
    check(config, dist.get_world_size())
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron requires it, or warns in every step
    for words in (r"`torch\.distributed\.\w+` is deprecated", r"The \.grad attribute of a Tensor that is not a leaf"):
        warnings.filterwarnings("ignore", message=words)  # Megatron's own calls, in every step
    # Handles come first: some modules that Megatron imports keep the default group that they find.
    groups.install()
    standin.install()
    from megatron.core import tensor_parallel

    if parallel_state().model_parallel_is_initialized():
        raise BadInput("Megatron's parallel state is already initialised: destroy it before building another job")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        # Without it cuBLAS may sum in another order in every run, and torch refuses to call it in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        deterministic()
    parallel_state().initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        order=config.order,
        create_gloo_process_groups=config.gloo_groups,
        distributed_timeout_minutes=config.timeout_minutes,
        high_priority_stream_groups=["tp", "dp_cp"] if config.odd_options and on_gpu else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def build(config: ModelConfig, settings: Settings = DEFAULTS) -> Training:
    """Initialise Megatron for this config and build the job; every rank calls it."""
    return assemble_job(config, initialise(config), settings)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron warns of every optional package that is missing; newer versions announce that each model will have a successor."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def assemble_job(config: ModelConfig, device: torch.device, settings: Settings = DEFAULTS) -> Training:
    """Build the job on existing groups; several jobs of one layout may share them."""
    networks = [network(config, device, stage) for stage in range(config.vpp or 1)]
    return job_of(config, networks, device, settings)


@_quiet()
def job_of(config: ModelConfig, networks: list[Any], device: torch.device, settings: Settings = DEFAULTS) -> Training:
    """Wrap these networks, one per virtual stage, into a job with its own gradient buffers and optimizer."""
    chunks = [_chunk(config, stage) for stage in networks]
    optimizer = _optimizer(config, chunks, settings)
    scheduler = _scheduler(optimizer, settings)
    from megatron.core.distributed import finalize_model_grads

    first = chunks[0].config
    first.finalize_model_grads_func = finalize_model_grads
    first.grad_scale_func = optimizer.scale_loss
    first.no_sync_func = [chunk.no_sync for chunk in chunks] if config.vpp else chunks[0].no_sync
    if config.overlap_grad_reduce and config.pp > 1:
        starts = [chunk.start_grad_sync for chunk in chunks]
        first.grad_sync_func = starts if config.vpp else starts[0]
    return Training(config=config, chunks=chunks, optimizer=optimizer, scheduler=scheduler, device=device)


@_quiet()
def network(config: ModelConfig, device: torch.device, stage: int = 0) -> Any:
    """The bare GPTModel of this rank (or of one of its virtual stages), with its first weights: no gradient buffers, no optimizer."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    g, dtype = config.geometry, DTYPES[config.dtype]
    experts: dict[str, Any] = {}
    if config.experts:
        # The alltoall dispatcher wants a CUDA stream at construction; this one does not.
        experts = {"num_moe_experts": config.experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
        experts["moe_router_load_balancing_type"] = "aux_loss" if config.aux_loss else "none"
        experts["moe_aux_loss_coeff"] = config.aux_loss
        if config.router_bias:
            experts |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    transformer_config = TransformerConfig(
        num_layers=g.layers,
        hidden_size=g.hidden,
        ffn_hidden_size=g.ffn,
        num_attention_heads=g.heads,
        num_query_groups=g.kv_heads,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        expert_model_parallel_size=config.ep if config.experts else 1,
        use_cpu_initialization=True,  # the same first weights with a GPU and without
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        normalization="RMSNorm",
        layernorm_epsilon=g.norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=g.qkv_bias,
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        # Fusions are compiled or need Apex; without them every box computes the same.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=device.type == "cuda",
        calculate_per_token_loss=config.sum_gradients,
        **experts,
    )
    torch.manual_seed(config.seed + stage)
    virtual: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage} if config.vpp else {}
    layer = get_gpt_layer_local_spec(
        num_experts=config.experts or None, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    # Given a layer alone, Megatron takes Apex's or Transformer Engine's final norm where one is installed, and Apex's knows no RMSNorm.
    block = TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(transformer_config, vp_stage=virtual.get("vp_stage")),
        layer_norm=WrappedTorchNorm,
    )
    model: Any = GPTModel(
        config=transformer_config,
        transformer_layer_spec=block,
        vocab_size=g.vocab,
        max_sequence_length=g.seq,
        pre_process=parallel_state().is_pipeline_first_stage(**virtual),
        post_process=parallel_state().is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_base=g.rope_base,
        **({"vp_stage": stage} if config.vpp else {}),
    ).to(device)
    model.rotary_pos_emb.cp_group = None  # a sequence is whole on its rank, so its positions are
    if dtype != torch.float32:
        model = Float16Module(transformer_config, model)
    return model


def _chunk(config: ModelConfig, model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        use_distributed_optimizer=config.distributed_optimizer,
        check_for_nan_in_grad=False,  # it would raise where the step is to be skipped
    )
    chunk = DistributedDataParallel(model.config, ddp_config, model)
    chunk.broadcast_params()
    return chunk


def _optimizer(config: ModelConfig, chunks: list[Any], wanted: Settings) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(
        optimizer="adam",
        lr=wanted.lr,
        min_lr=wanted.last_lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.betas[0],
        adam_beta2=wanted.betas[1],
        adam_eps=wanted.eps,
        clip_grad=wanted.clip,
        bf16=config.dtype == "bfloat16",
        params_dtype=DTYPES[config.dtype],
        use_distributed_optimizer=config.distributed_optimizer,
    )
    return get_megatron_optimizer(settings, chunks, use_gloo_process_groups=config.gloo_groups)


def _scheduler(optimizer: Any, wanted: Settings) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=wanted.first_lr,
        max_lr=wanted.lr,
        min_lr=wanted.last_lr,
        lr_warmup_steps=wanted.warmup,
        lr_decay_steps=wanted.decay,
        lr_decay_style="cosine",
        start_wd=wanted.weight_decay,
        end_wd=wanted.weight_decay,
        wd_incr_steps=wanted.decay,
        wd_incr_style="constant",
    )
