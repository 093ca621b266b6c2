"""``rope_decode_attention``: from the fused QKV projection of one new token a row to its attention, in one kernel.

It is :mod:`quarot.ops.rope_kv_append` followed by :mod:`quarot.ops.decode_attention`, bit for bit: the CTAs that attend
also turn the queries, and the one that reads the end of a sequence stores its new key and value first. That saves a
kernel's start, and the wait for its end, in every layer.

Notation: B rows, Hq query and Hkv key/value heads, D head_dim, R rotary dims, P rows of the tables.
"""

from __future__ import annotations

import functools

from torch import Tensor

from quarot.ops import decode_attention as attention
from quarot.ops import registry, rope_kv_append
from quarot.ops.kv_append import check_rotation
from quarot.ops.kv_layout import KVLayout
from quarot.ops.quantize_per_token import DTYPE_CODES


def reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    num_q_heads: int,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    key_clip: float,
    value_clip: float,
    rotate_order: int,
    rotate_pow2: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int,
) -> Tensor:
    """Specification: the two ops, one after the other."""
    form = (key_bits, value_bits, key_group, value_group)
    rest = (key_clip, value_clip, rotate_order, rotate_pow2, q_norm, k_norm, eps)
    query = rope_kv_append.rope_kv_append(qkv, cos, sin, pool, slots, num_q_heads, *form, *rest)
    out, _ = attention.decode_attention(query[:, None], pool, page_table, lengths, *form, scale, window, 0, 0)
    return out.flatten(1)


def fake(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    table: Tensor,
    lengths: Tensor,
    num_q_heads: int,
    *rest: object,
) -> Tensor:
    """Shape and dtype of the output."""
    head_dim = qkv.shape[1] // (num_q_heads + 2 * pool.shape[1])
    return qkv.new_empty(qkv.shape[0], num_q_heads * head_dim)


def cuda(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    num_q_heads: int,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    key_clip: float,
    value_clip: float,
    rotate_order: int,
    rotate_pow2: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int,
) -> Tensor:
    """Launches csrc/attention/variants_append.cu."""
    head_dim = rope_kv_append.check(qkv, cos, sin, pool, slots, num_q_heads)
    rotate = check_rotation(rotate_order, rotate_pow2, head_dim)
    if qkv.stride(1) != 1 or qkv.stride(0) % 4 or qkv.data_ptr() % 16:
        qkv = qkv.contiguous()
    cos, sin = (table.to(qkv.dtype).contiguous() for table in (cos, sin))
    gains = [None if gain is None else gain.to(qkv.dtype).contiguous() for gain in (q_norm, k_norm)]
    slots = slots.contiguous()
    append = registry.extension().Append(  # type: ignore[union-attr]
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        *(0 if gain is None else gain.data_ptr() for gain in gains),
        slots.data_ptr(),
        qkv.stride(0),
        cos.shape[1],
        cos.shape[0],
        key_clip,
        value_clip,
        eps,
        int(rotate),
    )
    query = qkv[:, : num_q_heads * head_dim].unflatten(1, (num_q_heads, head_dim))[:, None]
    form = (key_bits, value_bits, key_group, value_group)
    out, _ = attention.launch(query, pool, page_table, lengths, *form, scale, window, 0, 0, append=append)
    return out.flatten(1)


@functools.cache
def _has_kernel(head_dim: int, bits: tuple[int, int], groups: tuple[int, int], heads: tuple[int, int], r: int) -> bool:
    layout = KVLayout(head_dim, *bits, *groups)
    form = (head_dim, *bits, layout.key_group, layout.value_group)
    return bool(registry.extension().decode_append_serves(*form, *heads, r))  # type: ignore[union-attr]


def available(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    table: Tensor,
    lengths: Tensor,
    num_q_heads: int,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    key_clip: float,
    value_clip: float,
    rotate_order: int,
    *rest: object,
) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    head_dim = rope_kv_append.check(qkv, cos, sin, pool, slots, num_q_heads)
    bits, groups, heads = (key_bits, value_bits), (key_group, value_group), (num_q_heads, pool.shape[1])
    if qkv.dtype not in DTYPE_CODES or rotate_order > 1 or not qkv.shape[0] or not table.shape[1]:
        return f"no kernel for {qkv.dtype}, R3 of order {rotate_order}, {qkv.shape[0]} rows, {table.shape[1]} pages"
    if not _has_kernel(head_dim, bits, groups, heads, cos.shape[1]):
        return f"no kernel for head_dim {head_dim}, heads {heads}, bits {bits}, groups {groups}, R {cos.shape[1]}"
    return None


def serves(qkv: Tensor, *rest: object) -> bool:
    """Whether one kernel does all of it, or the reference serves anyway; where not, take the two ops."""
    if not qkv.is_cuda or registry.device_reason(qkv.device.index) is not None:
        return True
    return available(qkv, *rest) is None  # type: ignore[arg-type]


rope_decode_attention = registry.define_op(
    "rope_decode_attention",
    "(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) pool, Tensor slots, Tensor page_table, Tensor lengths, "
    "int num_q_heads, int key_bits, int value_bits, int key_group, int value_group, float key_clip, "
    "float value_clip, int rotate_order, int rotate_pow2, Tensor? q_norm, Tensor? k_norm, float eps, float scale, "
    "int window) -> Tensor out",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
rope_decode_attention.__doc__ = """Attention of one new token a row over the cache it is stored in.

Args:
    qkv: fp16, bf16 or fp32 [B, (Hq + 2 Hkv) * D], one new token a row.
    cos, sin: [P, R], transformers' layout; row b reads row b mod P.
    pool: uint8 pages of Hkv heads, changed in place. slots: int64 [B], the place of each new token.
    page_table: int32 [B, max_pages]. lengths: int32 [B], the new token included.
    others: as in :func:`quarot.ops.rope_kv_append.rope_kv_append` and
        :func:`quarot.ops.decode_attention.decode_attention`.

Returns:
    out [B, Hq * D] in qkv's dtype.
"""
