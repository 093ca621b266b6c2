"""The packed cache on the CPU: the layout owns every bit once, and the reference ops are what their docstrings say."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from quarot.ops.kv_layout import KVLayout, Side, _planes

append_op = importlib.import_module("quarot.ops.kv_append")
ops = torch.ops.quarot
importlib.import_module("quarot.ops.kv_gather")
importlib.import_module("quarot.ops.decode_attention")
importlib.import_module("quarot.ops.merge_partials")
importlib.import_module("quarot.ops.rope_kv_append")

HEAD_DIMS = [16, 32, 64, 80, 96, 128, 192, 256]
BITS = [2, 3, 4, 8, 16]
NAN_BYTE = 255


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("side", ["key", "value"])
def test_every_bit_once_and_bytes_belong_to_one_token(head_dim: int, bits: int, side: Side) -> None:
    used = torch.zeros(16 * head_dim * bits, dtype=torch.int32)
    owner = torch.full((2 * head_dim * bits,), -1)
    for plane in _planes(side, head_dim, bits, torch.device("cpu")):
        for bit in range(plane.width):
            used.scatter_add_(
                0, (8 * plane.byte + plane.shift + bit).flatten(), torch.ones(16 * head_dim, dtype=torch.int32)
            )
        for token in range(16):
            owners = owner[plane.byte[token]]
            assert ((owners == -1) | (owners == token)).all()
            owner[plane.byte[token]] = token
    assert (used == 1).all()


def test_sizes() -> None:
    assert KVLayout(128).block_bytes == 2176
    assert KVLayout(128).bytes_per_token == 136  # 512 in fp16: 3.76 times smaller
    assert KVLayout(64, 4, 4, 128, 128).key_group == 64
    assert KVLayout(128, 4, 2, 32, 64).block_bytes == 16 * (64 + 32) + 64 * (4 + 2)
    assert KVLayout.of_block(2176, 4, 4, 128, 128).head_dim == 128


def test_int4_words_are_mma_operands() -> None:
    """Spot check of the documented order against the tensor core's: lane 4 g + t, a0 = row g, columns 2 t, 2 t + 1."""
    layout = KVLayout(128)
    pool = torch.zeros(layout.pool_shape(1, 1, 16), dtype=torch.uint8)
    codes = torch.randint(0, 16, (16, 1, 128), dtype=torch.uint8)
    params = torch.zeros(16, 1, 1, 2, dtype=torch.float16)
    for side in ("key", "value"):
        layout.write(pool, torch.arange(16), side, codes, params)
    words = pool.view(-1)[:2048].view(torch.int32).view(2, 2, 32, 4)  # side, half, lane, word
    for lane, word in ((0, 0), (13, 2), (31, 3)):
        g, t = lane // 4, lane % 4
        pair = int(words[0, 1, lane, word]) & 0x000F000F  # keys, tokens 8..15, e = 0
        assert (pair & 15, pair >> 16) == (codes[8 + g, 0, 32 * word + 4 * t], codes[8 + g, 0, 32 * word + 4 * t + 2])
        pair = int(words[1, 0, lane, word]) & 0x000F000F  # values, tokens 0..7
        assert (pair & 15, pair >> 16) == (codes[2 * t, 0, 32 * word + 2 * g], codes[2 * t + 1, 0, 32 * word + 2 * g])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((100,), "head_dim 100"),
        ((512,), "head_dim 512"),
        ((128, 5), "key_bits 5"),
        ((128, 4, 4, 48), "key_group 48"),
        ((96, 4, 4, 96, 64), "value_group 64"),
    ],
)
def test_impossible_layouts_are_refused(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KVLayout(*arguments)


def test_impossible_pools_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size 24"):
        KVLayout(128).pool_shape(1, 1, 24)
    with pytest.raises(ValueError, match="2176"):
        KVLayout(128).check_pool(torch.zeros(1, 1, 1, 2048, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no head_dim"):
        KVLayout.of_block(2177, 4, 4, 128, 128)


def _fill(
    layout: KVLayout,
    tokens: int,
    rotate: tuple[int, int] = (0, 0),
    clip: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A poisoned pool of pages of 32 with ``tokens`` written in shuffled pages: pool, slots, key, value."""
    pages = -(-tokens // 32)
    pool = torch.full(layout.pool_shape(pages + 2, 2, 32), NAN_BYTE, dtype=torch.uint8)
    order = torch.randperm(pages + 2)[:pages]
    position = torch.arange(tokens)
    slots = order[position // 32] * 32 + position % 32
    key, value = (torch.randn(tokens, 2, layout.head_dim).to(dtype) for _ in range(2))
    key[:, :, 1] *= 10
    form = (layout.key_bits, layout.value_bits, layout.key_group, layout.value_group)
    ops.kv_append(pool, key, value, slots, *form, clip, clip, *rotate)
    return pool, slots, key, value


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [(4, 4), (2, 3), (3, 2), (8, 4), (4, 8), (16, 4), (3, 16)], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_round_trip_within_half_a_step(head_dim: int, bits: tuple[int, int], group: int) -> None:
    try:
        layout = KVLayout(head_dim, *bits, group, 0)
    except ValueError:
        pytest.skip("group does not divide head_dim")
    pool, slots, key, value = _fill(layout, 21)
    restored = ops.kv_gather(pool, slots, *bits, group, 0, torch.float32)
    for side, x, y in zip(("key", "value"), (key, value), restored, strict=True):
        if layout.bits(side) == 16:
            assert torch.equal(x.half().float(), y)
            continue
        scale = layout.read(pool, slots, side)[1][..., 0].float().repeat_interleave(layout.group(side), -1)
        # fp16 params: half a step, plus what rounding them moves the ends of the range by.
        slack = 2.0**-10 * x.unflatten(-1, (-1, layout.group(side))).abs().amax(-1).repeat_interleave(
            layout.group(side), -1
        )
        assert ((x - y).abs() <= scale / 2 + slack).all()


def test_special_groups() -> None:
    layout = KVLayout(64)
    pool = torch.full(layout.pool_shape(1, 1, 16), NAN_BYTE, dtype=torch.uint8)
    rows = torch.randn(6, 1, 64)
    rows[0] = 0.0
    rows[1] = -3.14159
    rows[2, 0, 7] = torch.nan
    rows[3, 0, 7] = torch.inf
    rows[4] *= 1e-9
    rows[5] *= 1e6
    slots = torch.arange(6)
    ops.kv_append(pool, rows, rows, slots, 4, 4, 64, 64, 0.95, 0.95, 0, 0)
    key, value = ops.kv_gather(pool, slots, 4, 4, 64, 64, torch.float32)
    assert torch.equal(key.isnan().flatten(1).any(1), torch.tensor([False, False, True, False, False, False]))
    assert (key[0] == 0).all()
    assert not key[0].signbit().any()
    assert (key[1] == torch.tensor(-3.14159).half().float()).all()
    assert key[4].abs().max() < 1e-8
    assert key[5].abs().max() <= 65504 * 17
    assert torch.equal(key.nan_to_num(), value.nan_to_num())


def test_negative_slots_write_nothing_and_other_tokens_stay() -> None:
    layout = KVLayout(128)
    pool, slots, key, value = _fill(layout, 40)
    before = pool.clone()
    ops.kv_append(pool, key, value, torch.full_like(slots, -1), 4, 4, 128, 128, 1.0, 1.0, 0, 0)
    assert torch.equal(pool, before)
    ops.kv_append(pool, key[:1], value[:1], slots[5:6], 4, 4, 128, 128, 1.0, 1.0, 0, 0)
    kept = torch.arange(40) != 5
    for before_side, after_side in zip(
        ops.kv_gather(before, slots, 4, 4, 128, 128, torch.float32),
        ops.kv_gather(pool, slots, 4, 4, 128, 128, torch.float32),
        strict=True,
    ):
        assert torch.equal(before_side[kept], after_side[kept])
        assert not torch.equal(before_side[5], after_side[5])


@pytest.mark.parametrize(("order", "pow2"), [(1, 64), (1, 128), (1, 256), (12, 8), (20, 4), (12, 16)])
def test_rotation_is_the_orthonormal_hadamard_and_clip_is_symmetric_in_it(order: int, pow2: int) -> None:
    dim = order * pow2
    matrix = append_op.rotate_heads(torch.eye(dim, dtype=torch.float64), order, pow2)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while sylvester.shape[0] < pow2:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), sylvester)
    base = append_op.order_signs(order, torch.device("cpu")).double() if order > 1 else torch.ones(1, 1).double()
    # Rows of `matrix` are images of unit vectors, i.e. it is the transpose of the matrix itself.
    torch.testing.assert_close(matrix.T, torch.kron(base, sylvester) / math.sqrt(dim))


def test_wrong_arguments_are_refused() -> None:
    layout = KVLayout(64)
    pool = torch.zeros(layout.pool_shape(1, 2, 16), dtype=torch.uint8)
    key, slots = torch.zeros(3, 2, 64), torch.arange(3)
    form = (4, 4, 64, 64, 1.0, 1.0)
    with pytest.raises(ValueError, match="order 1 x 32 does not fit head_dim 64"):
        ops.kv_append(pool, key, key, slots, *form, 1, 32)
    with pytest.raises(ValueError, match="3 kv heads for a pool of 2"):
        ops.kv_append(pool, torch.zeros(3, 3, 64), torch.zeros(3, 3, 64), slots, *form, 0, 0)
    with pytest.raises(ValueError, match="slots must be int64"):
        ops.kv_append(pool, key, key, slots.int(), *form, 0, 0)
    query, table = torch.zeros(1, 1, 3, 64), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 query heads do not divide"):
        ops.decode_attention(query, pool, table, torch.ones(1, dtype=torch.int32), 4, 4, 64, 64, 1.0, 0, 0, 0)
    with pytest.raises(ValueError, match="lengths must be int32"):
        ops.decode_attention(torch.zeros(1, 1, 4, 64), pool, table, torch.ones(1), 4, 4, 64, 64, 1.0, 0, 0, 0)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    ("layout", "rotate"),
    [(KVLayout(64), (1, 64)), (KVLayout(128, 4, 2, 64, 32), (0, 0)), (KVLayout(96, 3, 3, 96, 96), (12, 8))],
    ids=["d64", "mixed", "d96"],
)
def test_decode_is_softmax_attention(layout: KVLayout, rotate: tuple[int, int], tokens: int, window: int) -> None:
    pool, slots, _, _ = _fill(layout, 70, rotate)
    form = (layout.key_bits, layout.value_bits, layout.key_group, layout.value_group)
    key, value = (x.double() for x in ops.kv_gather(pool, slots, *form, torch.float32))
    query = torch.randn(2, tokens, 6, layout.head_dim, dtype=torch.float64)
    used = slots[::32] // 32
    table = torch.full((2, 5), 2147480000, dtype=torch.int32)
    table[:, : used.numel()] = used.int()
    lengths = torch.tensor([70, 33], dtype=torch.int32)
    out, lse = ops.decode_attention(query, pool, table, lengths, *form, 0.1, window, *rotate)
    turned = append_op.rotate_heads(query, *rotate) if rotate != (0, 0) else query
    for row, length in enumerate(lengths.tolist()):
        for t in range(tokens):
            end = length - tokens + 1 + t
            start = max(0, end - window) if window else 0
            for head in range(6):
                score = key[start:end, head // 3] @ turned[row, t, head] * 0.1
                torch.testing.assert_close(out[row, t, head], torch.softmax(score, 0) @ value[start:end, head // 3])
                expected = torch.logsumexp(score, 0).item() / math.log(2)
                assert lse[row, t, head].item() == pytest.approx(expected, abs=1e-5)


def test_queries_that_are_not_in_the_cache_see_all_of_it() -> None:
    layout = KVLayout(64)
    pool, slots, _, _ = _fill(layout, 40)
    query, table = torch.randn(1, 5, 6, 64), (slots[::32] // 32).int()[None]
    lengths, form = torch.tensor([33], dtype=torch.int32), (4, 4, 64, 64, 0.1, 0, 1, 64)
    together = ops.decode_attention(query, pool, table, lengths, *form, False)
    for t in range(5):
        alone = ops.decode_attention(query[:, t : t + 1], pool, table, lengths, *form)
        for all_of_them, one in zip(together, alone, strict=True):
            torch.testing.assert_close(all_of_them[:, t : t + 1], one)


def test_partial_results_merge_by_lse() -> None:
    layout = KVLayout(64)
    pool, slots, _, _ = _fill(layout, 64)
    query = torch.randn(1, 1, 2, 64)
    pages = (slots[::32] // 32).int()
    form = (4, 4, 64, 64, 0.125, 0, 0, 0)

    def part(table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.decode_attention(query, pool, table[None], torch.tensor([length], dtype=torch.int32), *form)

    whole, lse = part(pages, 64)
    (first, first_lse), (second, second_lse) = part(pages[:1], 32), part(pages[1:], 32)
    merged = first * torch.exp2(first_lse - lse)[..., None] + second * torch.exp2(second_lse - lse)[..., None]
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(torch.logaddexp2(first_lse, second_lse), lse)


def test_empty_rows_and_queries_that_see_nothing() -> None:
    layout = KVLayout(64)
    pool, slots, _, _ = _fill(layout, 8)
    table = torch.full((2, 1), -7, dtype=torch.int32)
    table[0] = slots[0] // 32
    query = torch.randn(2, 3, 2, 64).half()
    out, lse = ops.decode_attention(
        query, pool, table, torch.tensor([2, 0], dtype=torch.int32), 4, 4, 64, 64, 1.0, 0, 0, 0
    )
    assert (out[1] == 0).all()
    assert lse[1].isneginf().all()
    assert (out[0, 0] == 0).all()
    assert lse[0, 0].isneginf().all()
    assert out.dtype == torch.float16
    assert not out[0, 1:].isnan().any()
    assert lse[0, 1:].isfinite().all()


def test_opcheck() -> None:
    layout = KVLayout(64)
    pool, slots, key, value = _fill(layout, 20)
    checks = ("test_schema", "test_faketensor")
    form = (4, 4, 64, 64)
    torch.library.opcheck(ops.kv_append.default, (pool, key, value, slots, *form, 1.0, 1.0, 1, 64), test_utils=checks)
    torch.library.opcheck(ops.kv_gather.default, (pool, slots, *form, torch.float16), test_utils=checks)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    arguments = (torch.randn(1, 1, 4, 64), pool, table, lengths, *form, 0.125, 0, 1, 64)
    torch.library.opcheck(ops.decode_attention.default, arguments, test_utils=checks)
    out, lse = torch.randn(2, 3, 5, 16).half(), torch.randn(2, 3, 5)
    torch.library.opcheck(ops.merge_partials.default, (out, lse, out, lse, torch.float16), test_utils=checks)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(("dim", "rotary_dim", "rotate"), [(64, 64, (1, 64)), (64, 32, (0, 0)), (96, 96, (12, 8))])
def test_rope_kv_append_is_its_parts(norm: bool, dim: int, rotary_dim: int, rotate: tuple[int, int]) -> None:
    """Norm, transformers' RoPE and R3 one after the other in float32, then kv_append."""
    tokens, q_heads, kv_heads = 9, 4, 2
    layout, form = KVLayout(dim), (4, 4, dim, dim)
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim)
    angle = torch.randn(3, rotary_dim // 2).repeat(1, 2)  # a table of 3 rows serves 3 sequences of 3 tokens
    gains = [torch.rand(dim) + 0.5 if norm else None for _ in range(2)]
    slots = torch.arange(tokens)
    pool = torch.zeros(layout.pool_shape(1, kv_heads, 16), dtype=torch.uint8)
    expected_pool = pool.clone()
    rest = (q_heads, *form, 0.95, 0.95, *rotate)
    query = ops.rope_kv_append(qkv, angle.cos(), angle.sin(), pool, slots, *rest, *gains, 1e-6)
    q, k, v = qkv.view(tokens, -1, dim).split([q_heads, kv_heads, kv_heads], dim=1)
    turned = []
    for x, gain in zip((q, k), gains, strict=True):
        if gain is not None:
            x = torch.nn.functional.rms_norm(x, (dim,), gain, 1e-6)
        head, rest_of_head = x[..., :rotary_dim], x[..., rotary_dim:]
        cos, sin = (t.repeat(3, 1)[:, None] for t in (angle.cos(), angle.sin()))
        half = torch.cat([-head[..., rotary_dim // 2 :], head[..., : rotary_dim // 2]], dim=-1)
        x = torch.cat([head * cos + half * sin, rest_of_head], dim=-1)
        turned.append(append_op.rotate_heads(x, *rotate) if rotate != (0, 0) else x)
    torch.testing.assert_close(query, turned[0])
    ops.kv_append(expected_pool, turned[1], v, slots, *form, 0.95, 0.95, 0, 0)
    actual, expected = (ops.kv_gather(x, slots, *form, torch.float32) for x in (pool, expected_pool))
    torch.testing.assert_close(actual[1], expected[1])
    assert ((actual[0] - expected[0]).abs() > 1e-5).float().mean() < 0.01  # a code at a rounding boundary


def test_rope_kv_append_refuses_what_does_not_fit() -> None:
    pool = torch.zeros(KVLayout(64).pool_shape(1, 2, 16), dtype=torch.uint8)
    table, slots = torch.zeros(1, 64), torch.arange(2)
    rest = (4, 4, 64, 64, 1.0, 1.0, 0, 0, None, None, 1e-6)
    with pytest.raises(ValueError, match="head_dim"):
        ops.rope_kv_append(torch.zeros(2, 500), table, table, pool, slots, 4, *rest)
    with pytest.raises(ValueError, match="rotary_dim"):
        ops.rope_kv_append(torch.zeros(2, 512), table[:, :63], table[:, :63], pool, slots, 4, *rest)
