"""The byte order of the packed KV cache, for every head_dim, bit width and group.

Notation: D head_dim, G groups of a token's keys (or values), w width of a bit plane, C dims of a chunk.

**Pool** ``uint8 [num_pages, kv_heads, page_size/16, block_bytes]``. A **block** is 16 tokens of one kv head::

    key codes | value codes | key params fp16 [Gk, 16, 2] | value params fp16 [Gv, 16, 2]

A param pair is (scale s, offset b): value = s * code + b. 16-bit caches store raw 16-bit floats and no params.
At 4 bits, D = 128, G = 1 a block is 2 * 1024 + 2 * 64 = 2176 bytes.

**Codes** are bit planes, one after the other: one plane of w = bits, except 3 bits = a plane of w = 2 (the low bits)
and one of w = 1. The D dims of a plane are cut into chunks of C = 512/w dims, the rest into falling powers of two
(192 dims at 4 bits: 128 + 64), and a chunk is laid out as the tensor core wants it::

    [tokens/8 (2), lane (32), piece (C * w / 32 bytes)]

A lane's piece in half x of the tokens holds one code for every (mma i = 0 .. C/16-1, half h, e = 0, 1), so that
``piece & 0x000F000F`` *is* a pair of fp16 operands of ``mma.sync.m16n8k16`` (code x 2^-24, an fp16 subnormal), without
shuffles or transposes, and the 16 dims of one mma are contiguous:

    keys    token 8 x + lane / 4,              dim 16 i + 4 (lane % 4) + 2 h + e
    values  token 8 x + 2 (lane % 4) + h,      dim 16 i + 2 (lane / 4) + e

* words of 32 bits have two halves h of 16 bits, a half holds 2 m codes, m = 8/w: the code is at bit
  ``16 h + w (i % m) + 8 e`` of word ``i / m`` (fp16 planes: word ``2 i + e``, half ``h``).
* pieces of 2 bytes (C * w = 64) are such a word with halves of 8 bits: bit ``8 h + w (i % m) + 4 e``, m = 4/w.
* the w = 1 plane follows the words of its w = 2 plane (i = 4 u + i'): bit ``16 h + 8 (u % 2) + 2 i' + e`` of word
  ``u / 2`` (2-byte pieces: ``8 h`` instead of ``16 h``).
* chunks too narrow for 2-byte pieces (16 dims at 2 bits, 16 or 32 at the w = 1 plane of 3 bits) are plain rows:
  token after token, natural dim order, least significant bits first. No tensor-core kernel reads those.

Every token owns whole bytes, so appending one token never reads what is there. Groups are contiguous dims and a
multiple of 16, hence one mma never straddles two groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

BLOCK_TOKENS = 16
SUPPORTED_BITS = (2, 3, 4, 8, 16)

Side = Literal["key", "value"]


class _Plane(NamedTuple):
    """Where the codes of a plane lie: ``byte``, ``shift`` int64 [16, D]; the plane holds bits low .. low+width-1."""

    byte: Tensor
    shift: Tensor
    width: int
    low: int


def chunk_dims(head_dim: int, width: int) -> list[int]:
    """Cut ``head_dim`` into chunks of 512/width dims, the rest into falling powers of two."""
    chunks, left = [], head_dim
    while left:
        size = 512 // width
        while size > left:
            size //= 2
        chunks.append(size)
        left -= size
    return chunks


def _bit_address(side: Side, head_dim: int, width: int, chunk_width: int) -> Tensor:
    """Bit address of the lowest bit of every (token, dim) within a plane: int64 [16, D]."""
    token = torch.arange(BLOCK_TOKENS)[:, None]
    columns, base = [], 0
    for size in chunk_dims(head_dim, chunk_width):
        dim = torch.arange(size)[None, :]
        i, piece_bits = dim // 16, size * width // 4
        if piece_bits < 16:
            columns.append(base + token * size * width + dim * width)
            base += BLOCK_TOKENS * size * width
            continue
        if side == "key":
            lane, half, lo = 4 * (token % 8) + dim % 16 // 4, dim % 4 // 2, dim % 2
        else:
            lane, half, lo = 4 * (dim % 16 // 2) + token % 8 // 2, token % 2, dim % 2
        half_bits = 16 if piece_bits >= 32 else 8
        if width == 16:
            bit = 32 * (2 * i + lo) + 16 * half
        elif width == 1:
            word, mma = i // 4, i % 4
            bit = 32 * (word // 2) + half_bits * half + 8 * (word % 2) + 2 * mma + lo
        else:
            pairs = half_bits // 2 // width
            bit = 2 * half_bits * (i // pairs) + half_bits * half + width * (i % pairs) + half_bits // 2 * lo
        columns.append(base + (32 * (token // 8) + lane) * piece_bits + bit)
        base += BLOCK_TOKENS * size * width
    return torch.cat(columns, dim=1)


@functools.cache
def _planes(side: Side, head_dim: int, bits: int, device: torch.device) -> tuple[_Plane, ...]:
    widths = {3: ((2, 2), (1, 2))}.get(bits, ((bits, bits),))
    planes, base, low = [], 0, 0
    for width, chunk_width in widths:
        address = _bit_address(side, head_dim, width, chunk_width)
        for part in range(0, width, 8):  # a 16-bit plane is handled as its two bytes
            byte = (base + (address + part) // 8).to(device)
            planes.append(_Plane(byte, ((address + part) % 8).to(device), min(width, 8), low + part))
        base += BLOCK_TOKENS * head_dim * width // 8
        low += width
    return tuple(planes)


@dataclass(frozen=True)
class KVLayout:
    """Sizes, offsets and pure-PyTorch access of one cache format.

    Args:
        head_dim: a multiple of 16 up to 256.
        key_bits, value_bits: 2, 3, 4, 8, or 16 for raw 16-bit floats.
        key_group, value_group: dims that share one (scale, offset); 0 or anything >= head_dim means the whole head.

    Raises:
        ValueError: for a width, head_dim or group that has no layout.
    """

    head_dim: int
    key_bits: int = 4
    value_bits: int = 4
    key_group: int = 128
    value_group: int = 128

    def __post_init__(self) -> None:
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            raise ValueError(
                f"KV cache: head_dim {self.head_dim} is not a multiple of 16 between 16 and 256; "
                "keep keys and values in 16 bits (k_bits=16, v_bits=16)"
            )
        for side in ("key", "value"):
            bits, group = getattr(self, f"{side}_bits"), getattr(self, f"{side}_group")
            if bits not in SUPPORTED_BITS:
                raise ValueError(f"KV cache: {side}_bits {bits} is not one of {', '.join(map(str, SUPPORTED_BITS))}")
            if group <= 0 or group > self.head_dim:
                group = self.head_dim
                object.__setattr__(self, f"{side}_group", group)
            if self.head_dim % group or group % 16:
                raise ValueError(
                    f"KV cache: {side}_group {group} must be a multiple of 16 that divides head_dim {self.head_dim}; "
                    f"use {side}_group={self.head_dim} for one group a head"
                )

    @staticmethod
    @functools.cache
    def of_block(block_bytes: int, key_bits: int, value_bits: int, key_group: int, value_group: int) -> KVLayout:
        """The layout whose blocks have ``block_bytes`` (they grow with head_dim, so it is unique).

        Raises:
            ValueError: if no head_dim gives that size.
        """
        for head_dim in range(16, 257, 16):
            try:
                layout = KVLayout(head_dim, key_bits, value_bits, key_group, value_group)
            except ValueError:  # a group that does not divide this head_dim
                continue
            if layout.block_bytes == block_bytes:
                return layout
        raise ValueError(
            f"KV cache: no head_dim gives blocks of {block_bytes} bytes at key_bits={key_bits}, "
            f"value_bits={value_bits}, key_group={key_group}, value_group={value_group}"
        )

    def bits(self, side: Side) -> int:
        return self.key_bits if side == "key" else self.value_bits

    def group(self, side: Side) -> int:
        return self.key_group if side == "key" else self.value_group

    def groups(self, side: Side) -> int:
        """Number of (scale, offset) pairs of a token and head: 0 for raw 16-bit caches."""
        return 0 if self.bits(side) == 16 else self.head_dim // self.group(side)

    def code_bytes(self, side: Side) -> int:
        """Bytes of the codes of a block."""
        return BLOCK_TOKENS * self.head_dim * self.bits(side) // 8

    def code_offset(self, side: Side) -> int:
        return 0 if side == "key" else self.code_bytes("key")

    def param_offset(self, side: Side) -> int:
        base = self.code_bytes("key") + self.code_bytes("value")
        return base if side == "key" else base + 4 * BLOCK_TOKENS * self.groups("key")

    @property
    def block_bytes(self) -> int:
        return self.param_offset("value") + 4 * BLOCK_TOKENS * self.groups("value")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one kv head, keys and values and their params."""
        return self.block_bytes // BLOCK_TOKENS

    def pool_shape(self, num_pages: int, kv_heads: int, page_size: int) -> tuple[int, int, int, int]:
        """Shape of the uint8 pool.

        Raises:
            ValueError: if ``page_size`` is not a positive multiple of 16.
        """
        if page_size <= 0 or page_size % BLOCK_TOKENS:
            raise ValueError(f"KV cache: page_size {page_size} is not a positive multiple of {BLOCK_TOKENS}")
        return num_pages, kv_heads, page_size // BLOCK_TOKENS, self.block_bytes

    def check_pool(self, pool: Tensor) -> None:
        """Raise ValueError unless ``pool`` is a contiguous uint8 [pages, kv_heads, page_size/16, block_bytes]."""
        if pool.dtype != torch.uint8 or pool.dim() != 4 or pool.shape[3] != self.block_bytes:
            raise ValueError(
                f"KV pool must be uint8 [pages, kv_heads, page_size/16, {self.block_bytes}] for {self}, "
                f"got {pool.dtype} {tuple(pool.shape)}"
            )
        if not pool.is_contiguous():
            raise ValueError("KV pool must be contiguous")

    def _row_start(self, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Byte address of the block of every (slot, head) [T, H] and the token's place in it [T]."""
        _, heads, blocks, block_bytes = pool.shape
        page, offset = slots // (16 * blocks), slots % (16 * blocks)
        head = torch.arange(heads, device=pool.device)
        block = (page[:, None] * heads + head) * blocks + (offset // BLOCK_TOKENS)[:, None]
        return block * block_bytes, offset % BLOCK_TOKENS

    def write(self, pool: Tensor, slots: Tensor, side: Side, codes: Tensor, params: Tensor | None) -> None:
        """Write tokens into ``pool`` in place.

        Args:
            pool: see :meth:`check_pool`.
            slots: int64 [T], page * page_size + offset, all >= 0 and distinct.
            side: "key" or "value".
            codes: uint8 [T, kv_heads, D]; for 16-bit caches fp16 or bf16, stored as they are.
            params: fp16 [T, kv_heads, G, 2], (scale, offset); None for 16-bit caches.
        """
        start, token = self._row_start(pool, slots)
        flat = pool.view(-1)
        values = codes.view(torch.int16).int() if self.bits(side) == 16 else codes.int()
        for plane in _planes(side, self.head_dim, self.bits(side), pool.device):
            where = (start[:, :, None] + self.code_offset(side) + plane.byte[token][:, None, :]).reshape(-1)
            part = (values >> plane.low) & ((1 << plane.width) - 1)
            part = (part << plane.shift[token][:, None, :]).to(torch.uint8)
            if plane.width == 8:
                flat[where] = part.reshape(-1)
            else:
                flat[where] = 0
                flat.scatter_add_(0, where, part.reshape(-1))
        if self.groups(side):
            assert params is not None
            raw = params.to(torch.float16).contiguous().view(torch.uint8)  # [T, H, G, 4]
            flat[self._param_address(start, token, side)] = raw

    def read(
        self, pool: Tensor, slots: Tensor, side: Side, dtype: torch.dtype = torch.float16
    ) -> tuple[Tensor, Tensor | None]:
        """Read tokens: (uint8 codes [T, H, D], fp16 params [T, H, G, 2]); 16-bit caches: (``dtype`` [T, H, D], None).

        ``dtype`` says how raw 16-bit words are to be read: torch.bfloat16 or torch.float16.
        """
        start, token = self._row_start(pool, slots)
        flat = pool.view(-1)
        values = torch.zeros((*start.shape, self.head_dim), dtype=torch.int32, device=pool.device)
        for plane in _planes(side, self.head_dim, self.bits(side), pool.device):
            raw = flat[start[:, :, None] + self.code_offset(side) + plane.byte[token][:, None, :]].int()
            values |= ((raw >> plane.shift[token][:, None, :]) & ((1 << plane.width) - 1)) << plane.low
        if self.bits(side) == 16:
            return values.to(torch.int16).view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16), None
        raw = flat[self._param_address(start, token, side)]
        return values.to(torch.uint8), raw.view(torch.float16)

    def _param_address(self, start: Tensor, token: Tensor, side: Side) -> Tensor:
        """Byte addresses of the params [T, H, G, 4]."""
        group = torch.arange(self.groups(side), device=start.device)
        place = 4 * (BLOCK_TOKENS * group + token[:, None])  # [T, G]
        address = start[:, :, None] + self.param_offset(side) + place[:, None, :]
        return address[..., None] + torch.arange(4, device=start.device)
