"""Codes in the upper halves of their bytes stand for the same values as plain ones.

Whatever multiplies them gives the same bits: at the sizes where the layout changes, for rows at the ends of a range.
"""

from __future__ import annotations

import pytest
import torch

from quarot.nn.quant_linear import QuantLinear
from quarot.ops import registry
from quarot.ops.expert_gemm_w4a4 import expert_gemm_w4a4
from quarot.ops.gemm_launch import MAX_K
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.ops.quantize_per_token import SMALLEST_SCALE, UPPER_ROWS, quantize_per_token
from quarot.quantization.packing import pack_int4_tiles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None, reason="needs a GPU and the compiled extension"
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SWITCH = [UPPER_ROWS - 1, UPPER_ROWS, UPPER_ROWS + 1]


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda")


def hostile_rows(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Eight orders of magnitude between rows; of the last ones each is full of a value at the end of the range."""
    x = (torch.randn(m, k, device="cuda") * torch.logspace(-5, 3, m, device="cuda")[:, None]).to(dtype)
    info = torch.finfo(dtype)
    ends = [0.0, torch.nan, -torch.inf, info.max, info.smallest_normal, info.smallest_normal / 2]
    count = min(m - 1, len(ends))
    x[m - count :] = torch.tensor(ends[:count], device="cuda")[:, None].to(dtype)
    return x


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1037, 1000), (64, 11008)])
@pytest.mark.parametrize("m", [1, 9, 17, 33, 130, *SWITCH, 1500])
def test_products_do_not_depend_on_the_layout(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    weight = integers(n, -(-k // 32) * 32)
    tiles, scale, bias = pack_int4_tiles(weight), torch.rand(n, device="cuda"), torch.randn(n, device="cuda")
    x = hostile_rows(m, k, dtype)
    for bits, out_dtype in ((4, torch.float16), (4, torch.bfloat16), (3, torch.float32)):
        plain, upper = (quantize_per_token(x, bits, 0.9, False, high) for high in (False, True))
        # A scale that has no normal sixteenth is 0 in upper halves alone: next to nothing in every output there is.
        zero = (upper[1] == 0) & (plain[1] != 0)
        assert (plain[1][zero] < 16 * SMALLEST_SCALE).all()
        assert_same(upper[0][~zero], 16 * plain[0][~zero])
        for multiply, weights in ((gemm_w4a4, tiles), (gemm_w8a8, weight)):
            low, high = (multiply(*codes, weights, scale, bias, out_dtype) for codes in (plain, upper))
            assert_same(high[~zero], low[~zero])
            assert_same(high[zero], bias.to(out_dtype).expand(int(zero.sum()), n))


@pytest.mark.parametrize("m", [40, *SWITCH])
def test_groups_do_not_depend_on_the_layout(m: int) -> None:
    weight, scale = integers(1040, 4096), torch.rand(1040, 32, device="cuda")
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    low, high = (
        gemm_w4a4(*quantize_per_token(x, 4, 0.9, False, upper), pack_int4_tiles(weight), scale, None, torch.float16)
        for upper in (False, True)
    )
    assert_same(high, low)


def test_experts_do_not_depend_on_the_layout() -> None:
    tiles = torch.randint(0, 256, (4, 16, 8, 256), dtype=torch.uint8, device="cuda")
    scale, expert = torch.rand(4, 256, device="cuda"), torch.randint(0, 4, (20, 2), device="cuda")
    x = torch.randn(20, 256, device="cuda", dtype=torch.float16)
    low, high = (
        expert_gemm_w4a4(*quantize_per_token(x, 4, 0.9, False, upper), expert, tiles, scale, torch.float16)
        for upper in (False, True)
    )
    assert_same(high, low)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_at_the_end_of_fp32(dtype: torch.dtype) -> None:
    """Powers of two around the smallest normal: stored is a normal sixteenth or 0, which stands for code * scale."""
    exponents = torch.arange(-148, 125, device="cuda")[:, None]
    x = torch.ldexp(torch.tensor([7.0, -8.0, 3.0, -1.0] * 16, device="cuda").expand(len(exponents), -1), exponents)
    x = x.to(dtype).repeat(2, 1)  # beyond the switch, too
    (codes, scale), (upper, sixteenth) = (quantize_per_token(x, 4, 7 / 8, False, high) for high in (False, True))
    assert_same(scale, (x.float().abs().amax(1) / 8).where(x.float().abs().amax(1) / 8 >= 2.0**-126, 0.0))
    assert_same(sixteenth, (scale / 16).where(scale >= 2.0**-122, 0.0))
    alive = sixteenth > 0
    assert_same(upper, 16 * codes.where(alive[:, None], 0))
    assert_same(upper[alive].float() * sixteenth[alive, None], codes[alive].float() * scale[alive, None])
    weight, ones = pack_int4_tiles(integers(32, 64)), torch.ones(32, device="cuda")
    low, high = (gemm_w4a4(c, s, weight, ones, None, torch.float32) for c, s in ((codes, scale), (upper, sixteenth)))
    assert_same(high[alive], low[alive])
    assert (high[~alive] == 0).all()
    assert (low[~alive].abs() <= 64 * 64 * 2.0**-122).all()


@pytest.mark.parametrize("k", [65536, MAX_K])
@pytest.mark.parametrize("w", [-8, 7])
@pytest.mark.parametrize("sign", [-1.0, 1.0])  # codes -8 and 7
def test_largest_sums_in_upper_halves(sign: float, w: int, k: int) -> None:
    tiles = pack_int4_tiles(torch.full((64, k), w, dtype=torch.int8, device="cuda"))
    for m in (1, 40, 130, UPPER_ROWS + 1):
        x = torch.full((m, k), sign, device="cuda", dtype=torch.float16)
        codes, scale = quantize_per_token(x, 4, 0.75, False, True)
        code = -8 if sign < 0 else 7
        assert (codes == 16 * code).all()
        ones = torch.ones_like(scale)
        out = gemm_w4a4(codes, ones, tiles, ones.new_ones(64), None, torch.float32)
        assert_same(out, torch.full_like(out, 16.0 * code * w * k))
        half = gemm_w4a4(codes, ones * 2.0**-20, tiles, ones.new_ones(64), None, torch.bfloat16)
        assert_same(half, (out * 2.0**-20).bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_gives_the_same_rows_on_both_sides_of_the_switch(bits: int) -> None:
    weight = integers(512, 1024)
    layer = QuantLinear(1024, 512, a_bits=bits, dtype=torch.float16, device="cuda")
    layer.qweight.data.copy_(pack_int4_tiles(weight))
    layer.weight_scale.data.uniform_(0.001, 0.01)
    x = torch.randn(UPPER_ROWS + 1, 1024, device="cuda", dtype=torch.float16)
    whole = layer(x)
    for m in (1, 100, UPPER_ROWS - 1, UPPER_ROWS):
        assert_same(layer(x[:m]), whole[:m])


def test_no_rows() -> None:
    codes, scale = quantize_per_token(torch.empty(0, 96, device="cuda"), 4, 0.9, False, True)
    assert codes.shape == (0, 96)
    weight = pack_int4_tiles(integers(32, 96))
    assert gemm_w4a4(codes, scale, weight, torch.ones(32, device="cuda"), None, torch.float16).shape == (0, 32)


def test_what_has_no_upper_half_is_refused() -> None:
    x = torch.randn(3, 64, device="cuda")
    for bits, packed in ((8, False), (5, False), (4, True)):
        with pytest.raises(ValueError, match="no upper half"):
            quantize_per_token(x, bits, 0.9, packed, True)
