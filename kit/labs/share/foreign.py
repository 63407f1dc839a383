"""Converts config files of rlix and NeMo-RL, one per pipeline, to settings of the lab `share`.

Keys with a setting here are converted, values that cannot work here are refused with a reason, and all other keys are listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from posixpath import normpath
from typing import Any

import yaml

from kit.errors import BadInput
from kit.labs.definition import NAMES

RANGE = re.compile(r"list\(range\((\d+)(?:,\s*(\d+))?\)\)")
REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
TRAIN, INFER = "actor_train.strategy_args.strategy_config.", "actor_infer.strategy_args.strategy_config."
MEGATRON, ENGINE = "policy.megatron_cfg.", "policy.generation.vllm_cfg."
# The keys of each setting. The first two are those of rlix, the others those of NeMo-RL.
PLACES = {
    "train": ("train_device_mapping", "actor_train.device_mapping"),
    "infer": ("infer_device_mapping", "actor_infer.device_mapping"),
    "tp": (f"{TRAIN}tensor_model_parallel_size", f"{MEGATRON}tensor_model_parallel_size"),
    "pp": (f"{TRAIN}pipeline_model_parallel_size", f"{MEGATRON}pipeline_model_parallel_size"),
    "cp": (f"{TRAIN}context_parallel_size", f"{MEGATRON}context_parallel_size"),
    "ep": (f"{TRAIN}expert_model_parallel_size", f"{MEGATRON}expert_model_parallel_size"),
    "infer_tp": (f"{INFER}tensor_parallel_size", f"{ENGINE}tensor_parallel_size"),
    "infer_pp": (f"{INFER}pipeline_parallel_size", f"{ENGINE}pipeline_parallel_size"),
    "sleep_level": (f"{INFER}sleep_level", f"{ENGINE}sleep_level"),
    "transport": ("model_update_transport",),
    "bucket": ("model_update_buffer_size_mb",),
    "verify": ("verify_model_after_sync",),
    "ratio": ("async_generation_ratio",),
    "async": ("grpo.async_grpo.enabled",),
    "age": ("grpo.async_grpo.max_trajectory_age_steps",),
    "steps": ("max_steps", "grpo.max_num_steps"),
    "devices": ("num_gpus_per_node", "cluster.gpus_per_node"),
}
TRANSPORTS = ("cpu_serialize", "cuda_ipc", "nccl", "auto")


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def only_1(what: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: is_number(value) and value == 1, f"is a {what}, which is not part of this lab; use 1"


# The test of each value, and the error message if it fails.
ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "pp": only_1("pipeline parallel trainer"),
    "cp": only_1("context parallel trainer"),
    "ep": only_1("expert parallel trainer"),
    "infer_pp": only_1("pipeline parallel engine"),
    **dict.fromkeys(("tp", "infer_tp", "age", "steps", "devices"), (is_number, "must be a whole number")),
    "sleep_level": (
        lambda value: is_number(value) and value in (1, 2),
        "must be 1 (weights stay on the host) or 2 (they are dropped)",
    ),
    "transport": (TRANSPORTS.__contains__, f"must be one of {', '.join(TRANSPORTS)}"),
    "bucket": (lambda value: is_number(value) and value >= 1, "must be a whole number of at least 1"),
    "ratio": (
        lambda value: (is_number(value) or isinstance(value, float)) and value >= 0,
        "must be a number of at least 0",
    ),
    **dict.fromkeys(("verify", "async"), (lambda value: isinstance(value, bool), "must be true or false")),
}
CLUSTERS = ("actor_train", "actor_infer", "reference", "critic")  # with `device_mapping` and `offload_nccl`
ADAPTERS = re.compile(r"actor_\w+\.model_args\.adapters")
ADAPTER = re.compile(rf'({ADAPTERS.pattern})(?:\.("[^"]+"|[^.]+)(?:\.(.+))?)?')  # of a cluster; its name, an option
OPTIONS = ("lora_rank", "lora_alpha", "lora_target")
ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
TARGETS = {"all": ATTENTION | MLP, "attention": ATTENTION, "mlp": MLP}
# What cannot be together with adapters, by the end of its key.
NOT_WITH_ADAPTERS = {
    "use_sequence_packing": "packs rows of several adapters into one microbatch, which can only have one",
    "use_dynamic_batching_in_train": "mixes rows of several adapters in one microbatch, which can only have one",
    "overlap_grad_reduce": "starts to reduce gradients of adapters that do not train in this step",
}
# The keys of the checkpoint that replicas load, the most specific first, and those of one that only the trainer loads.
BASE = ("actor_infer.model_args.model_name_or_path", "hf_checkpoint", "pretrain", "policy.model_name")
OF_THE_TRAINER = (
    *(f"{cluster}{key}" for cluster in ("", "actor_train.") for key in ("load", "ref_load")),
    "actor_train.model_args.model_name_or_path",
)
CONVERTED = "_torch_dist"  # ends the name of a checkpoint that was converted for Megatron
REWARDS = re.compile(r"(rewards?(\.\w+)?)\.device_mapping")


def settings_of(files: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Settings from a file for each pipeline, and the keys without a setting, each with its file."""
    if len(files) > len(NAMES):
        raise BadInput(f"{len(files)} files are too many; give at most {len(NAMES)}, one per pipeline")
    common: dict[str, Any] = {"pipelines": len(files)}
    unknown = []
    for pipeline, (name, content) in zip(NAMES, files.items(), strict=False):
        try:
            keys = flat_yaml(content)
            settings = pipeline_settings(keys, pipeline)
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
        for key, value in settings.items():
            if key == "devices":
                value = max(value, common.get(key, 0))  # noqa: PLW2901 - the largest of all
            elif key in common and common[key] != value:
                raise BadInput(
                    f"{name}: {key}={value}, but another file has {key}={common[key]}; all must have the same value"
                )
            common[key] = value
        unknown += [f"{name}: {key}" for key in sorted({*keys} - known(keys))]
    return common, unknown


def flat_yaml(content: Mapping[str, Any]) -> dict[str, Any]:
    """Every value under its dotted key, with overrides applied and references within the file resolved."""
    values = dict(leaves(content))
    for text in values.pop("nemo_config_overrides", None) or ():
        key, equals, value = str(text).lstrip("+").partition("=")
        if not equals:
            raise BadInput(f"nemo_config_overrides has {text!r}; an override is KEY=VALUE")
        values[key] = yaml.safe_load(value)
    return dict(resolved(values))


def leaves(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        is_dotted_name = "." in str(key) and ADAPTERS.fullmatch(before.removesuffix("."))  # such as "v1.5"
        place = f'{before}"{key}"' if is_dotted_name else f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{place}.")
        else:
            yield place, value


def resolved(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value, with what a reference within the file names in its place: another value, or a mapping with all of its keys."""
    for key, value in values.items():
        match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        named = match[1] if match else key
        inside = {place: there for place, there in values.items() if place.startswith(f"{named}.")} if match else {}
        if inside:
            yield from ((key + place.removeprefix(named), there) for place, there in inside.items())
        else:
            yield key, values.get(named, value)


def known(given: Mapping[str, Any]) -> set[str]:
    places = {place for places_of_setting in PLACES.values() for place in places_of_setting}
    offloads = {"offload_nccl", *(f"{cluster}.offload_nccl" for cluster in CLUSTERS)}
    return places | offloads | {key for key in given if REWARDS.fullmatch(key) or ADAPTER.fullmatch(key)}


def pipeline_settings(given: Mapping[str, Any], pipeline: str) -> dict[str, Any]:
    refuse_what_is_missing(given)
    values = dict(allowed_values(given))
    settings: dict[str, Any] = {}
    for cluster in ("train", "infer"):
        devices = [mapping(given[place], place) for place in PLACES[cluster] if place in given]
        if not devices:
            raise BadInput(f"{' or '.join(PLACES[cluster])} is missing; name the devices")
        if devices[0] != devices[-1]:
            raise BadInput(f"{' and '.join(PLACES[cluster])} differ: {devices[0]} and {devices[-1]}")
        settings[f"{pipeline}.{cluster}"] = devices[0]
    most = max(device for devices in settings.values() for device in devices) + 1
    settings |= {f"{pipeline}.{name}": values[name] for name in ("tp", "infer_tp", "steps") if name in values}
    adapters = adapter_settings(given)
    settings |= {f"{pipeline}.{name}": value for name, value in adapters.items()}
    if "sleep_level" in values:
        settings["sleep_level"] = values["sleep_level"]
    # The window of an asynchronous loop: versions between generation and training. That of adapters follows from their number.
    if "ratio" in values and not adapters:
        settings[f"{pipeline}.window"] = -int(-values["ratio"] // 1)
    elif "async" in values and not adapters:
        settings[f"{pipeline}.window"] = values.get("age", 1) if values["async"] else 0
    # `offload_nccl`, absent or true: another value was refused.
    return settings | {"release_groups": True, "devices": max(most, values.get("devices", 0))}


def adapter_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file's adapters, which must be alike; none without adapters."""
    by_cluster = adapters_of(given)
    if not by_cluster:
        return {}
    trained = by_cluster.get("actor_train", {})
    for cluster, others in by_cluster.items():
        if others.keys() != trained.keys():
            raise BadInput(
                f"{cluster} has the adapters {sorted(others)}, and actor_train {sorted(trained)}; name the same"
            )
    for key, value in given.items():
        if value is True and (why := NOT_WITH_ADAPTERS.get(key.rpartition(".")[2])):
            raise BadInput(f"{key}=true is not possible with adapters: it {why}; use false")
    refuse_another_base(given)
    return {"adapters": len(trained), **common_options(by_cluster)}


def adapters_of(given: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The options of each adapter that a cluster has, by their keys in the file."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for key, value in given.items():
        if (match := ADAPTER.fullmatch(key)) is None:
            continue
        adapters, name, option = match.groups()
        if option is None and value:
            what = "the options of an adapter" if name else "names of adapters, each with its options"
            raise BadInput(f"{key}={value!r} must be a mapping: {what}, such as lora_rank")
        if option is not None and option not in OPTIONS:
            raise BadInput(f"{key} is not known; an adapter has {', '.join(OPTIONS[:-1])} and {OPTIONS[-1]}")
        if name is not None:
            options = found.setdefault(adapters.partition(".")[0], {}).setdefault(name.strip('"'), {})
            options |= {} if option is None else {key: value}
    return found


def common_options(by_cluster: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The settings that all adapters have. One without an option, beside others of its cluster with it, is not like them."""
    settings: dict[str, Any] = {}
    for cluster, adapters in by_cluster.items():
        stated = {key.rpartition(".")[2] for options in adapters.values() for key in options}
        for name, options in adapters.items():
            if lacking := sorted(stated - {key.rpartition(".")[2] for key in options}):
                raise BadInput(
                    f"{cluster}: the adapter {name} has no {lacking[0]}, but another has it; those of a pipeline must be alike"
                )
            for key, value in options.items():
                option = key.rpartition(".")[2]
                if option == "lora_target":
                    option, value = "lora_targets", target_of(key, value)  # noqa: PLW2901 - as a setting has it
                if settings.setdefault(option, value) != value:
                    raise BadInput(
                        f"{key}={value}, but another adapter has {settings[option]}; those of a pipeline must be alike"
                    )
    return settings


def refuse_another_base(given: Mapping[str, Any]) -> None:
    """Adapters must be trained on the base on which replicas serve them."""
    base = next((normpath(str(given[place])) for place in BASE if given.get(place)), None)
    for key, value in given.items():
        if key not in OF_THE_TRAINER or not value:
            continue
        if base is None:
            why = f"cannot be compared with the base that replicas serve: name it as hf_checkpoint, or leave {key} out"
            raise BadInput(f"{key}={value} {why}")
        if normpath(str(value)) not in (base, f"{base}{CONVERTED}"):
            raise BadInput(
                f"{key}={value} is not the base that replicas serve ({base}), or the kit cannot tell that its weights are the same; "
                f"adapters must be trained on that base: leave {key} out, or name a converted base {base}{CONVERTED}"
            )


def target_of(key: str, value: Any) -> str:
    layers = TARGETS["all"] if value == "all-linear" else {*str(value).replace(" ", "").split(",")}
    targets = next((name for name, known_layers in TARGETS.items() if known_layers == layers), "")
    if not targets:
        raise BadInput(f"{key}={value!r} must be all-linear, or all layers of attention, of the MLP, or of both")
    return targets


def allowed_values(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A file's value for each of `ALLOWED`, from the first key that has it."""
    for name, (is_allowed, sentence) in ALLOWED.items():
        place = next((place for place in PLACES[name] if given.get(place) is not None), None)
        if place is not None:
            if not is_allowed(given[place]):
                raise BadInput(f"{place}={given[place]!r} {sentence}")
            yield name, given[place]


def refuse_what_is_missing(given: Mapping[str, Any]) -> None:
    for cluster in CLUSTERS:
        off = given.get(f"{cluster}.offload_nccl", given.get("offload_nccl", True))
        if off is False and mapping(given.get(f"{cluster}.device_mapping"), cluster):
            raise BadInput(
                f"{cluster}.offload_nccl=false: a cluster on shared devices must release its communicators; use true"
            )
    for key, value in given.items():
        if key.endswith(".strategy_args.strategy_name") and str(value).startswith("deepspeed"):
            better = str(value).replace("deepspeed", "megatron", 1)
            raise BadInput(f"{key}={value}: DeepSpeed is not part of this lab, which has Megatron; use {better}")
        if REWARDS.fullmatch(key) and mapping(value, key):
            raise BadInput(f"{key}={value}: rewards are computed on the host; remove the devices of the reward cluster")


def mapping(value: Any, place: str) -> list[int]:
    """Devices as a list, as a text such as "[0, 1, ]", or as "list(range(0, 4))"."""
    if value is None:
        return []
    if isinstance(value, str):
        match = RANGE.fullmatch(value.strip())
        if match:
            return [*range(*(int(bound) for bound in match.groups() if bound is not None))]
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            value = None
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(device) is int for device in value):
        raise BadInput(f"{place}={value!r} must be a list of devices, such as [0, 1]")
    return [*value]
