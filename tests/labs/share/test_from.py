"""`kit run share --from FILE`: rlix and NeMo-RL files become settings; impossible values are refused, unknown keys are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.cli import CommandAnswer, main
from kit.errors import BadInput
from kit.labs.share.foreign import settings_of
from tests.labs.share.conftest import share

# In the format of NeMo-RL pipelines under rlix: the job's settings are overrides, devices are given twice.
NEMO: dict[str, Any] = {
    "pipeline_cls": "team.pipeline:Pipeline",
    "nemo_config_overrides": [
        "grpo.async_grpo.enabled=true",
        "grpo.max_num_steps=6",
        "policy.generation.vllm_cfg.tensor_parallel_size=1",
        "+policy.generation.vllm_cfg.enforce_eager=true",
        "policy.megatron_cfg.tensor_model_parallel_size=1",
    ],
    "train_device_mapping": [0],
    "infer_device_mapping": [0, 1],
    "num_gpus_per_node": 2,
    "verify_model_after_sync": False,
    "actor_train": {"device_mapping": [0], "offload_nccl": True},
    "actor_infer": {"device_mapping": [0, 1], "strategy_args": {"strategy_config": {"sleep_level": 2}}},
}
# In the format of rlix's own pipelines: devices as text, references within the file.
ROLL: dict[str, Any] = {
    "offload_nccl": True,
    "max_steps": 3,
    "async_generation_ratio": 1,
    "model_update_transport": "cpu_serialize",
    "model_update_buffer_size_mb": 100,
    "actor_train": {
        "offload_nccl": "${offload_nccl}",
        "device_mapping": "[1, ]",
        "strategy_args": {"strategy_config": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}},
    },
    "actor_infer": {
        "offload_nccl": "${offload_nccl}",
        "device_mapping": "list(range(0, 2))",
        "strategy_args": {"strategy_config": {"tensor_parallel_size": 1, "sleep_level": 2}},
    },
    "rewards": {"math": {"world_size": 4}},
}


ADAPTERS_MATH: dict[str, Any] = {"adapters": {"math": {"lora_rank": 8}}}
SERVES_MATH = {**ROLL["actor_infer"], "model_args": ADAPTERS_MATH}
SERVES_OTHER = {**ROLL["actor_infer"], "model_args": {**ADAPTERS_MATH, "model_name_or_path": "/served"}}


def changed(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**content, **changes}


def trained_by(*, model_args: dict[str, Any] | None = None, **strategy: Any) -> dict[str, Any]:
    trainer = ROLL["actor_train"]
    strategy = {**trainer["strategy_args"], **strategy}
    return changed(ROLL, actor_train={**trainer, "model_args": model_args, "strategy_args": strategy})


MATH = {"math": {"lora_rank": 8}}


def adapted(adapters: dict[str, Any], **more: Any) -> dict[str, Any]:
    content = trained_by(model_args={"adapters": adapters})
    return changed(content, actor_train={**content["actor_train"], **more})


def test_adapters_may_be_those_that_another_cluster_names() -> None:
    content = adapted({"math": {"lora_rank": 8}, "v1.5": {"lora_rank": 8}})
    infer = {**ROLL["actor_infer"], "model_args": {"adapters": "${actor_train.model_args.adapters}"}}
    found, unknown = settings_of({"one": changed(content, actor_infer=infer)})
    assert (found["a.adapters"], found["a.lora_rank"]) == (2, 8)
    assert not [key for key in unknown if "adapters" in key]


def test_adapters_become_settings() -> None:
    each = {"lora_target": "all-linear", "lora_rank": 8, "lora_alpha": 8}
    content = adapted({"Sokoban1": each, "Sokoban2": each}, use_sequence_packing=False)
    served = {**each, "lora_target": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"}
    infer = {**ROLL["actor_infer"], "model_args": {"adapters": {"Sokoban1": served, "Sokoban2": served}}}
    found, unknown = settings_of({"one": changed(content, actor_infer=infer)})
    assert {name: found[f"a.{name}"] for name in ("adapters", "lora_rank", "lora_alpha", "lora_targets")} == {
        "adapters": 2,
        "lora_rank": 8,
        "lora_alpha": 8,
        "lora_targets": "all",
    }
    assert "a.window" not in found
    assert not any("adapters" in key for key in unknown)
    assert share(**found).loops["a"].window == 1


@pytest.mark.parametrize("options", [{"lora_rank": 8}, {}, None], ids=["a rank", "no options", "null"])
@pytest.mark.parametrize("names", [["v1.5"], ["math"], ["v1.5", "math"], ["v1.5", "v1.6"]], ids=" ".join)
def test_every_adapter_counts(names: list[str], options: dict[str, Any] | None) -> None:
    """Also one whose name has a dot, and one without options, which has the lab's."""
    found, unknown = settings_of({"one": adapted(dict.fromkeys(names, options))})
    assert found["a.adapters"] == len(names)
    assert found.get("a.lora_rank") == (8 if options else None)
    assert not any("adapters" in key for key in unknown)


def test_two_files_become_two_pipelines() -> None:
    found, unknown = settings_of({"one": NEMO, "two": ROLL})
    assert found == {
        "pipelines": 2,
        "devices": 2,
        "a.train": [0],
        "a.infer": [0, 1],
        "a.tp": 1,
        "a.infer_tp": 1,
        "a.steps": 6,
        "a.window": 1,
        "b.train": [1],
        "b.infer": [0, 1],
        "b.tp": 1,
        "b.infer_tp": 1,
        "b.steps": 3,
        "b.window": 1,
        "sleep_level": 2,
        "release_groups": True,
    }
    assert share(**found).names == ("a", "b")
    assert unknown == [
        "one: pipeline_cls",
        "one: policy.generation.vllm_cfg.enforce_eager",
        "two: rewards.math.world_size",
    ]


def test_one_file_is_one_pipeline() -> None:
    found, _ = settings_of({"one": ROLL})
    assert (found["pipelines"], found["a.train"], found["devices"]) == (1, [1], 2)
    assert "b.train" not in found


def test_a_loop_that_is_not_asynchronous_has_no_window() -> None:
    assert settings_of({"one": changed(ROLL, async_generation_ratio=0)})[0]["a.window"] == 0
    overrides = ["grpo.async_grpo.enabled=false"]
    assert settings_of({"one": changed(NEMO, nemo_config_overrides=overrides)})[0]["a.window"] == 0
    overrides = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=3"]
    assert settings_of({"one": changed(NEMO, nemo_config_overrides=overrides)})[0]["a.window"] == 3
    assert "a.window" not in settings_of({"one": changed(NEMO, nemo_config_overrides=None)})[0]


REFUSED = [
    (changed(NEMO, actor_train={"device_mapping": [1]}), "train_device_mapping and actor_train.device_mapping differ"),
    (changed(NEMO, actor_train={"offload_nccl": False, "device_mapping": [0]}), "actor_train.offload_nccl=false"),
    (changed(ROLL, offload_nccl=False), "actor_train.offload_nccl=false"),
    (changed(ROLL, rewards={"math": {"device_mapping": [0]}}), "remove the devices of the reward cluster"),
    (changed(ROLL, reward={"device_mapping": "[3]"}), "remove the devices of the reward cluster"),
    (changed(NEMO, actor_infer={"strategy_args": {"strategy_config": {"sleep_level": 0}}}), "sleep_level=0 must be 1"),
    (changed(NEMO, nemo_config_overrides=["policy.megatron_cfg.pipeline_model_parallel_size=2"]), "pipeline parallel trainer"),
    (changed(NEMO, nemo_config_overrides=["policy.megatron_cfg.context_parallel_size=2"]), "context parallel trainer"),
    (changed(NEMO, nemo_config_overrides=["policy.megatron_cfg.expert_model_parallel_size=4"]), "expert parallel trainer"),
    (changed(NEMO, nemo_config_overrides=["grpo"]), "an override is KEY=VALUE"),
    (changed(NEMO, infer_device_mapping="all"), "must be a list of devices"),
    (changed(ROLL, actor_infer={}), "name the devices"),
    (changed(ROLL, max_steps="three"), "max_steps='three' must be a whole number"),
    (changed(ROLL, model_update_transport="pigeon"), "must be one of cpu_serialize"),
    (changed(ROLL, verify_model_after_sync="yes"), "must be true or false"),
    (changed(ROLL, async_generation_ratio=-1), "must be a number of at least 0"),
    (adapted({"math": {"lora_rank": 8}, "code": {"lora_rank": 16}}), "code.lora_rank=16, but another adapter has 8; those of a"),
    (adapted({"math": {"lora_target": "q_proj"}}), "lora_target='q_proj' must be all-linear, or all layers of attention"),
    (adapted({"math": {"lora_rank": 8}, "code": None}), "actor_train: the adapter code has no lora_rank, but another has it; those"),
    (adapted({"math": {"x": {"lora_rank": 8}}}), "math.x.lora_rank is not known; an adapter has lora_rank, lora_alpha and"),
    (adapted({"math": 8}), "actor_train.model_args.adapters.math=8 must be a mapping: the options of an adapter, such as lora_rank"),
    (trained_by(model_args={"adapters": ["math"]}), "adapters=['math'] must be a mapping: names of adapters, each with its options, such"),
    (adapted({"v1.5": {"lora_rank": 8}, "v1.6": {"lora_rank": 16}}), '"v1.6".lora_rank=16, but another adapter has 8; those of a'),
    (adapted({"math": {"dropout": 0.1}}), "math.dropout is not known; an adapter has lora_rank, lora_alpha and lora_target"),
    (adapted({"math": {"lora_rank": 8}}, use_sequence_packing=True), "use_sequence_packing=true is not possible with adapters"),
    (adapted({"math": {"lora_rank": 8}}, overlap_grad_reduce=True), "overlap_grad_reduce=true is not possible with adapters"),
    (changed(adapted(MATH), pretrain="/qwen", load="/step-40"), "load=/step-40 is not the base that replicas serve (/qwen)"),
    (changed(adapted(MATH, ref_load="/other"), hf_checkpoint="/qwen"), "actor_train.ref_load=/other is not the base that"),
    (changed(adapted(MATH), pretrain="/qwen", load="/converted"), "or the kit cannot tell that its weights are the same; adapters"),
    (
        changed(trained_by(model_args={**ADAPTERS_MATH, "model_name_or_path": "/other"}), pretrain="/qwen"),
        "actor_train.model_args.model_name_or_path=/other is not the base that replicas serve (/qwen)",
    ),
    (
        changed(adapted(MATH), actor_infer=SERVES_OTHER, pretrain="/qwen", load="/qwen"),
        "load=/qwen is not the base that replicas serve (/served)",
    ),
    (adapted(MATH, load="/qwen"), "load=/qwen cannot be compared with the base that replicas serve: name it as hf_checkpoint, or"),
    (changed(ROLL, actor_infer=SERVES_MATH), "actor_infer has the adapters ['math'], and actor_train []; name the same"),
    (trained_by(strategy_name="deepspeed_train"), "strategy_name=deepspeed_train: DeepSpeed is not part of this lab"),
    (
        changed(ROLL, critic={"strategy_args": {"strategy_name": "deepspeed_train"}}),
        "critic.strategy_args.strategy_name=deepspeed_train: DeepSpeed is not part of this lab, which has Megatron; use megatron_train",
    ),
    (
        changed(ROLL, reference={"strategy_args": {"strategy_name": "deepspeed_infer"}}),
        "reference.strategy_args.strategy_name=deepspeed_infer: DeepSpeed is not part of this lab, which has Megatron; use megatron_infer",
    ),
]  # fmt: skip


def test_a_trainer_may_load_the_base_that_replicas_serve() -> None:
    own = changed(adapted(MATH, ref_load=None), hf_checkpoint="/qwen", load="${hf_checkpoint}")
    assert settings_of({"one": own})[0]["a.adapters"] == 1
    assert settings_of({"one": changed(ROLL, hf_checkpoint="/qwen", load="/step-40")})[0]["a.steps"] == 3  # no adapters


@pytest.mark.parametrize(
    "more",
    [
        {"critic": {"load": "/critic"}, "pretrain": "/qwen"},
        {"load": "/models//qwen/", "hf_checkpoint": "/models/qwen"},
        {"ref_load": "/models/Qwen3-4B_torch_dist", "hf_checkpoint": "/models/Qwen3-4B"},
        {"actor_infer": SERVES_OTHER, "pretrain": "/qwen", "load": "/served"},
    ],
)
def test_the_same_base_by_another_name_is_not_refused(more: dict[str, Any]) -> None:
    assert settings_of({"one": changed(adapted(MATH), **more)})[0]["a.adapters"] == 1


def test_neither_megatron_by_name_nor_an_empty_list_of_adapters_is_refused() -> None:
    for content in (trained_by(strategy_name="megatron_train"), trained_by(model_args={"adapters": {}})):
        assert settings_of({"one": content})[0] == settings_of({"one": ROLL})[0]


@pytest.mark.parametrize(("content", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_cannot_be_is_refused(content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match="one: ") as raised:
        settings_of({"one": content})
    assert sentence in str(raised.value)


def test_pipelines_that_cannot_go_together_are_refused() -> None:
    other = changed(
        NEMO, actor_infer={"device_mapping": [0, 1], "strategy_args": {"strategy_config": {"sleep_level": 1}}}
    )
    with pytest.raises(BadInput, match="two: sleep_level=1, but another file has sleep_level=2"):
        settings_of({"one": changed(NEMO), "two": other})
    with pytest.raises(BadInput, match="at most 26"):
        settings_of({str(number): NEMO for number in range(27)})


def test_a_run_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--set` overrides the settings of a file, and keys without a setting are printed."""
    given: dict[str, Any] = {}

    def run_once(_: str, config: dict[str, Any], __: Path | None, **___: Any) -> CommandAnswer:
        given.update(config)
        return CommandAnswer({"run": str(tmp_path)})

    monkeypatch.setattr("kit.cli.run_lab", run_once)
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file, content in zip(files, (NEMO, ROLL), strict=True):
        file.write_text(yaml.safe_dump(content))
    words = [word for file in files for word in ("--from", str(file))]
    assert main(["run", "share", *words, "--set", "a.steps=2"]) == 0
    assert (given["b.train"], given["a.window"], given["a.steps"], given["b.steps"]) == ([1], 1, 2, 3)
    assert f"kit: no setting for {files[0]}: pipeline_cls" in capsys.readouterr().err
    assert main(["run", "smoke", *words]) == 2
    assert "lab 'smoke' does not support --from FILE" in capsys.readouterr().err
    assert main(["run", "share", "--from", str(files[0]), "--from", str(files[0])]) == 2
