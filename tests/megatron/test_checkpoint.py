"""Checkpoint folders: what config.json may contain, files that round-trip byte for byte, logits compared with those of transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kit.errors import BadInput
from kit.megatron.config import Geometry, ModelConfig, check, read_geometry
from kit.megatron.shards import WEIGHTS, Folder, _prepared
from kit.train.plain import initial_weights
from kit.world import World
from tests.worlds import world_of

GEOMETRY = Geometry(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn=96,
    vocab=130,
    rope_base=500_000,
    qkv_bias=True,
    norm_eps=1e-5,
    seq=64,
)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
NOT_SAID = object()
NEWER = {"rope_theta": NOT_SAID, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"model_type": "llama"}, 'model_type "llama": the kit supports only "qwen2"'),
    "experts": ({"model_type": "qwen2_moe"}, 'model_type "qwen2_moe"'),
    "classifier": ({"architectures": ["Qwen2ForSequenceClassification"]}, 'architectures \\["Qwen2ForSeq'),
    "untied": ({"tie_word_embeddings": False}, "tie_word_embeddings false: the kit supports only true"),
    "untied-unsaid": ({"tie_word_embeddings": NOT_SAID}, "tie_word_embeddings null"),
    "window": ({"use_sliding_window": True}, "use_sliding_window true"),
    "window-of-layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*sliding_attention"),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling .*yarn.*: .* only plain rotary positions"),
    "newer-yarn": (
        {**NEWER, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
        "rope_parameters .*only plain rotary positions",
    ),
    "part-turned": (
        {**NEWER, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e6}},
        "rope_parameters .*partial_rotary_factor.*only plain rotary positions",
    ),
    "two-bases": ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta \\[500000.0, 1000000.0\\]: it must have one"),
    "no-base": ({"rope_theta": NOT_SAID}, "rope_theta \\[\\]: it must have one"),
    "part-of-a-base": ({"rope_theta": 0.5}, "a whole number"),
    "wide-heads": ({"head_dim": 32}, "head_dim 32: a head must be an even hidden_size / num_attention_heads wide"),
    "odd-heads": ({"num_attention_heads": 64, "num_key_value_heads": 64}, "a head must be an even"),
    "unequal-groups": ({"num_key_value_heads": 3}, "num_key_value_heads 3: the second must divide the first"),
    "no-layers": ({"num_hidden_layers": 0}, "num_hidden_layers 0: it must be a whole number of at least 1"),
    "no-width": ({"hidden_size": NOT_SAID}, "hidden_size null: it must be a whole number"),
    "text-for-eps": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps .*: it must be a number above 0"),
}
# Bits that arithmetic would change: signed zeros and subnormals, infinity, NaN with a payload.
ODD_BITS = {
    "BF16": [0x8000, 0x0001, 0x8001, 0x7F80, 0x7FC1, 0x7FA1],
    "F32": [0x80000000, 0x00000001, 0x80000001, 0x7F800000, 0x7FC00001, 0x7FA00001],
}


def say(folder: Path, **other: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = {key: value for key, value in {**CONFIG, **other}.items() if value is not NOT_SAID}
    (folder / "config.json").write_text(json.dumps(text, indent=1))
    return folder


def make(folder: Path, dtype: str = "BF16", *, files: int = 1, odd: bool = True, **other: Any) -> Path:
    """Write a checkpoint folder of random weights; with more than one file, tensors are dealt out in turn."""
    say(folder, **other)
    geometry = read_geometry(folder)
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, value in initial_weights(geometry, 3).items():
        filled = value + 0.1 * torch.randn(value.shape, generator=generator)  # also norms and biases
        weights[name] = filled.to(WEIGHTS[dtype])
        if odd and dtype in ODD_BITS:
            bits = {2: torch.int16, 4: torch.int32}[weights[name].itemsize]
            patterns = torch.tensor(ODD_BITS[dtype], dtype=torch.int64).to(bits)
            weights[name].view(bits).view(-1)[: len(patterns)] = patterns
    names = [f"model-{at + 1:05}-of-{files:05}.safetensors" for at in range(files)]
    if files == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        homes = {name: names[at % files] for at, name in enumerate(weights)}
        for each in names:
            mine = {name: weights[name] for name, home in homes.items() if home == each}
            save_file(mine, folder / each, {"format": "pt"})
        total = {"total_size": sum(value.nbytes for value in weights.values())}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": total, "weight_map": homes}))
    (folder / "merges.txt").write_text("a b\n")
    return folder


def same_files(one: Path, other: Path) -> list[str]:
    """Names of files that differ in any byte, or that only one folder has."""
    names = sorted({path.name for folder in (one, other) for path in folder.iterdir()})
    return [name for name in names if name not in filecmp.cmpfiles(one, other, names, shallow=False)[0]]


@pytest.mark.parametrize("other", [{}, NEWER, {"head_dim": 16}, {"layer_types": ["full_attention"] * 2}])
def test_the_geometry_is_what_config_json_says(tmp_path: Path, other: dict[str, Any]) -> None:
    assert read_geometry(say(tmp_path, **other)) == GEOMETRY


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_cannot_hold_is_one_sentence(tmp_path: Path, case: str) -> None:
    other, sentence = REFUSED[case]
    with pytest.raises(BadInput, match=f"config.json has .*{sentence}"):
        read_geometry(say(tmp_path, **other))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(None, "cannot be read: No such file"), ("{", "it is not valid JSON"), ("[1]", "it is not a JSON object")],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=sentence):
        read_geometry(tmp_path)


def test_a_job_takes_a_geometry_for_its_size() -> None:
    config = ModelConfig(size=GEOMETRY, layers=1)
    assert config.geometry == dataclasses.replace(GEOMETRY, layers=1)
    check(config, 1)
    with pytest.raises(BadInput, match=r"tp=4 does not divide 2 key-value heads of this job$"):
        check(ModelConfig(size=GEOMETRY, tp=4), 4)
    odd = dataclasses.replace(GEOMETRY, vocab=131)
    with pytest.raises(BadInput, match="tp=2 does not divide 131 rows of the vocabulary"):
        check(ModelConfig(size=odd, tp=2), 2)


world = world_of(2)


def ask(world: World, function: str, **arguments: Any) -> list[Any]:
    return world.call(f"tests.megatron.ranks.checkpoint:{function}", **arguments)


@pytest.mark.drawn(1, of="exports")
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("files", [1, 3])
def test_an_export_after_a_load_is_the_folder_byte_for_byte(
    world: World, tmp_path: Path, layout: dict[str, int], files: int
) -> None:
    folder = make(tmp_path / "in", files=files)
    to = tmp_path / "deep" / "out"
    assert ask(world, "there_and_back", folder=str(folder), to=str(to), dtype="bfloat16", **layout) == [[], []]
    assert same_files(folder, to) == []
    assert [path.name for path in to.parent.iterdir()] == ["out"]


@pytest.mark.drawn(1, of="dtypes")
@pytest.mark.parametrize(("dtype", "odd"), [("F32", True), ("F16", True), ("BF16", False)])
def test_a_job_in_float32_gives_narrower_files_back(world: World, tmp_path: Path, dtype: str, odd: bool) -> None:
    folder = make(tmp_path / "in", dtype, odd=odd)
    ask(world, "there_and_back", folder=str(folder), to=str(tmp_path / "out"), tp=2)
    assert same_files(folder, tmp_path / "out") == []


def test_what_is_exported_are_the_jobs_weights(world: World, tmp_path: Path) -> None:
    folder = make(tmp_path / "in", odd=False)
    name = "model.layers.1.self_attn.k_proj.weight"
    ask(world, "changed", folder=str(folder), to=str(tmp_path / "out"), name=name, dtype="bfloat16", pp=2)
    assert same_files(folder, tmp_path / "out") == ["model.safetensors"]
    one, other = Folder(folder), Folder(tmp_path / "out")
    assert [each for each in one if not torch.equal(one[each], other[each])] == [name]


def test_what_was_exported_can_still_leave_the_device(world: World, tmp_path: Path) -> None:
    folder = make(tmp_path / "in", odd=False)
    assert ask(world, "released", folder=str(folder), to=str(tmp_path / "out"), dtype="bfloat16") == ["", ""]


def shorten(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def add_head(folder: Path) -> None:
    weights = {name: value.clone() for name, value in Folder(folder).items()}
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights | head, folder / "model.safetensors")


def quantise(folder: Path) -> None:
    weights = {name: value.to(torch.int8) for name, value in Folder(folder).items()}
    save_file(weights, folder / "model.safetensors")


@pytest.mark.drawn(1, of="folders")
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        pytest.param(lambda folder: say(folder, rms_norm_eps=1e-6), "has norm_eps 1e-06 and the job 1e-05", id="eps"),
        pytest.param(lambda folder: say(folder, rope_theta=1e4), "has rope_base 10000 and the job 500000", id="rope"),
        pytest.param(shutil.rmtree, "config.json cannot be read: No such file", id="absent"),
        pytest.param(shorten, "model.safetensors is damaged: Error while deserializing header", id="short"),
        pytest.param(add_head, "unknown to this model: lm_head.weight", id="head"),
        pytest.param(quantise, "in I8: weights are one of F32, BF16, F16", id="int8"),
    ],
)
def test_a_folder_that_does_not_fit_changes_nothing(
    world: World, tmp_path: Path, spoil: Callable[[Path], Any], sentence: str
) -> None:
    folder, other = make(tmp_path / "in", odd=False), make(tmp_path / "other", odd=False)
    spoil(other)
    for rank in ask(world, "refused", folder=str(folder), others=[str(other)], to=str(tmp_path / "out"), tp=2):
        assert rank["load"].startswith("BadInput: ")
        assert sentence in rank["load"]
        assert rank["export"] == rank["load"]
        assert rank["changed"] == []
    assert not (tmp_path / "out").exists()


def test_a_folder_that_one_rank_lacks_is_refused_on_all(world: World, tmp_path: Path) -> None:
    folder = str(make(tmp_path / "in", odd=False))
    others = [folder, str(tmp_path / "none")]
    found = ask(world, "refused", folder=folder, others=others, to=str(tmp_path / "out"), pp=2)
    for rank in found:
        assert rank["load"].startswith(f"BadInput: rank 1: {others[1]}/config.json cannot be read")
        assert rank["changed"] == []
    assert found[0] == found[1]


def test_an_export_goes_to_a_new_folder(world: World, tmp_path: Path) -> None:
    folder = str(make(tmp_path / "in", odd=False))
    for rank in ask(world, "refused", folder=folder, others=[folder], to=folder, pp=2):
        assert rank["load"] == ""
        assert "is there and not empty: an export goes to a new folder" in rank["export"]


def test_a_disk_that_is_full_ends_an_export_on_every_rank_with_nothing_left(world: World, tmp_path: Path) -> None:
    folder = str(make(tmp_path / "in", odd=False))
    (tmp_path / "to").mkdir()
    to = str(tmp_path / "to" / "out")
    for rank in ask(world, "refused", folder=folder, others=[folder], to=to, limit=20_000, pp=2):
        assert "KitError: rank 0: " in rank["export"]
        assert "model.safetensors cannot be written: File too large" in rank["export"]
    assert list((tmp_path / "to").iterdir()) == []


def break_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    listed = json.loads(path.read_text())
    change(listed["weight_map"])
    path.write_text(json.dumps(listed))


NORM = "model.norm.weight"
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "neither": (lambda f: (f / "model.safetensors.index.json").unlink(), "has neither of model.safetensors and"),
    "both": (lambda f: shutil.copy(f / "model-00001-of-00002.safetensors", f / "model.safetensors"), "has both of"),
    "no-map": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "it has no weight_map"),
    "missing": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        "lists model-00002-of-00002.safetensors, which",
    ),
    "elsewhere": (lambda f: break_index(f, lambda m: m.update({NORM: "../x"})), "is not the name of a file beside it"),
    "lacks": (lambda f: break_index(f, lambda m: m.pop(NORM)), f"do not agree about {NORM}"),
    "more": (lambda f: break_index(f, lambda m: m.update(more=m[NORM])), "do not agree about more"),
    "empty": (
        lambda f: os.truncate(f / "model-00001-of-00002.safetensors", 0),
        "00001-of-00002.safetensors is damaged",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(tmp_path: Path, case: str) -> None:
    folder = make(tmp_path / "in", files=2)
    spoil, sentence = DAMAGED[case]
    spoil(folder)
    with pytest.raises(BadInput, match=sentence):
        Folder(folder)


def test_an_export_takes_along_what_describes_the_model_and_nothing_else(tmp_path: Path) -> None:
    folder, partial = make(tmp_path / "in"), tmp_path / "partial"
    (folder / "optimizer.pt").write_bytes(b"of the job")
    (folder / "folder.json").mkdir()
    source = Folder(folder)
    with contextlib.ExitStack() as files:
        for name, writer in _prepared(files, source, tmp_path / "out", partial).items():
            writer.put(name, source[name])
    assert {path.name for path in partial.iterdir()} == {"config.json", "merges.txt", "model.safetensors"}


def test_ranks_without_the_package_are_reported_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(BadInput, match="the ranks' Python lacks the package safetensors"):
        Folder(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders that transformers wrote of one random model, tokens, and the model's logits on them."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    base = tmp_path_factory.mktemp("reference")
    torch.manual_seed(11)
    made = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=160,
            vocab_size=258,
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
            rms_norm_eps=1e-4,
            tie_word_embeddings=True,
        )
    ).eval()
    with torch.no_grad():
        for param in made.parameters():  # otherwise biases are zero and norms one
            param.copy_((param + 0.1 * torch.randn(param.shape)).bfloat16())
    tokens = torch.randint(0, 258, (2, 48))
    torch.save(tokens, base / "tokens.pt")
    found: dict[str, Any] = {"tokens": str(base / "tokens.pt")}
    for dtype in ("bfloat16", "float32", "float64"):  # the same weights in each dtype
        if dtype != "float64":
            found[f"{dtype} folder"] = base / dtype
            made.to(getattr(torch, dtype)).save_pretrained(
                base / dtype, max_shard_size="150KB" if dtype == "bfloat16" else "1GB"
            )
        saved = base / (dtype if dtype != "float64" else "float32")
        with torch.no_grad():
            model = transformers.Qwen2ForCausalLM.from_pretrained(saved, dtype=getattr(torch, dtype))
            found[dtype] = model(tokens).logits.double()
    return found


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def scatter(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """RMS of the differences relative to the RMS of the values."""
    return float(((found.double() - wanted).square().mean() / wanted.square().mean()).sqrt())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [("float32", 2e-6), ("bfloat16", 4e-2)], ids=lambda each: each[0])
def test_logits_are_those_of_transformers(
    world: World, reference: dict[str, Any], tmp_path: Path, dtype: tuple[str, float], tp: int
) -> None:
    kind, limit = dtype
    out, folder = tmp_path / "logits.pt", reference[f"{kind} folder"]
    ask(world, "logits", folder=str(folder), tokens=reference["tokens"], out=str(out), dtype=kind, tp=tp)
    found, theirs, exact = torch.load(out), reference[kind], reference["float64"]
    assert apart(found, theirs) <= limit
    assert scatter(found, exact) <= 1.25 * scatter(theirs, exact)  # only its own rounding separates them


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folders_of_transformers_come_back_byte_for_byte(
    world: World, reference: dict[str, Any], tmp_path: Path, dtype: str
) -> None:
    folder = reference[f"{dtype} folder"]
    assert (folder / "model.safetensors.index.json").exists() == (dtype == "bfloat16")
    ask(world, "there_and_back", folder=str(folder), to=str(tmp_path / "out"), dtype=dtype, tp=2)
    assert same_files(folder, tmp_path / "out") == []
