"""kv_append and kv_gather on the GPU: every byte of the pool equals the reference's, unused bytes stay untouched."""

from __future__ import annotations

import importlib

import pytest
import torch

from quarot.ops import registry
from quarot.ops.kv_layout import KVLayout

append_op = importlib.import_module("quarot.ops.kv_append")
gather_op = importlib.import_module("quarot.ops.kv_gather")
importlib.import_module("quarot.ops.rope_kv_append")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None, reason="needs a GPU and the compiled extension"
)

# head_dim, key bits, value bits, key group, value group, rotation order and pow2
FORMATS = {
    "paper": (128, 4, 4, 128, 128, 1, 128),
    "no_rotation": (128, 4, 4, 128, 128, 0, 0),
    "groups_64": (128, 4, 4, 64, 64, 1, 128),
    "groups_32": (128, 4, 4, 32, 32, 0, 0),
    "smollm": (64, 4, 4, 64, 64, 1, 64),
    "smollm_32": (64, 4, 4, 32, 32, 1, 64),
    "gemma": (256, 4, 4, 256, 256, 1, 256),
    "gemma_128": (256, 4, 4, 128, 128, 0, 0),
    "int8": (128, 8, 8, 128, 128, 1, 128),
    "int8_64": (64, 8, 8, 64, 64, 1, 64),
    "int2": (128, 2, 2, 128, 128, 1, 128),
    "int2_256": (256, 2, 2, 64, 64, 1, 256),
    "int3": (128, 3, 3, 128, 128, 1, 128),
    "int3_64": (64, 3, 3, 64, 64, 0, 0),
    "k4_v2": (128, 4, 2, 128, 64, 1, 128),
    "k8_v3": (64, 8, 3, 64, 32, 1, 64),
    "raw": (128, 16, 16, 128, 128, 0, 0),
    "raw_keys": (64, 16, 4, 64, 64, 0, 0),
    "phi3": (96, 4, 4, 96, 96, 12, 8),
    "phi3_2": (96, 2, 3, 32, 96, 0, 0),
    "stablelm": (80, 4, 4, 80, 80, 20, 4),
    "stablelm_2": (80, 2, 3, 80, 80, 0, 0),
    "head_192": (192, 4, 4, 64, 192, 12, 16),
    "tiny": (32, 4, 4, 32, 32, 1, 32),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def _inputs(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(tokens, heads, dim, generator=generator) * 3 for _ in range(2))
    key[:, :, 1] *= 20  # an outlier channel, as keys have
    if tokens > 8:
        key[2], value[2] = 0.0, 0.75  # constant groups
        key[3, 0, 5], value[4, 0, 7] = torch.nan, torch.inf
        key[5], value[5] = 1e-6, -1e-6  # a scale that underflows
        value[6, 0, 0], value[6, 0, 1] = 6e4, -6e4
    return key.to(dtype), value.to(dtype)


def _check(
    form: tuple[int, ...],
    dtype: torch.dtype,
    slots: torch.Tensor,
    heads: int = 3,
    page_size: int = 32,
    generic: bool = False,
    clip: float = 0.95,
) -> None:
    dim, key_bits, value_bits, key_group, value_group, order, pow2 = form
    layout = KVLayout(dim, key_bits, value_bits, key_group, value_group)
    key, value = _inputs(slots.numel(), heads, dim, dtype)
    pages = 1 + int(slots.max()) // page_size + 1
    generator = torch.Generator().manual_seed(1)
    pool = torch.randint(0, 256, layout.pool_shape(pages, heads, page_size), dtype=torch.uint8, generator=generator)
    actual = pool.cuda()
    rest = (key_bits, value_bits, key_group, value_group, clip, 1.0, order, pow2)
    append_op._reference(pool, key, value, slots, *rest)
    append_op.launch(actual, key.cuda(), value.cuda(), slots.cuda(), *rest, generic)
    different = (actual.cpu() != pool).nonzero()
    # NaN params may carry another payload: compare those as "is NaN" through the params' view.
    if different.numel():
        kept = slots[slots >= 0]
        for side in ("key", "value"):
            if layout.groups(side) == 0:
                continue
            codes, params = layout.read(pool, kept, side)
            codes_gpu, params_gpu = layout.read(actual.cpu(), kept, side)
            assert torch.equal(codes, codes_gpu), f"{side} codes differ in {(codes != codes_gpu).sum()} places"
            torch.testing.assert_close(params_gpu, params, rtol=0, atol=0, equal_nan=True)
            layout.write(pool, kept, side, codes, torch.nan_to_num(params))
            actual = actual.cpu()
            layout.write(actual, kept, side, codes_gpu, torch.nan_to_num(params_gpu))
        assert torch.equal(actual.cpu(), pool)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", FORMATS)
def test_prefill_is_bit_equal(name: str, dtype: torch.dtype) -> None:
    if FORMATS[name][1] == 16 and dtype == torch.bfloat16 and FORMATS[name][5]:
        pytest.skip("no rotation of raw keys here")
    _check(FORMATS[name], dtype, torch.arange(77) + 16)


@pytest.mark.parametrize("name", ["paper", "groups_64", "smollm", "gemma", "int8", "int2"])
def test_generic_kernel_is_bit_equal(name: str) -> None:
    _check(FORMATS[name], torch.float16, torch.arange(50) + 5, generic=True)


@pytest.mark.parametrize("name", ["paper", "smollm", "int8", "int2", "phi3"])
@pytest.mark.parametrize(
    "slots",
    [
        torch.tensor([5]),
        torch.tensor([31, 32, 63, 64]),  # page boundaries
        torch.arange(40) + 7,  # odd start: no pairs
        torch.tensor([10, 11, 40, 41, 3, 2, 90, 17]),
        torch.tensor([-1, 4, 5, -1, 6, 7, -1, 8]),
        torch.randperm(200, generator=torch.Generator().manual_seed(3))[:61],
    ],
    ids=["one", "boundaries", "odd_start", "mixed", "skipped", "random"],
)
def test_any_slots(name: str, slots: torch.Tensor) -> None:
    _check(FORMATS[name], torch.float16, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "name", ["paper", "no_rotation", "groups_64", "groups_32", "smollm", "smollm_32", "int8", "int8_64"]
)
@pytest.mark.parametrize(
    "slots",
    [
        torch.arange(64),
        torch.arange(131) + 7,  # odd start: the two tokens of a word come from two warps or two tiles
        torch.cat([torch.arange(40), torch.full((5,), -1), torch.arange(70) + 45]),
        torch.randperm(300, generator=torch.Generator().manual_seed(4))[:150],
    ],
    ids=["aligned", "odd_start", "skipped", "random"],
)
def test_tiles_at_any_slots(slots: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    _check(FORMATS[name], dtype, slots)


def test_views_of_a_fused_projection() -> None:
    heads, dim = 2, 128
    layout = KVLayout(dim)
    qkv = torch.randn(19, (4 + 2 * heads) * dim).half()
    pool = torch.zeros(layout.pool_shape(2, heads, 64), dtype=torch.uint8)
    actual, fused = pool.cuda(), qkv.cuda()
    rest = (4, 4, 128, 128, 0.95, 0.95, 1, 128)
    slots = torch.arange(19)

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = x[:, 4 * dim :].split(heads * dim, dim=1)
        return key.unflatten(1, (heads, dim)), value.unflatten(1, (heads, dim))

    append_op._reference(pool, *parts(qkv), slots, *rest)
    torch.ops.quarot.kv_append(actual, *parts(fused), slots.cuda(), *rest)
    assert torch.equal(actual.cpu(), pool)


def test_no_tokens() -> None:
    pool = torch.zeros(KVLayout(128).pool_shape(1, 2, 16), dtype=torch.uint8, device="cuda")
    empty = torch.empty(0, 2, 128, dtype=torch.float16, device="cuda")
    slots = torch.empty(0, dtype=torch.int64, device="cuda")
    torch.ops.quarot.kv_append(pool, empty, empty, slots, 4, 4, 128, 128, 1.0, 1.0, 0, 0)
    key, _ = torch.ops.quarot.kv_gather(pool, slots, 4, 4, 128, 128, torch.float16)
    assert key.shape == (0, 2, 128)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", FORMATS)
def test_gather_is_bit_equal(name: str, dtype: torch.dtype) -> None:
    dim, key_bits, value_bits, key_group, value_group = FORMATS[name][:5]
    layout = KVLayout(dim, key_bits, value_bits, key_group, value_group)
    pool = torch.randint(0, 100, layout.pool_shape(3, 2, 32), dtype=torch.uint8)  # below 0x7c: no NaN or inf params
    generator = torch.Generator().manual_seed(5)
    slots = torch.cat([torch.tensor([0, 17, 95, -1, 64, 33]), torch.randperm(96, generator=generator)[:45]])
    rest = (key_bits, value_bits, key_group, value_group, dtype)
    expected = gather_op._reference(pool, slots, *rest)
    for actual, reference in zip(torch.ops.quarot.kv_gather(pool.cuda(), slots.cuda(), *rest), expected, strict=True):
        assert torch.equal(actual.cpu(), reference)


def test_wrong_pool_is_refused() -> None:
    pool = torch.zeros(2, 2, 4, 2176, dtype=torch.uint8, device="cuda")
    key = torch.zeros(1, 2, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match="1152"):
        torch.ops.quarot.kv_append(
            pool, key, key, torch.zeros(1, dtype=torch.int64, device="cuda"), 4, 4, 64, 64, 1.0, 1.0, 0, 0
        )


ROPE_CASES = {
    "llama": (128, 128, (128, 4, 4, 128, 128), False),
    "qwen3": (128, 128, (128, 4, 4, 64, 64), True),
    "smollm": (64, 64, (64, 4, 4, 64, 64), False),
    "gemma": (256, 256, (256, 4, 4, 256, 256), False),
    "partial": (128, 64, (128, 8, 8, 128, 128), False),
    "unfused": (96, 96, (96, 4, 4, 96, 96), False),
    "raw": (128, 128, (128, 16, 16, 128, 128), False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "r3"])
@pytest.mark.parametrize("name", ROPE_CASES)
def test_rope_kv_append(name: str, rotate: bool, dtype: torch.dtype) -> None:
    dim, rotary_dim, form, norm = ROPE_CASES[name]
    order, pow2 = ((12, 8) if dim == 96 else (1, dim)) if rotate else (0, 0)
    tokens, q_heads, kv_heads = 37, 6, 2
    layout = KVLayout(*form)
    torch.manual_seed(0)
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim).to(dtype)
    angle = torch.randn(tokens, rotary_dim // 2).repeat(1, 2)
    gains = [torch.rand(dim).to(dtype) + 0.5 if norm else None for _ in range(2)]
    slots = torch.arange(tokens) + 9
    slots[4] = -1
    pool = torch.randint(0, 256, layout.pool_shape(2, kv_heads, 32), dtype=torch.uint8)
    actual = pool.cuda()
    tables = [angle.cos().to(dtype), angle.sin().to(dtype)]
    rest = (q_heads, *form[1:], 0.95, 1.0, order, pow2)
    with registry.reference_backend():
        query = torch.ops.quarot.rope_kv_append(qkv, *tables, pool, slots, *rest, *gains, 1e-6)
    query_gpu = torch.ops.quarot.rope_kv_append(
        qkv.cuda(),
        *(t.cuda() for t in tables),
        actual,
        slots.cuda(),
        *rest,
        *(None if g is None else g.cuda() for g in gains),
        1e-6,
    )
    exact = not norm
    if exact:
        assert torch.equal(query_gpu.cpu(), query)
        assert torch.equal(actual.cpu(), pool)
        return
    torch.testing.assert_close(query_gpu.cpu().float(), query.float(), rtol=1e-2, atol=1e-2)
    kept = slots[slots >= 0]
    codes, _ = layout.read(pool, kept, "key")
    codes_gpu, _ = layout.read(actual.cpu(), kept, "key")
    difference = (codes.int() - codes_gpu.int()).abs()
    assert difference.max() <= 1  # the mean of squares is summed in another order
    assert (difference != 0).float().mean() < 2e-3
