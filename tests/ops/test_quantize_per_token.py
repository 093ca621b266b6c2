"""The per-token quantiser, alone and behind a Hadamard, SiLU or RMSNorm: the exact rule, in numpy-like plain steps."""

import math

import pytest
import torch
from torch.library import opcheck

from quarot.ops.add_rms_norm_quantize import add_rms_norm_quantize
from quarot.ops.hadamard import hadamard
from quarot.ops.hadamard_quantize import hadamard_quantize
from quarot.ops.quantize_per_token import quantize_per_token
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize
from quarot.quantization.packing import unpack_nibbles

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rule(x: torch.Tensor, bits: int, clip: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One row at a time, one value at a time."""
    qmax = 2 ** (bits - 1) - 1
    c = torch.tensor(clip / qmax, dtype=torch.float32)
    rows = x.float().reshape(-1, x.shape[-1])
    codes, scales = torch.zeros(rows.shape, dtype=torch.int8), torch.zeros(len(rows))
    for m, row in enumerate(rows):
        scale = row.abs().max() * c
        if not math.isfinite(scale):
            scales[m] = torch.nan
        elif scale >= 2.0**-126:
            scales[m] = scale
            inverse = torch.tensor(1.0) / scale
            for k, value in enumerate(row):
                code = round(float(value * inverse))  # Python rounds half to even
                codes[m, k] = min(max(code, -qmax - 1), qmax)
    return codes, scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("clip", [1.0, 0.9, 0.37])
def test_follows_the_rule(bits: int, clip: float, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 45).to(dtype)
    codes, scale = quantize_per_token(x, bits, clip)
    expected_codes, expected_scale = rule(x, bits, clip)
    assert codes.shape == (6, 64)
    assert torch.equal(codes[:, :45], expected_codes)
    assert not codes[:, 45:].any()
    assert torch.equal(scale, expected_scale)


def test_packed_holds_the_same_codes() -> None:
    x = torch.randn(5, 96)
    codes, scale = quantize_per_token(x, 4, 0.9)
    packed, same = quantize_per_token(x, 4, 0.9, True)
    assert torch.equal(unpack_nibbles(packed), codes)
    assert torch.equal(scale, same)


def test_upper_halves_stand_for_the_same_values() -> None:
    x = torch.randn(7, 96) * torch.tensor([1.0, 1e-3, 1e3, 0.0, 1e-37, 2.0, 3.0])[:, None]
    x[5, 3] = torch.inf
    codes, scale = quantize_per_token(x, 4, 0.9)
    upper, sixteenth = quantize_per_token(x, 4, 0.9, False, True)
    kept = [0, 1, 2, 3, 5, 6]
    assert torch.equal(upper[kept], 16 * codes[kept])
    torch.testing.assert_close(16 * sixteenth[kept], scale[kept], rtol=0, atol=0, equal_nan=True)
    assert scale[4] > 0 and not sixteenth[4] and not upper[4].any()  # a sixteenth of it would be subnormal


@pytest.mark.parametrize(("bits", "packed"), [(8, False), (6, False), (4, True)])
def test_codes_without_an_upper_half(bits: int, packed: bool) -> None:
    with pytest.raises(ValueError, match="no upper half"):
        quantize_per_token(torch.randn(2, 32), bits, 0.9, packed, True)


def test_halves_round_to_even() -> None:
    codes, scale = quantize_per_token(torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), 4, 1.0)
    assert scale.item() == 1
    assert codes[0, :6].tolist() == [7, 0, 2, 2, 0, -2]


def test_both_ends_of_the_range() -> None:
    codes, _ = quantize_per_token(torch.tensor([[-7.0, 7.0, 6.0]]), 4, 0.8)
    assert codes[0, :3].tolist() == [-8, 7, 7]


def test_zero_subnormal_and_bad_rows() -> None:
    x = torch.randn(6, 40)
    x[1] = 0
    x[2] = 1e-38
    x[3, 7] = float("nan")
    x[4, 7] = float("inf")
    codes, scale = quantize_per_token(x, 4, 0.9)
    assert scale[1] == scale[2] == 0
    assert scale[3:5].isnan().all()
    assert not codes[1:5].any()
    assert torch.equal(codes[[0, 5]], quantize_per_token(x[[0, 5]], 4, 0.9)[0])


def test_large_halves_keep_a_finite_scale() -> None:
    _, scale = quantize_per_token(torch.full((1, 32), 6.5e4, dtype=torch.float16), 4, 1.0)
    assert scale.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33), (33,), (1, 1)])
def test_empty_and_small(shape: tuple[int, ...]) -> None:
    codes, scale = quantize_per_token(torch.randn(shape), 4, 0.9)
    rows = math.prod(shape[:-1])
    assert codes.shape == (rows, -(-shape[-1] // 32) * 32)
    assert scale.shape == (rows,)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="2 to 8 bits, not 9"):
        quantize_per_token(torch.randn(2, 32), 9, 0.9)
    with pytest.raises(ValueError, match="bits=8 needs packed=False"):
        quantize_per_token(torch.randn(2, 32), 8, 0.9, True)
    for clip in (0.0, -0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"not at {clip}"):
            quantize_per_token(torch.randn(2, 32), 4, clip)
    for rows in (torch.tensor(1.0), torch.ones(2, 32, dtype=torch.int32)):
        with pytest.raises(TypeError, match="rows can be quantised"):
            quantize_per_token(rows, 4, 0.9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hadamard_then_quantize(dtype: torch.dtype) -> None:
    x = torch.randn(4, 192).to(dtype)
    codes, scale = hadamard_quantize(x, 12, 16, 1, 4, 0.9)
    assert torch.equal(codes, quantize_per_token(hadamard(x.float(), 12, 16, 1), 4, 0.9)[0])
    assert scale.shape == (4,)


@pytest.mark.parametrize("order", [1, 12])
def test_silu_mul_then_hadamard_then_quantize(order: int) -> None:
    x = torch.randn(4, 384)
    gate, up = x.chunk(2, -1)
    product = gate / (1 + torch.exp(-gate)) * up
    wide = hadamard(product, order, 16, 1) if order > 1 else product
    codes, scale = silu_mul_hadamard_quantize(x, order, 16 if order > 1 else 1, 8, 1.0)
    expected_codes, expected_scale = quantize_per_token(wide, 8, 1.0)
    assert scale == pytest.approx(expected_scale, rel=1e-5)
    assert (codes != expected_codes).float().mean() < 0.01
    with pytest.raises(ValueError, match="even number"):
        silu_mul_hadamard_quantize(torch.randn(2, 33), 1, 1, 8, 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_add_rms_norm_then_quantize(with_residual: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(4, 96).to(dtype), torch.randn(4, 96).to(dtype) if with_residual else None
    codes, scale, total = add_rms_norm_quantize(x, residual, 1e-5, 4, 0.9)
    assert torch.equal(total, x if residual is None else x + residual)
    wide = total.float()
    expected_codes, expected_scale = quantize_per_token(wide / (wide.square().mean(-1, True) + 1e-5).sqrt(), 4, 0.9)
    assert scale == pytest.approx(expected_scale, rel=1e-6)
    assert (codes != expected_codes).float().mean() < 0.01


def test_schemas_and_fakes() -> None:
    x = torch.randn(3, 96)
    ops = torch.ops.quarot
    opcheck(ops.quantize_per_token.default, (x, 4, 0.9, True))
    opcheck(ops.hadamard_quantize.default, (x, 12, 8, 1, 4, 0.9))
    opcheck(ops.silu_mul_hadamard_quantize.default, (x, 12, 4, 4, 0.9, True))
    opcheck(ops.add_rms_norm_quantize.default, (x, x, 1e-5, 4, 0.9))
    opcheck(ops.add_rms_norm_quantize.default, (x, None, 1e-5, 8, 0.9))
