"""How a quantised weight is stored: which of the layouts of :mod:`quarot.quantization.packing` a code width uses."""

from __future__ import annotations

import torch

from quarot.quantization.packing import (
    N_ALIGNMENT,
    pack_bits,
    pack_int4_tiles,
    pack_int8,
    padded,
    unpack_bits,
    unpack_int4_tiles,
)


def stored_shape(n: int, k: int, bits: int, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the ``qweight`` of an [n, k] weight; ``dtype`` is the model's, kept at 16 bits."""
    if bits == 16:
        return (n, k), dtype
    if bits == 4:
        return (padded(n, N_ALIGNMENT) // 16, padded(k) // 32, 256), torch.uint8
    if bits == 8:
        return (n, padded(k)), torch.int8
    return (n, -(-k * bits // 8)), torch.uint8


def store(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Centred int8 codes [n, k] -> ``qweight``."""
    if bits == 4:
        return pack_int4_tiles(codes)
    return pack_int8(codes) if bits == 8 else pack_bits(codes, bits)


def load(qweight: torch.Tensor, n: int, k: int, bits: int) -> torch.Tensor:
    """``qweight`` -> centred int8 codes [n, k]."""
    if bits == 4:
        return unpack_int4_tiles(qweight, n, k)
    return qweight[:, :k] if bits == 8 else unpack_bits(qweight, k, bits)
