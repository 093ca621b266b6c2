"""Packing is exactly invertible, and the int4 tiles are laid out as their description says, byte by byte."""

import pytest
import torch

from quarot.quantization.packing import (
    pack_bits,
    pack_int4_tiles,
    pack_int8,
    pack_nibbles,
    unpack_bits,
    unpack_int4_tiles,
    unpack_nibbles,
)

SHAPES = [(1, 1), (16, 32), (17, 33), (33, 95), (20, 160), (137, 126)]


def codes(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), dtype=torch.int8)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int4_tiles_follow_their_description(n: int, k: int) -> None:
    c = codes(n, k, 4)
    tiles = pack_int4_tiles(c)
    assert tiles.shape == (-(-n // 16), -(-k // 32), 256)
    assert tiles.is_contiguous()
    stored, expected = tiles.tolist(), c.tolist()
    for row in range(tiles.shape[0] * 16):
        for col in range(tiles.shape[1] * 32):
            lane = 4 * (row % 8) + (col % 16) // 4
            byte = stored[row // 16][col // 32][8 * lane + 4 * ((col % 32) // 16) + col % 4]
            nibble = byte >> 4 if row % 16 >= 8 else byte & 15
            assert (nibble ^ 8) - 8 == (expected[row][col] if row < n and col < k else 0)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int4_tiles_invert(n: int, k: int) -> None:
    c = codes(n, k, 4)
    assert torch.equal(unpack_int4_tiles(pack_int4_tiles(c), n, k), c)


def test_siblings_concatenate_as_strips() -> None:
    a, b = codes(32, 64, 4), codes(16, 64, 4)
    assert torch.equal(torch.cat([pack_int4_tiles(a), pack_int4_tiles(b)]), pack_int4_tiles(torch.cat([a, b])))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bit_stream_inverts_and_is_dense(n: int, k: int, bits: int) -> None:
    c = codes(n, k, bits)
    packed = pack_bits(c, bits)
    assert packed.shape == (n, -(-k * bits // 8))
    assert torch.equal(unpack_bits(packed, k, bits), c)


def test_bit_stream_is_lowest_bit_first() -> None:
    stream = pack_bits(torch.tensor([[1, -1, 0, 3]], dtype=torch.int8), 3)
    assert stream.tolist() == [[0b00_111_001, 0b0000_011_0]]


def test_nibbles_hold_the_even_column_low() -> None:
    c = codes(5, 64, 4)
    assert int(pack_nibbles(c)[0, 0]) & 15 == int(c[0, 0]) & 15
    assert torch.equal(unpack_nibbles(pack_nibbles(c)), c)


def test_int8_pads_with_zeros() -> None:
    packed = pack_int8(codes(3, 40, 8))
    assert packed.shape == (3, 64)
    assert not packed[:, 40:].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"do not hold a \[33, 32\]"):
        unpack_int4_tiles(pack_int4_tiles(codes(16, 32, 4)), 33, 32)
    with pytest.raises(ValueError, match="do not hold 9 codes"):
        unpack_bits(pack_bits(codes(2, 4, 3), 3), 9, 3)
