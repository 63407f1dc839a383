"""A wrong config is refused in one sentence, before anything is made."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch

from kit.errors import BadInput
from kit.labs import discover as module
from kit.labs.definition import Definition, LabConfig, Option, as_settings
from kit.labs.discover import check_target, complaints, configure, discover, find, find_fault, from_text, validate
from kit.machine import has_gpu_driver
from kit.results.old import CODE, SETTINGS, Renamed, current_code, current_settings
from kit.target import load, load_callable, replaced


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"cycels": 3}, "lab 'smoke' has no setting 'cycels'; did you mean 'cycles'? allowed are: cycles, device,"),
        ({"ranks": "two"}, "ranks must be a whole number from 1 to 4096, not 'two'"),
        ({"ranks": 2.5}, "ranks must be a whole number from 1 to 4096, not 2.5"),
        ({"ranks": True}, "ranks must be a whole number from 1 to 4096, not True"),
        ({"ranks": None}, "ranks must be a whole number from 1 to 4096, not None"),
        ({"cycles": 0}, "cycles must be a whole number from 1 to 1000, not 0"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, not 'tpu'"),
        ({"timeout_s": float("inf")}, "timeout_s must be a number from 0.1 to 86400, not inf"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number from 0.1 to 86400, not nan"),
        ({"cycles": {1}}, "settings must be plain values (numbers, text, true, false, null, lists); cycles is not"),
        ({"cycles": 0, "size": 0}, "cycles must be a whole number from 1 to 1000, not 0; size must be a whole number"),
    ],
)
def test_sentences(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        validate(find("smoke"), given)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_whole_number_may_stand_for_a_number() -> None:
    assert validate(find("smoke"), {"timeout_s": 5}).timeout_s == 5.0


def test_rules_among_fields_null_and_lists(own: Definition) -> None:
    with pytest.raises(BadInput, match=r"^low \(3\) must not be above high \(2\)$"):
        validate(own, {"low": 3})
    with pytest.raises(BadInput, match=r"^ratio must be a number from 0 to 1 or null, not 2$"):
        validate(own, {"ratio": 2})
    with pytest.raises(BadInput, match=r"^high must be a whole number of at least 1, not 0$"):
        validate(own, {"high": 0})
    assert validate(own, {"ratio": None, "words": ["a"]}).words == ("a",)  # type: ignore[attr-defined]


def test_more_ranks_than_the_machine_can_carry() -> None:
    with pytest.raises(BadInput, match="4096 ranks"):
        configure(find("smoke"), {"ranks": 4096}, None)


def test_what_a_lab_itself_refuses(own: Definition) -> None:
    def fits(config: object) -> None:
        raise BadInput(f"{config.ranks} ranks need 2 TiB")  # type: ignore[attr-defined]

    with pytest.raises(BadInput, match="2 ranks need 2 TiB"):
        configure(dataclasses.replace(own, fits=fits), {}, None)


def test_a_device_that_is_not_there() -> None:
    if has_gpu_driver():
        pytest.skip("this machine has a GPU driver")
    with pytest.raises(BadInput, match="device=cuda needs a GPU driver"):
        configure(find("smoke"), {"device": "cuda"}, None)


def test_a_memory_snapshot_of_ranks_on_the_cpu() -> None:
    with pytest.raises(BadInput, match="memory_snapshot=true needs CUDA: PyTorch records no memory history on the CPU"):
        configure(find("smoke"), {"device": "cpu", "memory_snapshot": True}, None)
    assert configure(find("smoke"), {"memory_snapshot": True}, None).memory_snapshot  # reported after the run


def test_an_interpreter_without_torch() -> None:
    with pytest.raises(BadInput, match="python= names /nowhere/python"):
        configure(find("smoke"), {"python": "/nowhere/python"}, None)


def test_text_from_the_command_line(own: Definition) -> None:
    values = from_text(
        own, {"python": "3", "ranks": "3", "words": '["a"]', "ratio": "null", "do": "raise", "other": "x"}
    )
    assert values == {"python": "3", "ranks": 3, "words": ["a"], "ratio": None, "do": "raise", "other": "x"}


def test_what_a_fault_needs_stands_under_what_was_given(own: Definition) -> None:
    fault = find_fault(own, "breaks")
    assert configure(own, {}, fault).do == "raise"  # type: ignore[attr-defined]
    assert configure(own, {"do": "nothing"}, fault).do == "nothing"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lab", "fault", "given", "sentence"),
    [
        ("sync", "torn-read", {"refresh": "paused"}, "'torn-read' cannot be detected with refresh=paused; use refresh=staged"),
        ("offload", "leak-gloo", {"mode": "manual"}, "'leak-gloo' cannot be detected with mode=manual; use mode=exact or abort"),
        ("offload", "kept-handle", {"mode": "official"}, "mode=official; use mode=exact or abort"),
        ("offload", "leak-device", {"groups": False}, "'leak-device' cannot be detected with groups=false; use groups=true"),
        ("share", "no-floor", {"planner": "fifo"}, "'no-floor' cannot be detected with planner=fifo; use planner=gap-ratio or home"),
        ("offload", "alias-broken", {"mode": "manual"}, "mode=manual; use mode=exact or abort or suspend"),
        ("offload", "slow-leak", {"mode": "official"}, "mode=official; use mode=exact or abort or suspend"),
        ("sync", "leaked-segment", {"transport": "broadcast"}, "with transport=broadcast; use transport=shm"),
    ],
)  # fmt: skip
def test_a_fault_where_its_check_could_not_tell(lab: str, fault: str, given: dict[str, Any], sentence: str) -> None:
    found = find(lab)
    with pytest.raises(BadInput, match=sentence):
        configure(found, given, find_fault(found, fault))
    assert set(complaints(found, given, find_fault(found, fault))) == set(given)
    configure(found, given, None)


@pytest.mark.parametrize(
    ("lab", "fault", "given", "reason"),
    [
        ("offload", "slow-leak", {"cycles": 2}, "memory_slope is not measured"),
        ("offload", "bit-flip", {"hashes": False}, "tensors_restored is not measured (hashes=false compares no tensors)"),
        ("offload", "double-copy", {"size": "tiny"}, "reload_peak is not measured"),
        ("offload", "double-copy", {"weights": False, "grads": False, "optimizer": False}, "no tensor is released"),
        ("offload", "leaked-file", {"cycles": 2}, "nothing_piles_up is not measured (needs at least 3 cycles)"),
        ("offload", "slow-at-last", {"cycles": 2}, "time_steady is not measured"),
        ("split", "per-chunk-finalize", {"chunks": [1]}, "chunk_invariance is not measured (only one number of chunks was run"),
        ("split", "mask-not-shifted", {"ep": 2, "experts": 4, "reduce": "mean"}, "oracle is not measured (the float64"),
    ],
)  # fmt: skip
def test_a_fault_that_its_check_cannot_see_with_these_settings(
    lab: str, fault: str, given: dict[str, Any], reason: str
) -> None:
    found = find(lab)
    with pytest.raises(
        BadInput, match=f"fault '{fault}' cannot be detected with these settings: .*{re.escape(reason)}"
    ):
        configure(found, given, find_fault(found, fault))
    configure(found, given, None)


@pytest.mark.parametrize("lab", discover().labs.values(), ids=lambda lab: lab.name)
def test_a_fault_names_a_check_that_its_own_settings_can_answer(lab: Definition) -> None:
    checks = {check.name: check for check in lab.all_rules()}
    for fault in lab.faults:
        if "cpu" in fault.devices:
            assert checks[fault.caught_by].unanswerable(as_settings(validate(lab, fault.set))) is None


@pytest.mark.parametrize("lab", discover().labs.values(), ids=lambda lab: lab.name)
def test_what_a_fault_sets_is_what_it_needs(lab: Definition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_VLLM_PYTHON", "python")  # engines, as if they were installed
    monkeypatch.setattr("kit.labs.served.python_has", lambda path, module: True)
    for fault in lab.faults:
        if "cpu" in fault.devices:
            assert complaints(lab, {}, fault) == {}
        for name, values in fault.needs.items():
            for value in values:
                ranks = {"ranks": value} if name == "cp" else {}  # which share the columns of a row
                assert as_settings(validate(lab, {**fault.set, **ranks, name: value}))[name] == value


@pytest.mark.parametrize("lab", discover().labs.values(), ids=lambda lab: lab.name)
def test_a_fault_replaces_code_that_exists(lab: Definition) -> None:
    assert len({fault.name for fault in lab.faults}) == len(lab.faults)
    for fault in lab.faults:
        with replaced(fault.patch):
            assert all(load(place) == load(wrong) for place, wrong in fault.patch.items())


def test_settings_of_older_runs_name_code_where_it_was() -> None:
    for lab, setting, was in (
        ("split", "loss", "kit.labs.split.ranks.losses:of_recipe"),
        ("share", "pipeline", "kit.share.own:Pipeline"),
    ):
        assert configure(find(lab), {setting: was}, None) == configure(find(lab), {}, None)
        assert load_callable(current_code(was))
    assert not CODE.keys() & CODE.values()


@pytest.mark.parametrize(("lab", "name"), [(lab, name) for lab, names in SETTINGS.items() for name in names])
def test_settings_that_no_longer_exist_are_ignored_with_a_sentence(lab: str, name: str) -> None:
    with pytest.warns(Renamed, match=f"setting {name} of lab '{lab}' no longer exists and is ignored: "):
        assert validate(find(lab), {name: False}) == validate(find(lab), {})


def test_so_are_those_of_a_nested_config_and_of_a_stored_run() -> None:
    share = find("share")
    with pytest.warns(Renamed, match=r"setting b\.temperature of lab 'share' no longer exists and is ignored: "):
        assert validate(share, {"b.temperature": 2.0, "b.steps": 4}) == validate(share, {"b.steps": 4})
    stored = {"temperature": 0.5, "b": {"temperature": 2.0, "steps": 4}, "a": {"temperature": 1.0}}
    assert current_settings("share", stored) == {"b": {"steps": 4}, "a": {}}


def test_an_unknown_fault() -> None:
    with pytest.raises(BadInput, match="no fault 'leaked'; did you mean 'leaked-group'"):
        find_fault(find("smoke"), "leaked")


@pytest.mark.drawn(2, of="code")
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("own_lab", "must be 'module:attr'"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("own_lab:nothing", "no attribute 'nothing'|cannot be loaded"),
        ("own_lab:SOURCE_OF_NOTHING.x", "cannot be loaded"),
        ("os:sep", "os:sep is not callable"),
    ],
)
def test_code_that_the_ranks_cannot_load(own: Definition, target: str, why: str) -> None:
    import sys

    with pytest.raises(BadInput, match=why):
        check_target("implementation", target, sys.executable, {})


@pytest.mark.parametrize(
    ("lab", "own", "why"),
    [
        ("stream", "sampler=nope:X", "ModuleNotFoundError: No module named 'nope'"),
        ("stream", "sampler=json:Missing", "AttributeError: module 'json' has no attribute 'Missing'"),
        ("stream", "sampler=raises_on_import:X", "RuntimeError: boom (raises_on_import.py, line 1)"),
        ("stream", "sampler=ends_on_import:X", "SystemExit: 4 (ends_on_import.py, line 1)"),
        ("stream", "implementation=nope:X", "ModuleNotFoundError: No module named 'nope'"),
        ("share", "planner=nope:X", "ModuleNotFoundError: No module named 'nope'"),
    ],
)
def test_code_that_this_process_cannot_load_is_refused_by_its_setting(
    lab: str, own: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('boom')\n")
    (tmp_path / "ends_on_import.py").write_text("raise SystemExit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    setting, _, target = own.partition("=")
    sentence = f"{own} cannot be loaded here: {why}"
    for simulated in (False, True):
        given = {setting: target, "simulated": simulated}
        with pytest.raises(BadInput) as caught:
            configure(find(lab), given, None)
        assert str(caught.value) == sentence
        assert complaints(find(lab), given, None) == {setting: sentence}


def test_code_that_the_ranks_can_load(own: Definition, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds where the kit is not installed, too: the probe makes it importable, as on the ranks."""
    import sys

    monkeypatch.delenv("PYTHONPATH", raising=False)
    check_target("implementation", "own_lab:Phases", sys.executable, {})


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nothing", "must be 'module:attr'"),
        ("no_such_module:Core", "ModuleNotFoundError"),
        ("json:nothing", "nothing"),
        ("json:__doc__", "TypeError"),
    ],
)
def test_code_for_the_notebook_side_is_looked_for_here(target: str, why: str) -> None:
    check_target("sampler", "json:loads")
    with pytest.raises(BadInput, match=why):
        check_target("sampler", target)


def test_code_is_looked_for_with_the_worlds_own_environment(own: Definition, tmp_path: Path) -> None:
    """The ranks of a given World find the code through its `env={"PYTHONPATH": ...}`."""
    import sys

    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "elsewhere.py").write_text("def own(ctx): ...\n")
    world = SimpleNamespace(python=sys.executable, env={"PYTHONPATH": str(tmp_path / "deep")})
    with pytest.raises(BadInput, match="No module named 'elsewhere'"):
        configure(dataclasses.replace(own, config=Ways), {"way": "elsewhere:own"}, None)
    config = configure(dataclasses.replace(own, config=Ways), {"way": "elsewhere:own"}, None, world=world)  # type: ignore[arg-type]
    assert config.way == "elsewhere:own"  # type: ignore[attr-defined]


def test_a_lab_on_megatron_needs_a_python_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one sentence before any rank starts, with the line to use where another Python of the machine has Megatron."""
    import sys

    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho '[true, false, [3, 12]]'\n")
    bare.chmod(0o755)
    monkeypatch.setenv("KIT_PYTHON", str(bare))
    sentence = (
        f"^lab .offload. needs megatron\\.core, which the ranks' Python {bare} does not have; "
        f"use one that has it: export KIT_PYTHON={sys.executable}$"
    )
    with pytest.raises(BadInput, match=sentence):
        configure(find("offload"), {"device": "cpu"}, None)
    assert configure(find("smoke"), {"device": "cpu"}, None).ranks == 2  # needs no Megatron
    monkeypatch.setattr("kit.world.asked.candidates", list)
    with pytest.raises(BadInput, match=r"does not have; install megatron-core there$"):
        configure(find("offload"), {"device": "cpu"}, None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ways(LabConfig):
    way: Annotated[str, Option("how", target=True, names=("auto", "shm"))] = "auto"


def test_only_what_is_no_name_is_asked_of_the_ranks_python(own: Definition, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "kit.labs.discover.check_target", lambda name, target, *_, **__: asked.append(target)
    )  # a stand-in
    lab = dataclasses.replace(own, config=Ways)
    for way in ("auto", "shm", "own_lab:Phases"):
        assert configure(lab, {"way": way}, None).way == way  # type: ignore[attr-defined]
    assert asked == ["own_lab:Phases"]


def test_a_value_that_is_neither_a_name_nor_code(own: Definition) -> None:
    with pytest.raises(BadInput, match=r"^way must be one of auto, shm, or module:attr, not 'shmm'$"):
        configure(dataclasses.replace(own, config=Ways), {"way": "shmm"}, None)
    with pytest.raises(BadInput, match="No module named 'no_such_module'"):
        configure(dataclasses.replace(own, config=Ways), {"way": "no_such_module:x"}, None)


@pytest.mark.parametrize(
    ("given", "on_a_box_without_a_driver", "with_one"),
    [
        ({}, "float32", "bfloat16"),
        ({"dtype": "auto"}, "float32", "bfloat16"),
        ({"device": "cpu"}, "float32", "float32"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
    ],
)
def test_the_type_of_weights_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: dict[str, Any],
    on_a_box_without_a_driver: str,
    with_one: str,
) -> None:
    """The driver is made up: its file is the sign that there is one."""
    file = tmp_path / "version"
    monkeypatch.setattr("kit.machine.GPU_DRIVERS", (file,))

    def types() -> set[str]:
        return {as_settings(validate(find(lab), given))["dtype"] for lab in ("offload", "split", "sync")}

    assert types() == {on_a_box_without_a_driver}
    file.touch()
    assert types() == {with_one}


def test_faults_of_exact_numbers_are_looked_for_in_float32_also_on_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr("kit.machine.GPU_DRIVERS", (tmp_path / "version",))
    split = find("split")
    assert {as_settings(validate(split, fault.set))["dtype"] for fault in split.faults} == {"float32"}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"dtype": "float32"}, True),
        ({}, False),
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "float32", "device": "cpu"}, False),
    ],
)
def test_float32_that_the_environment_turns_into_tf32_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], refused: bool
) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr("kit.machine.GPU_DRIVERS", (tmp_path / "version",))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    message = complaints(find("split"), given, None)
    why = "NVIDIA_TF32_OVERRIDE=1 makes float32 products TF32, about 1e-3 off; unset it or use dtype=bfloat16"
    assert message == ({"dtype": why} if refused else {})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert complaints(find("split"), given, None) == {}


@pytest.mark.parametrize(
    ("given", "driver", "sentence"),
    [
        ({"device": "cpu"}, True, "routing=nccl2 needs NCCL, and ranks on the CPU have none; use torch or torchcomms"),
        ({}, False, "routing=nccl2 needs NCCL, and this machine has no GPU driver; use torch or torchcomms"),
    ],
)
def test_nccl2_needs_gpus(given: dict[str, Any], driver: bool, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_gpu_driver", lambda: driver)
    with pytest.raises(BadInput) as caught:
        configure(find("smoke"), {"routing": "nccl2", **given}, None)
    assert str(caught.value) == sentence
    assert complaints(find("smoke"), {"routing": "nccl2", **given}, None) == {"routing": sentence}


def test_nccl2_is_refused_where_the_ranks_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real torch is asked; the driver is made up. `assumed`: a torch with nccl2 binds ProcessGroupNCCL2 (pytorch/pytorch#188587)."""
    monkeypatch.setattr(module, "has_gpu_driver", lambda: True)
    if hasattr(torch.distributed, "ProcessGroupNCCL2"):
        pytest.skip("this torch has nccl2")
    with pytest.raises(BadInput) as caught:
        configure(find("smoke"), {"routing": "nccl2"}, None)
    assert str(caught.value) == (
        f"routing=nccl2 needs a torch with the backend nccl2, which the ranks' torch {torch.__version__} lacks; use torch or torchcomms"
    )
    monkeypatch.setattr(module, "ASK_NCCL2", "print('2.14.0', True)")
    assert configure(find("smoke"), {"routing": "nccl2"}, None).routing == "nccl2"


def test_a_choice_that_looks_like_a_number_is_the_text_that_it_is() -> None:
    found = from_text(find("share"), {"gate": "1", "sleep_level": "1", "ranks": "6"})
    assert found == {"gate": 1, "sleep_level": 1, "ranks": 6}
    assert configure(find("share"), found | {"simulated": True, "ranks": 0}, None).gate == "1"
    with pytest.raises(BadInput, match=r"gate must be one of .*, not 7"):
        configure(find("share"), {"gate": 7}, None)


@pytest.mark.parametrize("text", ["1,2", "[1,2]", "1, 2"])
def test_a_list_needs_no_brackets_on_the_command_line(text: str) -> None:
    assert from_text(find("split"), {"chunks": text}) == {"chunks": [1, 2]}
