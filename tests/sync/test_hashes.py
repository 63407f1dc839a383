"""Digests distinguish tensors by bytes, order, dtype and shape, with and without xxhash, and leave live tensors unchanged."""

import runpy
import sys

import pytest
import torch
import xxhash

from kit.errors import BadInput
from kit.sync import hashes

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool]
DTYPES += [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
ALGORITHMS = hashes.algorithms()
BLOCK = 512 * 1024


def filled(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_by_its_bytes(algorithm, dtype):
    raw = filled(4096) & 1 if dtype is torch.bool else filled(4096)
    tensor = raw.view(dtype).view(4, -1)
    digest = hashes.digest(tensor, algorithm)
    assert digest == hashes.digest(tensor.clone(), algorithm)
    raw[-1] ^= 1
    assert digest != hashes.digest(tensor, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_where_bytes_lie_does_not_matter(algorithm):
    tensor = filled(24 * 64).view(torch.bfloat16).view(24, 32)
    digest = hashes.digest(tensor, algorithm)
    assert hashes.digest(tensor.t().contiguous().t(), algorithm) == digest
    odd = torch.empty(24 * 32 + 1, dtype=torch.bfloat16)[1:].view(24, 32)  # its address is no multiple of 8
    odd.copy_(tensor)
    assert odd.data_ptr() % 8
    assert hashes.digest(odd, algorithm) == digest
    assert hashes.digest(torch.nn.Parameter(tensor.clone()), algorithm) == digest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_words_and_blocks_in_another_order(algorithm):
    tensor = filled(3 * BLOCK).view(torch.bfloat16).view(-1, 128)
    rows = len(tensor)
    orders = [list(range(rows)) for _ in range(4)]
    orders[1][0], orders[1][1] = 1, 0  # two neighbouring rows
    orders[2] = orders[2][rows // 3 :] + orders[2][: rows // 3]  # blocks of rows
    orders[3].reverse()
    assert len({hashes.digest(tensor[order], algorithm) for order in orders}) == len(orders)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_bit_anywhere(algorithm):
    raw = filled(2 * 8192)
    digests = {hashes.digest(raw, algorithm)}
    for at in [0, 7, 8, 8191, 8192, 16383]:
        for bit in range(8):
            raw[at] ^= 1 << bit
            digests.add(hashes.digest(raw, algorithm))
            raw[at] ^= 1 << bit
    assert len(digests) == 1 + 6 * 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dtype_shape_and_emptiness_count(algorithm):
    zeros = torch.zeros(16, dtype=torch.uint8)
    alike = [zeros, zeros.view(4, 4), zeros.view(torch.bfloat16), zeros.view(torch.float16), zeros[:15]]
    alike += [torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.bfloat16), torch.zeros(()), torch.zeros(1)]
    assert len({hashes.digest(tensor, algorithm) for tensor in alike}) == len(alike)


def test_what_is_lazily_conjugated_is_another_tensor():
    tensor = torch.randn(8, dtype=torch.complex64)
    assert hashes.digest(tensor.conj(), "xxh3") == hashes.digest(tensor.conj().clone(), "xxh3")
    assert hashes.digest(tensor.conj(), "xxh3") != hashes.digest(tensor, "xxh3")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_live_storage_can_still_be_resized(algorithm):
    tensor = torch.ones(1000)
    hashes.digest(tensor, algorithm)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(BadInput, match="offloaded"):
        hashes.digest(tensor, algorithm)


def test_a_tensor_without_bytes():
    with pytest.raises(BadInput, match="only wraps other tensors"):
        hashes.digest(torch.empty(3, device="meta"), "sha256")


def test_what_is_there_without_xxhash(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    bare = runpy.run_path(hashes.__file__)
    assert bare["algorithms"]() == ("sha256",)
    with pytest.raises(BadInput, match="use sha256; xxhash is not installed"):
        bare["digest"](torch.ones(1), "xxh3")
    with pytest.raises(BadInput, match="digest 'md5' is not available on this rank"):
        bare["digest"](torch.ones(1), "md5")


def test_xxh3_is_xxhash_of_header_and_bytes():
    tensor = torch.arange(3, dtype=torch.uint8)
    assert hashes.digest(tensor, "xxh3") == xxhash.xxh3_128_hexdigest(b"3 torch.uint8 (3,)\n\x00\x01\x02")
    assert ALGORITHMS[0] == "xxh3"
