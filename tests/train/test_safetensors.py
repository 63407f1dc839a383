"""The safetensors format: what is written is what the format's own library writes and reads, and damaged files are refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.errors import BadInput, KitError
from kit.train.safetensors import DTYPES, File, Folder, Writer, make_header, write

ROOT = Path(__file__).parents[2]
SHAPES = ((3,), (0,), (), (2, 3))
PAIRED = torch.float4_e2m1fn_x2


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def of_every_type() -> dict[str, torch.Tensor]:
    """Tensors of every type, of random bytes; an odd number of odd widths, so that places are of all kinds."""
    generator = torch.Generator().manual_seed(2)
    made = {}
    for kind, dtype in DTYPES.items():
        for shape in SHAPES:
            if dtype == PAIRED and not shape:
                continue
            high = 2 if dtype == torch.bool else 256
            count = torch.Size(shape).numel() * dtype.itemsize
            given = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
            made[f"{kind} {shape}"] = given.view(dtype).view(shape)
    return made


def test_every_type_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    made = of_every_type()
    write(tmp_path / "a", made, {"format": "pt"})
    found = File(tmp_path / "a")
    assert found.keys() == made.keys()
    assert found.header.metadata == {"format": "pt"}
    for name, tensor in made.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


@pytest.mark.parametrize("metadata", [None, {"format": 'p"\n\u00e9\u0001'}])
def test_files_are_those_of_the_formats_own_library(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    library = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")
    made = of_every_type()
    write(tmp_path / "ours", made, metadata)
    library.save_file(made, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    read = library.load_file(tmp_path / "ours")
    assert {name: raw(value) for name, value in read.items()} == {name: raw(value) for name, value in made.items()}


def test_tensors_do_not_have_to_be_contiguous(tmp_path: Path) -> None:
    made = torch.arange(6).view(2, 3).T
    write(tmp_path / "a", {"x": made})
    assert torch.equal(File(tmp_path / "a")["x"], made)


def test_a_read_tensor_is_private_and_outlives_its_file(tmp_path: Path) -> None:
    write(tmp_path / "a", {"x": torch.zeros(4)})
    before = (tmp_path / "a").read_bytes()
    found = File(tmp_path / "a")["x"]
    found += 1
    assert (tmp_path / "a").read_bytes() == before
    (tmp_path / "a").unlink()
    assert found.tolist() == [1.0] * 4


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A file of 64 MiB: one of its tensors costs this process some pages, not the file."""
    write(tmp_path / "a", {f"x{at}": torch.full((1 << 20,), float(at)) for at in range(16)})
    code = (
        "import sys, torch\nfrom kit.train.safetensors import File\n"
        "def used(): return int(open('/proc/self/smaps_rollup').read().split('Rss:')[1].split()[0])\n"
        "before = used()\nfile = File(sys.argv[1])\nfound = file['x9']\n"
        "assert found.sum() == 9 * 2**20\nprint(used() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert int(done.stdout) < 24 * 1024  # KiB: 4 MiB of the tensor, read-ahead, and what a first sum needs


def test_numbers_that_lie_across_their_own_multiples_are_read(tmp_path: Path) -> None:
    """Headers of some writers are not padded."""
    header = {"x": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}
    body = json.dumps(header).encode()
    body += b" " * (len(body) % 2 == 0)  # of odd length
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(body)) + body + struct.pack("<2d", 1.5, -2.0))
    found = File(tmp_path / "a")["x"]
    assert found.tolist() == [1.5, -2.0]
    assert found.data_ptr() % 8 == 0


def made_by_hand(path: Path, header: Any, data: int = 0, length: int | None = None) -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body) if length is None else length) + body + bytes(data))
    return path


def entry(start: int, end: int, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "it has 0 bytes, and a safetensors file has at least 8"),
    "cut-length": (lambda p: p.write_bytes(b"1234567"), "it has 7 bytes"),
    "cut-header": (lambda p: made_by_hand(p, {}, length=900), "its header would be 900 bytes long, in a file of 10"),
    "huge-header": (lambda p: made_by_hand(p, {}, length=2**64 - 1), "its header would be 18446744073709551615 bytes"),
    "cut": (lambda p: made_by_hand(p, {"x": entry(0, 8)}, 7), "it has 75 bytes, and by its header 76"),
    "too-long": (lambda p: made_by_hand(p, {"x": entry(0, 8)}, 9), "it has 77 bytes, and by its header 76"),
    "no-json": (lambda p: made_by_hand(p, b"{x"), "its header is not a JSON object$"),
    "no-text": (lambda p: made_by_hand(p, b"\xff\xfe"), "its header is not a JSON object$"),
    "deep": (lambda p: made_by_hand(p, b"[" * 100_000), "its header is not a JSON object$"),
    "no-object": (lambda p: made_by_hand(p, [1]), "its header is not a JSON object"),
    "metadata": (
        lambda p: made_by_hand(p, {"__metadata__": {"a": 1}}),
        "not a JSON object with strings in __metadata__",
    ),
    "twice": (lambda p: made_by_hand(p, b'{"x": 1, "x": 1}'), "its header is not a JSON object: a name appears twice"),
    "overlap": (
        lambda p: made_by_hand(p, {"x": entry(0, 8), "y": entry(7, 12)}, 12),
        "y begins at byte 7 and overlaps with x, which ends at 8",
    ),
    "hole": (
        lambda p: made_by_hand(p, {"y": entry(9, 12), "x": entry(0, 8)}, 12),
        "y begins at byte 9 and leaves a hole behind x, which ends at 8",
    ),
    "late": (
        lambda p: made_by_hand(p, {"x": entry(1, 2)}, 2),
        "x begins at byte 1 and leaves a hole behind the header",
    ),
    "type": (
        lambda p: made_by_hand(p, {"x": entry(0, 3, "F6_E2M3", [4])}, 3),
        'x has the type "F6_E2M3", which is not one',
    ),
    "type-of-type": (lambda p: made_by_hand(p, {"x": entry(0, 3, ["U8"])}, 3), 'x has the type \\["U8"\\], which is'),
    "size": (
        lambda p: made_by_hand(p, {"x": entry(0, 8, "F32", [3])}, 8),
        r"x has data_offsets \[0, 8\], and \(3,\) of F32 are 12 bytes",
    ),
    "backwards": (lambda p: made_by_hand(p, {"x": entry(8, 0, "U8", [])}, 8), r"x has data_offsets \[8, 0\]"),
    "negative": (
        lambda p: made_by_hand(p, {"x": entry(0, 1, "U8", [-1, -1])}, 1),
        "that are not a list of whole numbers",
    ),
    "not-whole": (
        lambda p: made_by_hand(p, {"x": entry(0, 1, "U8", [True])}, 1),
        "that are not a list of whole numbers",
    ),
    "odd-pairs": (lambda p: made_by_hand(p, {"x": entry(0, 3, "F4", [2, 3])}, 3), "makes no whole bytes in a row"),
    "fields": (lambda p: made_by_hand(p, {"x": {"dtype": "U8"}}), "x must have dtype, shape and data_offsets"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, case: str) -> None:
    damage, sentence = DAMAGED[case]
    damage(tmp_path / "a")
    with pytest.raises(BadInput, match=f"a is damaged: .*{sentence}"):
        File(tmp_path / "a")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none cannot be read: No such file"):
        File(tmp_path / "none")


def test_what_the_format_does_not_have_is_not_written(tmp_path: Path) -> None:
    for name, value, sentence in (
        (
            "x",
            torch.zeros(1, dtype=torch.complex128),
            r"x is \(1,\) of torch.complex128, which the format does not have",
        ),
        ("__metadata__", torch.zeros(1), "cannot be named __metadata__"),
    ):
        with pytest.raises(BadInput, match=sentence):
            write(tmp_path / "a", {name: value})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(BadInput, match="exists already"):
        write(tmp_path / "a", {"x": torch.zeros(1)})
    assert (tmp_path / "a").read_text() == "mine"


def test_a_writer_takes_any_order_and_asks_for_all(tmp_path: Path) -> None:
    header = make_header({"x": (torch.int8, (2,)), "y": (torch.int8, (1,))})
    with Writer(tmp_path / "a", header) as writer:
        writer.put("y", torch.tensor([3], dtype=torch.int8))
        writer.put("x", torch.tensor([1, 2], dtype=torch.int8))
    assert (tmp_path / "a").read_bytes() == header.raw + bytes([1, 2, 3])
    with (
        pytest.raises(KitError, match="b is not complete: x was never written"),
        Writer(tmp_path / "b", header) as writer,
    ):
        writer.put("y", torch.tensor([3], dtype=torch.int8))
    with (
        pytest.raises(BadInput, match=r"y is \(1,\) of torch.uint8 and must be \(1,\) of torch.int8"),
        Writer(tmp_path / "c", header) as writer,
    ):
        writer.put("y", torch.tensor([3], dtype=torch.uint8))


def folder_of_two(path: Path, **index: Any) -> Path:
    write(path / "one", {"x": torch.ones(1)})
    write(path / "two", {"y": torch.zeros(2)})
    said = {"weight_map": {"x": "one", "y": "two"}, **index}
    (path / "model.safetensors.index.json").write_text(json.dumps(said))
    return path


def test_a_folder_of_several_files_is_read_as_one(tmp_path: Path) -> None:
    found = Folder(folder_of_two(tmp_path))
    assert {name: value.tolist() for name, value in found.items()} == {"x": [1.0], "y": [0.0, 0.0]}
    assert found.entry("y").shape == (2,)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({"weight_map": {"x": "one", "y": "three"}}, "is not complete: .*index.json lists three, which is missing"),
        ({"weight_map": {"x": "one", "y": "../two"}}, 'damaged: "../two" is not the name of a file beside it'),
        ({"weight_map": {"x": "one", "y": "two", "z": "two"}}, "damaged: it and two do not agree about z"),
        ({"weight_map": {"y": "two", "z": "one"}}, "damaged: it and one do not agree about x"),
        ({"weight_map": {}}, "damaged: it has no weight_map"),
        ({"weight_map": {"x": 1}}, "damaged: it has no weight_map"),
        ({"weight_map": None}, "damaged: it has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, index: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        Folder(folder_of_two(tmp_path, **index))


def test_a_folder_has_one_beginning(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has neither of model.safetensors and model.safetensors.index.json"):
        Folder(tmp_path)
    write(folder_of_two(tmp_path) / "model.safetensors", {"x": torch.ones(1)})
    with pytest.raises(BadInput, match=r"has both of model.safetensors and"):
        Folder(tmp_path)
