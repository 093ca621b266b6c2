"""GEMMs that make their own codes: the two ops they stand for, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from quarot.ops import add_rms_norm_gemm_w4a4 as norm_op
from quarot.ops import hadamard_gemm_w4a4 as heads_op
from quarot.ops import silu_mul_hadamard_gemm_w4a4 as silu_op
from quarot.ops.add_rms_norm_gemm_w4a4 import add_rms_norm_gemm_w4a4
from quarot.ops.add_rms_norm_quantize import add_rms_norm_quantize
from quarot.ops.gemm_prologue import NOT_ROWS
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.hadamard_gemm_w4a4 import hadamard_gemm_w4a4
from quarot.ops.hadamard_quantize import hadamard_quantize
from quarot.ops.silu_mul_hadamard_gemm_w4a4 import silu_mul_hadamard_gemm_w4a4
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize
from quarot.quantization.packing import pack_int4_tiles

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def linear(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return pack_int4_tiles(torch.randint(-8, 8, (n, k), dtype=torch.int8)), torch.rand(n), torch.randn(n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_norm_then_gemm(bits: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 3, 96).to(dtype)
    weight = linear(20, 96)
    for other in (residual, None):
        out, total = add_rms_norm_gemm_w4a4(x, other, 1e-5, bits, 0.9, *weight)
        codes, scale, expected = add_rms_norm_quantize(x, other, 1e-5, bits, 0.9)
        assert torch.equal(total, expected)
        assert torch.equal(out, gemm_w4a4(codes, scale, *weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("order", "pow2"), [(12, 2), (1, 4), (1, 1)])
def test_rotation_then_gemm(order: int, pow2: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, order * pow2 * 32).to(dtype)
    weight = linear(20, x.shape[1])
    out = hadamard_gemm_w4a4(x, order, pow2, 32, 4, 0.9, *weight)
    assert torch.equal(out, gemm_w4a4(*hadamard_quantize(x, order, pow2, 32, 4, 0.9), *weight, dtype))
    residual = torch.randn_like(out)
    assert torch.equal(hadamard_gemm_w4a4(x, order, pow2, 32, 4, 0.9, *weight, residual), out + residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("order", "pow2"), [(12, 8), (1, 1)])
def test_silu_then_gemm(order: int, pow2: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 192).to(dtype)
    weight = linear(20, 96)
    out = silu_mul_hadamard_gemm_w4a4(gate_up, order, pow2, 4, 0.9, *weight)
    assert torch.equal(out, gemm_w4a4(*silu_mul_hadamard_quantize(gate_up, order, pow2, 4, 0.9), *weight, dtype))
    residual = torch.randn_like(out)
    assert torch.equal(silu_mul_hadamard_gemm_w4a4(gate_up, order, pow2, 4, 0.9, *weight, residual), out + residual)


def test_schemas_and_fakes() -> None:
    x, ops = torch.randn(3, 96, dtype=torch.bfloat16), torch.ops.quarot
    weight = linear(20, 96)
    opcheck(ops.add_rms_norm_gemm_w4a4.default, (x, x.flip(0), 1e-5, 4, 0.9, *weight))
    opcheck(ops.add_rms_norm_gemm_w4a4.default, (x, None, 1e-5, 8, 0.9, *weight[:2], None))
    residual = x.new_ones(3, 20)
    for more in ((), (residual,)):
        opcheck(ops.hadamard_gemm_w4a4.default, (x, 12, 1, 8, 4, 0.9, *weight, *more))
        opcheck(ops.silu_mul_hadamard_gemm_w4a4.default, (x, 12, 4, 4, 0.9, *linear(20, 48), *more))


def test_operands_that_do_not_fit() -> None:
    x = torch.randn(3, 96)
    tiles, scale, bias = linear(20, 96)
    for call in (
        lambda x, bits, *weight: add_rms_norm_gemm_w4a4(x, None, 1e-5, bits, 0.9, *weight),
        lambda x, bits, *weight: hadamard_gemm_w4a4(x, 1, 2, 48, bits, 0.9, *weight),
        lambda x, bits, *weight: silu_mul_hadamard_gemm_w4a4(torch.cat((x, x), -1), 12, 8, bits, 0.9, *weight),
    ):
        with pytest.raises(ValueError, match=r"x \(1, 3, 96\) must be \[rows, columns\]"):
            call(x[None], 4, tiles, scale, bias)
        with pytest.raises(ValueError, match=r"do not fit rows of 96 columns; int4 tiles are uint8"):
            call(x, 4, tiles[:, :2], scale, bias)
        for wrong in (tiles[..., :128], tiles[0], tiles.view(torch.int8)):
            with pytest.raises(ValueError, match="do not fit rows of 96 columns"):
                call(x, 4, wrong, scale, bias)
        with pytest.raises(ValueError, match=r"weight_scale \(40,\) torch.float32 do not fit"):
            call(x, 4, tiles, torch.rand(40), None)
        with pytest.raises(ValueError, match=r"bias must be \[20\] floats"):
            call(x, 4, tiles, scale, bias[:3])
        with pytest.raises(ValueError, match="2 to 8 bits, not 9"):
            call(x, 9, tiles, scale, bias)


def test_residuals_that_do_not_fit() -> None:
    x, weight = torch.randn(3, 96), linear(20, 96)
    for residual in (torch.zeros(3, 19), torch.zeros(1, 20), torch.zeros(3, 20, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"must be the output's \(\(3, 20\), torch.float32"):
            hadamard_gemm_w4a4(x, 1, 2, 48, 4, 0.9, *weight, residual)
        with pytest.raises(ValueError, match=r"must be the output's \(\(3, 20\), torch.float32"):
            silu_mul_hadamard_gemm_w4a4(torch.cat((x, x), -1), 12, 8, 4, 0.9, *weight, residual)


def test_columns_apart_have_no_kernel() -> None:
    """The kernels are told where a row begins, and read what follows."""
    apart, weight = torch.randn(1, 2 * 128, dtype=torch.float16)[:, ::2], linear(20, 64)
    assert "2 elements apart" in str(silu_op.available(apart, 1, 64, 4, 0.9, *weight))
    for reason in (
        norm_op.available(apart, None, 1e-5, 4, 0.9, *weight),
        heads_op.available(apart, 1, 4, 32, 4, 0.9, *weight),
    ):
        assert "do not begin at multiples of 16 bytes" in str(reason)


@pytest.mark.parametrize("shape", [(64,), (1, 1, 64)])
def test_what_are_no_rows_has_no_kernel(shape: tuple[int, ...]) -> None:
    """A kernel's op must not fail before it can say what is wrong."""
    x, weight = torch.randn(shape, dtype=torch.float16), linear(20, 64)
    assert norm_op.available(x, None, 1e-5, 4, 0.9, *weight) == NOT_ROWS
    assert heads_op.available(x, 1, 2, 32, 4, 0.9, *weight) == NOT_ROWS
    assert silu_op.available(torch.cat((x, x), -1), 1, 64, 4, 0.9, *weight) == NOT_ROWS
