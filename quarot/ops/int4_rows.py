"""Row-major INT4 weights for the INT4 tensor cores of sm_80, sm_86 and sm_89, made from the tiles of the checkpoint."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


def tiles_to_int4_rows(qweight: torch.Tensor) -> torch.Tensor:
    """Tiles [Np/16, Kp/32, 256] (:mod:`quarot.quantization.packing`) -> uint8 [Np, Kp/2], low nibble = even column."""
    strips, tiles = qweight.shape[:2]
    # [strip, tile, row % 8, quad, half, k % 4] -> [strip, row % 8, tile, half, quad, k % 4]: columns in order
    columns = qweight.view(strips, tiles, 8, 4, 2, 4).permute(0, 2, 1, 4, 3, 5).reshape(strips, 8, tiles * 32)
    even, odd = columns[..., 0::2], columns[..., 1::2]
    low = (even & 15) | (odd << 4)  # rows 0-7 of the strip
    high = (even >> 4) | (odd & 0xF0)  # rows 8-15
    return torch.stack((low, high), dim=1).reshape(strips * 16, tiles * 16)


def int4_rows(qweight: torch.Tensor) -> torch.Tensor:
    """:func:`tiles_to_int4_rows`, kept beside the tiles while they live.

    Packed activations exist for these GPUs only; the tiles stay, since decoding and saving use them, so a model that
    takes this path holds its INT4 weights twice.
    """
    state = (qweight.data_ptr(), 0 if qweight.is_inference() else qweight._version)
    kept = _rows.get(qweight)
    if kept is None or kept[0] != state:
        kept = (state, tiles_to_int4_rows(qweight))
        _rows[qweight] = kept
    return kept[1]
