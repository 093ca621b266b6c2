"""The integer GEMMs: exact accumulators, the order of the epilogue, sizes that do not align, refusals."""

import pytest
import torch
from torch.library import opcheck

from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.quantization.packing import pack_int4_tiles, pack_int8, pack_nibbles

SIZES = [(1, 1, 1), (3, 20, 160), (5, 33, 96), (9, 16, 32), (2, 137, 126)]


def operands(m: int, n: int, k: int, a_bits: int, w_bits: int) -> tuple[torch.Tensor, ...]:
    a, w = 2 ** (a_bits - 1), 2 ** (w_bits - 1)
    codes = torch.randint(-a, a, (m, k), dtype=torch.int8)
    weight = torch.randint(-w, w, (n, k), dtype=torch.int8)
    return pack_int8(codes), torch.rand(m), weight, torch.rand(n), torch.randn(n)


def epilogue(codes: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    accumulator = codes[:, : weight.shape[1]].double() @ weight.double().T
    return (accumulator.float() * rows[:, None]) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("a_bits", [4, 6, 8])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_w4_is_exact(m: int, n: int, k: int, a_bits: int, dtype: torch.dtype) -> None:
    codes, rows, weight, scale, bias = operands(m, n, k, a_bits, 4)
    expected = epilogue(codes, rows, weight, scale)
    tiles = pack_int4_tiles(weight)
    assert torch.equal(gemm_w4a4(codes, rows, tiles, scale, None, dtype), expected.to(dtype))
    assert torch.equal(gemm_w4a4(codes, rows, tiles, scale, bias, dtype), (expected + bias).to(dtype))


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_w8_is_exact(m: int, n: int, k: int) -> None:
    codes, rows, weight, scale, bias = operands(m, n, k, 8, 8)
    expected = epilogue(codes, rows, weight, scale) + bias
    assert torch.equal(gemm_w8a8(codes, rows, pack_int8(weight), scale, bias, torch.float32), expected)


def test_packed_activations() -> None:
    codes, rows, weight, scale, _ = operands(4, 20, 96, 4, 4)
    tiles = pack_int4_tiles(weight)
    packed = gemm_w4a4(pack_nibbles(codes), rows, tiles, scale, None, torch.float32, True)
    assert torch.equal(packed, gemm_w4a4(codes, rows, tiles, scale, None, torch.float32))


def test_groups_accumulate_in_order() -> None:
    codes, rows, weight, _, bias = operands(4, 20, 128, 4, 4)
    scale = torch.rand(20, 4)
    total = torch.zeros(4, 20)
    for g in range(4):
        part = slice(32 * g, 32 * g + 32)
        total += (codes[:, part].double() @ weight[:, part].double().T).float() * scale[:, g]
    expected = total * rows[:, None] + bias
    assert torch.equal(gemm_w4a4(codes, rows, pack_int4_tiles(weight), scale, bias, torch.float32), expected)
    assert torch.equal(gemm_w8a8(codes, rows, weight, scale, bias, torch.float32), expected)


def test_extreme_codes_and_long_rows() -> None:
    codes = torch.full((2, 11008), 7, dtype=torch.int8)
    out = gemm_w4a4(codes, torch.ones(2), pack_int4_tiles(codes.repeat(8, 1)), torch.ones(16), None, torch.float32)
    assert (out == 539392).all()
    lows = torch.full((2, 2**17), -128, dtype=torch.int8)
    out = gemm_w8a8(lows, torch.ones(2), lows, torch.ones(2), None, torch.float32)
    assert (out == 2.0**31).all() or (out == -(2.0**31)).all()  # the one value that int32 cannot hold


@pytest.mark.parametrize("m", [0, 1])
def test_no_tokens(m: int) -> None:
    codes, rows, weight, scale, bias = operands(m, 20, 96, 4, 4)
    out = gemm_w4a4(codes, rows, pack_int4_tiles(weight), scale, bias, torch.float16)
    assert out.shape == (m, 20)
    assert out.dtype == torch.float16
    assert gemm_w8a8(codes, rows, pack_int8(weight), scale, bias, torch.float16).shape == (m, 20)


def test_operands_that_do_not_fit() -> None:
    codes, rows, weight, scale, _ = operands(4, 20, 96, 4, 4)
    tiles = pack_int4_tiles(weight)
    with pytest.raises(ValueError, match="do not fit tiles"):
        gemm_w4a4(codes[:, :64], rows, tiles, scale, None, torch.float32)
    with pytest.raises(ValueError, match="do not fit tiles"):
        gemm_w4a4(codes, rows, tiles, torch.rand(40), None, torch.float32)
    with pytest.raises(ValueError, match="one per row"):
        gemm_w4a4(codes, rows[:3], tiles, scale, None, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        gemm_w8a8(codes, rows, weight[:, :64], scale, None, torch.float32)
    with pytest.raises(ValueError, match="do not divide"):
        gemm_w8a8(codes, rows, weight, torch.rand(20, 7), None, torch.float32)


@pytest.mark.parametrize(
    ("place", "change", "told"),
    [
        (0, lambda codes: codes[0], "do not fit"),
        (0, lambda codes: codes.view(torch.uint8), "got torch.uint8"),
        (0, lambda codes: codes.float(), "got torch.float32"),
        (1, lambda rows: rows.double(), "got torch.int8, torch.float64"),
        (2, lambda tiles: tiles[..., :128], "do not fit"),
        (2, lambda tiles: tiles.view(torch.int8), "int8"),
        (3, lambda scale: scale.half(), "float16"),
        (3, lambda scale: scale[0], "do not fit"),
        (4, lambda bias: bias.int(), "int32"),
    ],
)
def test_operands_of_another_kind(place: int, change, told: str) -> None:
    codes, rows, weight, scale, bias = operands(4, 20, 96, 4, 4)
    arguments = [codes, rows, pack_int4_tiles(weight), scale, bias]
    arguments[place] = change(arguments[place])
    with pytest.raises(ValueError, match=told):
        gemm_w4a4(*arguments, torch.float32)
    if place != 2:
        arguments[2] = weight
        with pytest.raises(ValueError, match=told):
            gemm_w8a8(*arguments, torch.float32)


def test_packed_codes_that_are_not_packed() -> None:
    codes, rows, weight, scale, _ = operands(4, 20, 96, 4, 4)
    tiles = pack_int4_tiles(weight)
    with pytest.raises(ValueError, match="packed codes, row_scale"):
        gemm_w4a4(codes[:, :48], rows, tiles, scale, None, torch.float32, True)
    with pytest.raises(ValueError, match="do not fit"):
        gemm_w4a4(pack_nibbles(codes), rows, tiles, scale, None, torch.float32)


def test_schemas_and_fakes() -> None:
    codes, rows, weight, scale, bias = operands(4, 20, 96, 4, 4)
    tiles = pack_int4_tiles(weight)
    opcheck(torch.ops.quarot.gemm_w4a4.default, (codes, rows, tiles, scale, bias, torch.bfloat16))
    opcheck(torch.ops.quarot.gemm_w8a8.default, (codes, rows, pack_int8(weight), scale, None, torch.float16))
