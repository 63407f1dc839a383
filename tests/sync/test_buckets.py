"""Layouts hold every byte once, at its place; copies in and out keep every bit, and errors name what does not fit."""

import dataclasses
import json

import pytest
import torch

from kit.errors import BadInput
from kit.sync import buckets
from kit.sync.buckets import ALIGN, Bound, Layout, Mismatch, Piece, Spec, automatic, bucket_views, lay_out, specs_of

MIB = 2**20
MIXED = {
    ("embed", 0): (torch.bfloat16, (37, 16)),
    ("embed", 1): (torch.bfloat16, (36, 16)),
    ("norm", 0): (torch.float32, (7,)),
    ("scale", 0): (torch.float64, ()),
    ("nothing", 0): (torch.float32, (0, 5)),
    ("quantised", 0): (torch.float8_e4m3fn, (33, 33)),
    ("steps", 0): (torch.int64, (3, 2)),
    ("mask", 0): (torch.uint8, (2049,)),
}


def filled(described=MIXED, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for key, (dtype, shape) in described.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        made[key] = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    return made


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def pack(layout, index, tensors, out):
    Bound(layout, tensors).pack(index, out)


def apply(layout, index, buffer, targets):
    Bound(layout, targets).apply(index, buffer)


def packed(layout, tensors):
    out = [torch.full((layout.bucket_bytes,), 0xEE, dtype=torch.uint8) for _ in layout.buckets]
    for index, buffer in enumerate(out):
        pack(layout, index, tensors, buffer)
    return out


@pytest.mark.parametrize("oversize", ["refuse", "split"])
@pytest.mark.parametrize("bucket", [512, 1024, 2048, 2560, 4096, 65536])
def test_everything_comes_back(bucket, oversize):
    tensors = filled()
    if oversize == "refuse" and bucket < 2560:
        with pytest.raises(
            BadInput, match=rf"embed \(shard 0\) has 1184 bytes and a bucket {bucket}|mask .* 2049 bytes"
        ):
            lay_out(specs_of(tensors), bucket, oversize=oversize)
        return
    layout = lay_out(specs_of(tensors), bucket, oversize=oversize)
    layout.check()
    assert [piece.spec for row in layout.buckets for piece in row] == sorted(
        piece.spec for row in layout.buckets for piece in row
    )
    assert not any(piece.offset % ALIGN for row in layout.buckets for piece in row)
    targets = filled(seed=1)
    for index, buffer in enumerate(packed(layout, tensors)):
        apply(layout, index, buffer, targets)
    for key, tensor in tensors.items():
        assert torch.equal(raw(targets[key]), raw(tensor)), key


def test_a_layout_is_as_tight_as_its_rule():
    specs = [Spec("w", shard, torch.uint8, (size,)) for shard, size in enumerate([600, 512, 1024, 1, 2000])]
    layout = lay_out(specs, 2048)
    assert [[piece.offset for piece in row] for row in layout.buckets] == [[0, 1024], [0, 1024], [0]]
    assert layout.sizes == (1536, 1025, 2000)
    assert layout.total == 4137
    split = lay_out(specs, 1024, oversize="split")
    assert [[tuple(piece) for piece in row] for row in split.buckets] == [
        [(0, 0, 600, 0)],
        [(1, 0, 512, 0)],
        [(2, 0, 1024, 0)],
        [(3, 0, 1, 0), (4, 0, 512, 512)],
        [(4, 512, 1024, 0)],
        [(4, 1536, 464, 0)],
    ]


@pytest.mark.parametrize("size", [0, 511, 513, -512])
def test_bucket_sizes_that_cannot_be(size):
    with pytest.raises(BadInput, match="must be a multiple of 512"):
        lay_out([], size)


def test_a_tensor_named_twice():
    with pytest.raises(BadInput, match=r"w \(shard 2\) appears twice"):
        lay_out([Spec("w", 2, torch.uint8, (1,))] * 2, 512)


def test_no_tensors_no_buckets():
    assert lay_out([], 512).buckets == ()
    assert automatic([]) == MIB


@pytest.mark.parametrize("oversize", ["refuse", "split"])
def test_json_both_ways(oversize):
    layout = lay_out(specs_of(filled()), 2560, oversize=oversize)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def move(layout, index, place, **changes):
    rows = [list(row) for row in layout.buckets]
    rows[index][place] = rows[index][place]._replace(**changes)
    return dataclasses.replace(layout, buckets=tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (lambda ok: move(ok, 0, 1, offset=600), r"bucket 0: b \(shard 0\) lies at 600, which is not a multiple of 512"),
        (lambda ok: move(ok, 0, 1, offset=0), r"bucket 0: b \(shard 0\) lies at 0 to 100; only 600 to 1536 is free"),
        (lambda ok: move(ok, 0, 0, size=2000), r"bucket 0: a .* lies at 0 to 2000; only 0 to 1536 is free"),
        (lambda ok: move(ok, 0, 1, offset=1536), r"bucket 0: b .* lies at 1536 to 1636"),
        (lambda ok: move(ok, 0, 1, start=50), r"bucket 0: b \(shard 0\) continues at byte 50, not 0"),
        (lambda ok: move(ok, 0, 1, size=99), r"does not hold all bytes of b \(shard 0\)"),
        (lambda ok: dataclasses.replace(ok, buckets=ok.buckets[:1]), r"not hold all bytes of c .*, empty \(shard 0\)"),
        (lambda ok: dataclasses.replace(ok, buckets=ok.buckets * 2), r"bucket 2: a \(shard 0\) continues at byte 0"),
    ],
)
def test_layouts_that_do_not_hold_everything_once(broken, sentence):
    specs = [Spec(n, 0, torch.uint8, (s,)) for n, s in (("a", 600), ("b", 100), ("c", 1400), ("empty", 0))]
    layout = lay_out(specs, 1536)
    assert [len(row) for row in layout.buckets] == [2, 2]
    with pytest.raises(BadInput, match=sentence):
        Layout.from_json(broken(layout).to_json())


def test_a_dtype_that_this_torch_has_not():
    data = lay_out(specs_of(filled()), 4096).to_json()
    data["specs"][0][2] = "float2"
    with pytest.raises(BadInput, match="'float2' is not a dtype"):
        Layout.from_json(data)


def test_views_are_the_bucket_itself():
    tensors = filled()
    layout = lay_out(specs_of(tensors), 1024, oversize="split")
    reached = dict.fromkeys(tensors, 0)
    for index, buffer in enumerate(packed(layout, tensors)):
        for spec, start, view in bucket_views(layout, index, buffer):
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert view.dtype == spec.dtype
            assert start == reached[spec.key]
            whole = view.numel() == tensors[spec.key].numel()
            assert view.shape == (spec.shape if whole else (view.numel(),))
            assert torch.equal(raw(view), raw(tensors[spec.key].reshape(-1)[start : start + view.numel()]))
            reached[spec.key] += view.numel()
    assert reached == {key: tensor.numel() for key, tensor in tensors.items()}


@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_not_contiguous_goes_through_torch(side):
    tensors = filled()
    layout = lay_out(specs_of(tensors), 4096)
    apart = {key: t.t().contiguous().t() if t.dim() == 2 else t for key, t in filled(seed=2).items()}
    assert not all(t.is_contiguous() for t in apart.values())
    source, target = (apart, tensors) if side == "source" else (tensors, apart)
    for index, buffer in enumerate(packed(layout, source)):
        apply(layout, index, buffer, target)
    for key, tensor in source.items():
        assert torch.equal(raw(target[key]), raw(tensor)), key


def test_pieces_of_what_is_not_contiguous_can_be_packed_and_not_applied():
    tensors = {("w", 0): torch.arange(1200.0).view(30, 40).t()}
    layout = lay_out(specs_of(tensors), 512, oversize="split")
    flat = torch.cat(
        [view.tensor for i, b in enumerate(packed(layout, tensors)) for view in bucket_views(layout, i, b)]
    )
    assert torch.equal(flat, tensors["w", 0].reshape(-1))
    with pytest.raises(
        Mismatch, match=r"bucket 0: w \(shard 0\) is not contiguous here, but is split over several buckets"
    ):
        apply(layout, 0, torch.zeros(512, dtype=torch.uint8), tensors)


def test_parameters_are_written_in_place():
    tensors = {("w", 0): torch.arange(6.0).view(2, 3), ("v", 0): torch.arange(6.0).view(2, 3).t()}
    layout = lay_out(specs_of(tensors), 1024)
    targets = {key: torch.nn.Parameter(torch.zeros_like(t)) for key, t in tensors.items()}
    apply(layout, 0, packed(layout, tensors)[0], targets)
    for key, tensor in tensors.items():
        assert torch.equal(targets[key], tensor)
        assert targets[key].requires_grad


def test_neighbours_on_both_sides_move_as_one():
    flat = torch.zeros(4, 512, dtype=torch.uint8)
    tensors = {("w", shard): flat[shard] for shard in (0, 1, 3)}
    layout = lay_out(specs_of(tensors), 2048)
    plan = buckets._plan(layout, 0, tensors, torch.zeros(2048, dtype=torch.uint8), target=True)
    assert plan.addresses == [flat.data_ptr(), flat.data_ptr() + 1536]
    assert (plan.offsets, plan.sizes) == ([0, 1024], [1024, 512])


def side_by_side(sizes, fill):
    """Tensors of these sizes in one memory without gaps; in a bucket most have a gap behind them."""
    memory = torch.full((sum(sizes),), fill, dtype=torch.uint8)
    return {("w", number): tensor for number, tensor in enumerate(memory.split(sizes))}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("bucket", [512, 1024, 4096, 65536])
def test_neighbours_in_memory_that_have_gaps_in_a_bucket(bucket, fresh):
    """Bytes are compared in the bucket too: if both ends forgot the gaps, every tensor would come back."""
    sizes = [600, 512, 1024, 1, 511, 513, 2049, 28]
    sources, targets = side_by_side(sizes, 0), side_by_side(sizes, 7)
    for number, tensor in enumerate(sources.values()):
        tensor.copy_((torch.arange(len(tensor)) * (2 * number + 3) + number) % 251)
    layout = lay_out(specs_of(sources), bucket, oversize="split")
    for index in range(len(layout.buckets)):
        buffer = torch.full((bucket,), 0xEE, dtype=torch.uint8)
        Bound(layout, sources).pack(index, buffer, fresh=fresh)
        for number, start, size, offset in layout.buckets[index]:
            assert torch.equal(buffer[offset : offset + size], sources["w", number][start : start + size])
        apply(layout, index, buffer, targets)
    assert all(torch.equal(targets[key], tensor) for key, tensor in sources.items())


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_bound_follows_tensors_that_move(fresh):
    sources, targets = filled(), filled(seed=1)
    layout = lay_out(specs_of(sources), 1024, oversize="split")
    bound, there = Bound(layout, sources), Bound(layout, targets)
    buffers = [torch.zeros(1024, dtype=torch.uint8) for _ in layout.buckets]

    def both():
        for index, buffer in enumerate(buffers):
            bound.pack(index, buffer, fresh=fresh)
            there.apply(index, buffer)
        for key, tensor in sources.items():
            assert torch.equal(raw(targets[key]), raw(tensor)), key

    both()
    for key, tensor in filled(seed=4).items():
        sources[key].data = tensor
        targets[key].data = torch.empty_like(tensor)
    both()
    for side, act in ((sources, bound.pack), (targets, there.apply)):
        size = side["mask", 0].untyped_storage().nbytes()
        side["mask", 0].untyped_storage().resize_(0)
        with pytest.raises(Mismatch, match=r"mask \(shard 0\) has no bytes here"):
            act(len(buffers) - 1, buffers[-1])
        side["mask", 0].untyped_storage().resize_(size)
    both()


def test_what_is_bound_is_looked_up_once_while_nothing_moves(monkeypatch):
    sources, looked_up, plain = filled(), [], buckets._plan

    def plan(layout, index, *given, **named):
        looked_up.append(index)
        return plain(layout, index, *given, **named)

    monkeypatch.setattr(buckets, "_plan", plan)
    bound = Bound(lay_out(specs_of(sources), 65536), sources)
    for _ in range(2):
        bound.pack(0, torch.zeros(65536, dtype=torch.uint8))
    sources["mask", 0].data = filled(seed=1)["mask", 0]
    bound.pack(0, torch.zeros(65536, dtype=torch.uint8))
    assert looked_up == [0, 0]


def test_what_is_bound_lasts_over_an_offload_and_a_reload_to_another_place():
    """The storage gives its memory back and gets it again elsewhere, as the weights of a trainer do between two syncs."""
    sources = {("w", number): torch.full((300,), number + 1, dtype=torch.uint8) for number in range(4)}
    layout = lay_out(specs_of(sources), 4096)
    bound, buffer = Bound(layout, sources), torch.zeros(4096, dtype=torch.uint8)
    bound.pack(0, buffer)
    for version in (1, 2):
        for tensor in sources.values():
            tensor.untyped_storage().resize_(0)
        elsewhere = [torch.zeros(300, dtype=torch.uint8) for _ in range(16)]  # takes the places that were given back
        for (_, number), tensor in sources.items():
            tensor.untyped_storage().resize_(300)
            tensor.fill_(10 * version + number)
        bound.pack(0, buffer)
        for number, _, size, offset in layout.buckets[0]:
            assert (buffer[offset : offset + size] == 10 * version + number).all()
        assert not any(tensor.any() for tensor in elsewhere)


class Wrapper(torch.Tensor):
    """Like a DTensor: it has a shape and a storage with a size, but no address."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("nothing is computed with it")


def test_a_mismatch_names_all_and_changes_nothing():
    tensors = filled()
    layout = lay_out(specs_of(tensors), 65536)
    (buffer,) = packed(layout, tensors)
    targets = filled(seed=3)
    before = {key: tensor.clone() for key, tensor in targets.items()}
    del targets["embed", 1]
    targets["norm", 0] = torch.zeros(8)
    targets["steps", 0] = torch.zeros(3, 2, dtype=torch.int32)
    targets["mask", 0].untyped_storage().resize_(0)
    targets["quantised", 0] = Wrapper(targets["quantised", 0])
    with pytest.raises(Mismatch) as caught:
        apply(layout, 0, buffer, targets)
    assert str(caught.value) == (
        "bucket 0: embed (shard 1) is missing here; norm (shard 0) is float32 (8,) here and float32 (7,) in the bucket; "
        "quantised (shard 0) has no bytes here: it was offloaded, or it only wraps other tensors; "
        "steps (shard 0) is int32 (3, 2) here and int64 (3, 2) in the bucket; "
        "mask (shard 0) has no bytes here: it was offloaded, or it only wraps other tensors"
    )
    assert caught.value.bucket == 0
    assert caught.value.missing == (("embed", 1),)
    assert caught.value.failed == (("norm", 0), ("quantised", 0), ("steps", 0), ("mask", 0))
    for key in [("embed", 0), ("scale", 0)]:
        assert torch.equal(raw(targets[key]), raw(before[key]))


def test_an_error_about_many_tensors_names_the_first_few() -> None:
    layout = lay_out(specs_of({(f"w{number}", 0): torch.zeros(2) for number in range(8)}), 1 << 12)
    with pytest.raises(Mismatch, match=r"w4 \(shard 0\) is missing here; and 3 more$") as caught:
        apply(layout, 0, torch.zeros(1 << 12, dtype=torch.uint8), {})
    assert len(caught.value.missing) == 8


@pytest.mark.parametrize(
    ("buffer", "sentence"),
    [
        (torch.zeros(511, dtype=torch.uint8), "bucket 0 needs 512 bytes, but the buffer has 511"),
        (torch.zeros(512, dtype=torch.int8), "must be contiguous bytes"),
        (torch.zeros(1024, dtype=torch.uint8)[::2], "must be contiguous bytes"),
        (torch.zeros(2, 256, dtype=torch.uint8), "must be contiguous bytes in one dimension"),
    ],
)
def test_buffers_that_do_not_fit(buffer, sentence):
    tensors = {("w", 0): torch.zeros(512, dtype=torch.uint8)}
    layout = lay_out(specs_of(tensors), 512)
    for act in (pack, bucket_views, apply):
        arguments = {pack: (tensors, buffer), bucket_views: (buffer,), apply: (buffer, tensors)}[act]
        with pytest.raises(BadInput, match=sentence):
            act(layout, 0, *arguments)


def of(count, size):
    return [Spec("w", number, torch.uint8, (size,)) for number in range(count)]


@pytest.mark.parametrize(
    ("specs", "refuse", "split"),
    [
        (of(8192, 32 * 1024), 16 * MIB, 16 * MIB),  # a 16th of 256 MiB
        (of(16, 4 * MIB), 4 * MIB, 4 * MIB),  # one tensor per bucket
        (of(16, 4 * MIB + 1), 4 * MIB + 4096, 4 * MIB + 4096),  # rounded up to whole pages
        (of(100, 1024), MIB, MIB),  # the lower limit
        (of(4096, MIB), 64 * MIB, 64 * MIB),  # the upper limit
        (of(32768, MIB), 128 * MIB, 128 * MIB),  # above the limit only beyond 256 buckets
        (of(2, 200 * MIB), 200 * MIB, 64 * MIB),
        ([*of(1000, 32 * 1024), Spec("embed", 0, torch.uint8, (272 * MIB,))], 272 * MIB, 303 * MIB // 16),
    ],
)
def test_the_automatic_size(specs, refuse, split):
    for oversize, expected in (("refuse", refuse), ("split", split)):
        size = automatic(specs, oversize=oversize)
        assert expected <= size < expected + MIB
        if expected % MIB < 8192:
            assert size == expected
        assert size % 4096 == 0
        lay_out(specs, size, oversize=oversize).check()


def test_a_piece_beside_one_that_is_taken_is_read_in_order():
    """Pieces in another order than their offsets are refused, since receivers rely on the order."""
    specs = (Spec("a", 0, torch.uint8, (1,)), Spec("b", 0, torch.uint8, (1,)))
    layout = Layout(specs=specs, bucket_bytes=1024, buckets=((Piece(0, 0, 1, 512), Piece(1, 0, 1, 0)),))
    with pytest.raises(BadInput, match=r"b \(shard 0\) lies at 0 to 1; only 513 to 1024 is free"):
        layout.check()
