"""How integer codes lie in memory. N outputs (rows), K inputs (columns); Kp, Np = K, N rounded up to 32 and 16.

Three layouts, each exactly invertible:

* **int4 tiles** (4-bit weights), uint8 [Np/16, Kp/32, 256]: an atom of 16 rows x 32 columns is 256 bytes; lane
  ``t = 4*(row % 8) + (k % 16) // 4`` owns the 8 bytes at ``8*t``, byte ``4*((k % 32) // 16) + k % 4`` of them holds row
  0-7 of the atom in its low nibble and row 8-15 in its high nibble. This is the register fragment of the int8 tensor
  core instructions, so a kernel loads 8 bytes a lane and never shuffles.
* **int8** (8-bit weights and activation codes), int8 [N, Kp].
* **bit stream** (other widths), uint8 [N, ceil(K*bits/8)]: code k of a row occupies bits ``k*bits .. (k+1)*bits - 1``,
  lowest first.

Codes are two's complement. Padding is zero, so it adds nothing to a dot product.
"""

from __future__ import annotations

import torch

K_ALIGNMENT = 32
N_ALIGNMENT = 16


def padded(size: int, alignment: int = K_ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def pack_int4_tiles(codes: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] with values -8..7 -> uint8 [Np/16, Kp/32, 256] (see the module)."""
    n, k = codes.shape
    rows = torch.nn.functional.pad(codes, (0, padded(k) - k, 0, padded(n, N_ALIGNMENT) - n)).view(torch.uint8) & 15
    # [strip, row half, row % 8, k tile, k half, k quad, k % 4] -> [strip, k tile, row % 8, quad, half, k % 4, row half]
    atoms = rows.view(-1, 2, 8, padded(k) // 32, 2, 4, 4).permute(0, 3, 2, 5, 4, 6, 1)
    return (atoms[..., 0] | (atoms[..., 1] << 4)).reshape(-1, padded(k) // 32, 256)


def unpack_int4_tiles(qweight: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Inverse of :func:`pack_int4_tiles`: int8 [n, k]."""
    strips, tiles = qweight.shape[:2]
    if qweight.shape[2] != 256 or not strips * 16 - 16 < n <= strips * 16 or not tiles * 32 - 32 < k <= tiles * 32:
        raise ValueError(f"int4 tiles of shape {tuple(qweight.shape)} do not hold a [{n}, {k}] weight")
    pairs = qweight.view(torch.int8)
    # A left shift by 4 and an arithmetic right shift by 4 sign-extend the low nibble.
    atoms = torch.stack(((pairs << 4) >> 4, pairs >> 4)).view(2, strips, tiles, 8, 4, 2, 4)
    return atoms.permute(1, 0, 3, 2, 5, 4, 6).reshape(strips * 16, tiles * 32)[:n, :k].contiguous()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] (K even) with values -8..7 -> uint8 [M, K/2], low nibble = even column (packed activations)."""
    nibbles = codes.view(torch.uint8) & 15
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_nibbles`: int8 [M, 2 * bytes]."""
    pairs = packed.view(torch.int8)
    return torch.stack(((pairs << 4) >> 4, pairs >> 4), dim=-1).flatten(-2)


def pack_int8(codes: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] -> int8 [N, Kp], zeros behind K."""
    return torch.nn.functional.pad(codes, (0, padded(codes.shape[1]) - codes.shape[1]))


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [N, K] of ``bits``-bit two's complement codes -> uint8 [N, ceil(K*bits/8)] bit stream (see the module)."""
    n, k = codes.shape
    groups = torch.nn.functional.pad(codes, (0, -k % 8)).view(n, -1, 8).long() & ((1 << bits) - 1)
    shifts = torch.arange(8, device=codes.device)
    words = (groups << (shifts * bits)).sum(-1, keepdim=True)  # eight codes are `bits` bytes
    stream = ((words >> (shifts[:bits] * 8)) & 255).to(torch.uint8)
    return stream.reshape(n, -1)[:, : -(-k * bits // 8)].contiguous()


def unpack_bits(packed: torch.Tensor, k: int, bits: int) -> torch.Tensor:
    """Inverse of :func:`pack_bits`: int8 [N, k]."""
    n = packed.shape[0]
    if packed.shape[1] != -(-k * bits // 8):
        raise ValueError(
            f"{packed.shape[1]} bytes a row do not hold {k} codes of {bits} bits ({-(-k * bits // 8)} bytes)"
        )
    stream = torch.nn.functional.pad(packed, (0, -packed.shape[1] % bits)).view(n, -1, bits).long()
    shifts = torch.arange(8, device=packed.device)
    words = (stream << (shifts[:bits] * 8)).sum(-1, keepdim=True)
    codes = (words >> (shifts * bits)) & ((1 << bits) - 1)
    sign = 1 << (bits - 1)
    return ((codes ^ sign) - sign).to(torch.int8).reshape(n, -1)[:, :k].contiguous()
