"""Read tokens of the packed pages back as floating point (chunked prefill, offloading, tests)."""

from __future__ import annotations

import torch
from torch import Tensor

from quarot.ops import registry
from quarot.ops.kv_layout import KVLayout, Side
from quarot.ops.quantize_per_token import DTYPE_CODES


def dequantize(layout: KVLayout, pool: Tensor, slots: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    """Tokens at ``slots`` as ``dtype`` [T, kv_heads, D]: s * code + b in float32, rounded once."""
    codes, params = layout.read(pool, slots, side, dtype)
    if params is None:
        return codes.to(dtype)
    wide = params.float()
    groups = codes.unflatten(-1, (layout.groups(side), -1)).float()
    return (groups * wide[..., :1] + wide[..., 1:]).flatten(-2).to(dtype)


def _reference(
    pool: Tensor,
    slots: Tensor,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    layout = KVLayout.of_block(pool.shape[-1], key_bits, value_bits, key_group, value_group)
    layout.check_pool(pool)
    inside = (slots >= 0)[:, None, None]
    safe = slots.clamp(min=0)
    key, value = (dequantize(layout, pool, safe, side, dtype) for side in ("key", "value"))
    zero = torch.zeros((), dtype=dtype, device=pool.device)
    return torch.where(inside, key, zero), torch.where(inside, value, zero)


def _fake(
    pool: Tensor,
    slots: Tensor,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    layout = KVLayout.of_block(pool.shape[-1], key_bits, value_bits, key_group, value_group)
    shape = (slots.shape[0], pool.shape[1], layout.head_dim)
    return pool.new_empty(shape, dtype=dtype), pool.new_empty(shape, dtype=dtype)


def launch(
    pool: Tensor,
    slots: Tensor,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launch csrc/kv_cache/kv_gather.cu."""
    layout = KVLayout.of_block(pool.shape[-1], key_bits, value_bits, key_group, value_group)
    layout.check_pool(pool)
    key, value = _fake(pool, slots, key_bits, value_bits, key_group, value_group, dtype)
    if slots.shape[0] == 0:
        return key, value
    slots = slots.contiguous()
    with torch.cuda.device(pool.device):
        registry.extension().kv_gather(  # type: ignore[union-attr]
            pool.data_ptr(),
            slots.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            layout.head_dim,
            key_bits,
            value_bits,
            layout.key_group,
            layout.value_group,
            DTYPE_CODES[dtype],
            slots.shape[0],
            pool.shape[1],
            pool.shape[0],
            pool.shape[2],
            registry.stream(pool),
        )
    return key, value


def _available(*args: object) -> str | None:
    return None if args[-1] in DTYPE_CODES else f"no kernel for {args[-1]}"


kv_gather = registry.define_op(
    "kv_gather",
    "(Tensor pool, Tensor slots, int key_bits, int value_bits, int key_group, int value_group, "
    "ScalarType dtype) -> (Tensor key, Tensor value)",
    reference=_reference,
    fake=_fake,
    cuda=launch,
    available=_available,
)
kv_gather.__doc__ = """Dequantize tokens of the pages: (key, value), each ``dtype`` [T, kv_heads, head_dim].

Args:
    pool: uint8 [num_pages, kv_heads, page_size/16, block_bytes], contiguous.
    slots: int64 [T], page * page_size + offset; a negative slot gives zeros.
    key_bits, value_bits, key_group, value_group: the format of the pool.
    dtype: fp16, bf16 or fp32; for a 16-bit pool the dtype it was filled with (fp32 reads fp16).

Rotated keys stay rotated (apply R3 to the queries that meet them).
"""
