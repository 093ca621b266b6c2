"""From the fused QKV projection to the cache in one pass: head norms, RoPE, R3, quantize, append; returns the queries.

Notation: T tokens, Hq query and Hkv key/value heads, D head_dim, R rotary dims (R <= D), P rows of the tables.

Per head x of the queries and keys, in float32 throughout (float64 for float64 input)::

    x = x * rsqrt(mean(x^2) + eps) * gain                    (Qwen3; only where a gain is given)
    x[:R] = x[:R] * cos + rotate_half(x[:R]) * sin
    x = R3 x                                                 (:func:`quarot.ops.kv_append.rotate_heads`)

Queries are rounded once to the input's dtype; keys and values go straight into :mod:`quarot.ops.kv_append`'s rule. A
separate ``rope`` followed by ``kv_append`` rounds the keys to 16 bits in between, so its codes differ here and there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from quarot.ops import registry
from quarot.ops.kv_append import check_rotation, kv_append, rotate_heads
from quarot.ops.kv_layout import KVLayout
from quarot.ops.quantize_per_token import DTYPE_CODES


def _norm_and_rope(x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """[T, H, D] in float32 or float64; cos and sin [T, 1, R] alike."""
    if gain is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.to(x.dtype)
    rotary_dim = cos.shape[-1]
    a, b = x[..., :rotary_dim].chunk(2, dim=-1)
    rotated = x[..., :rotary_dim] * cos + torch.cat([-b, a], dim=-1) * sin
    return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)


def _check(qkv: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, num_q_heads: int) -> int:
    """head_dim; ValueError unless the shapes fit together."""
    heads = num_q_heads + 2 * pool.shape[1]
    if qkv.dim() != 2 or qkv.shape[1] % heads:
        raise ValueError(
            f"rope_kv_append: qkv {tuple(qkv.shape)} is not [tokens, ({num_q_heads} + 2 * {pool.shape[1]}) * head_dim]"
        )
    head_dim = qkv.shape[1] // heads
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] > head_dim or cos.shape[1] % 2 or not cos.shape[0]:
        raise ValueError(
            f"rope_kv_append: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [rows, rotary_dim] with an "
            f"even rotary_dim up to head_dim {head_dim}"
        )
    return head_dim


def _reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
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
    one_each: bool = False,
) -> Tensor:
    head_dim = _check(qkv, cos, sin, pool, num_q_heads)
    rotate = check_rotation(rotate_order, rotate_pow2, head_dim)
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    query, key, value = qkv.unflatten(1, (-1, head_dim)).split([num_q_heads, pool.shape[1], pool.shape[1]], dim=1)
    row = torch.arange(qkv.shape[0], device=qkv.device) % cos.shape[0]
    cos, sin = (table.to(wide)[row].unsqueeze(1) for table in (cos, sin))
    query = _norm_and_rope(query.to(wide), cos, sin, q_norm, eps)
    key = _norm_and_rope(key.to(wide), cos, sin, k_norm, eps)
    if rotate:
        query, key = rotate_heads(query, rotate_order, rotate_pow2), rotate_heads(key, rotate_order, rotate_pow2)
    form = (key_bits, value_bits, key_group, value_group)
    if key_bits == 16 or value_bits == 16:  # raw pools hold the model's dtype
        key = key.to(qkv.dtype)
    kv_append(pool, key, value.to(key.dtype), slots, *form, key_clip, value_clip, 0, 0)
    return query.to(qkv.dtype)


def _fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor, num_q_heads: int, *args: object
) -> Tensor:
    head_dim = qkv.shape[1] // (num_q_heads + 2 * pool.shape[1])
    return qkv.new_empty(qkv.shape[0], num_q_heads, head_dim)


def launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
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
    one_each: bool = False,
) -> Tensor:
    """Launches csrc/kv_cache/rope_kv_append.cu."""
    head_dim = _check(qkv, cos, sin, pool, num_q_heads)
    layout = KVLayout(head_dim, key_bits, value_bits, key_group, value_group)
    layout.check_pool(pool)
    rotate = check_rotation(rotate_order, rotate_pow2, head_dim)
    form = (head_dim, key_bits, value_bits, layout.key_group, layout.value_group)
    extension = registry.extension()
    if slots.dtype != torch.int64 or slots.shape != qkv.shape[:1]:
        raise ValueError(
            f"rope_kv_append: slots must be int64 [{qkv.shape[0]}], got {slots.dtype} {tuple(slots.shape)}"
        )
    if len({t.device for t in (qkv, cos, sin, pool, slots)}) > 1:
        raise ValueError(
            f"rope_kv_append: qkv on {qkv.device}, cos {cos.device}, pool {pool.device}, slots {slots.device}"
        )
    query = qkv.new_empty(qkv.shape[0], num_q_heads, head_dim)
    if qkv.shape[0] == 0:
        return query
    if qkv.stride(1) != 1 or qkv.stride(0) % 4 or qkv.data_ptr() % 16:
        qkv = qkv.contiguous()
    cos, sin = (table.to(qkv.dtype).contiguous() for table in (cos, sin))
    gains = [None if gain is None else gain.to(qkv.dtype).contiguous() for gain in (q_norm, k_norm)]
    slots = slots.contiguous()
    with torch.cuda.device(pool.device):
        extension.rope_kv_append(  # type: ignore[union-attr]
            pool.data_ptr(),
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            *(0 if gain is None else gain.data_ptr() for gain in gains),
            query.data_ptr(),
            slots.data_ptr(),
            qkv.stride(0),
            *form,
            DTYPE_CODES[qkv.dtype],
            qkv.shape[0],
            num_q_heads,
            pool.shape[1],
            pool.shape[0],
            pool.shape[2],
            cos.shape[1],
            cos.shape[0],
            key_clip,
            value_clip,
            eps,
            int(rotate),
            one_each,
            registry.stream(pool),
        )
    return query


@functools.cache
def _has_kernel(
    head_dim: int, key_bits: int, value_bits: int, key_group: int, value_group: int, rotary_dim: int
) -> bool:
    layout = KVLayout(head_dim, key_bits, value_bits, key_group, value_group)
    form = (head_dim, key_bits, value_bits, layout.key_group, layout.value_group)
    return bool(registry.extension().rope_kv_append_serves(*form, rotary_dim))  # type: ignore[union-attr]


def serves(
    qkv: Tensor,
    cos: Tensor,
    head_dim: int,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    rotate_order: int,
    rotate_pow2: int,
) -> bool:
    """Whether one kernel does all of it; where not, ``rope`` and ``kv_append`` each have theirs."""
    if not qkv.is_cuda or registry.device_reason(qkv.device.index) is not None:
        return True  # the reference serves
    if qkv.dtype not in DTYPE_CODES or rotate_order > 1:
        return False
    return _has_kernel(head_dim, key_bits, value_bits, key_group, value_group, cos.shape[1])


def _available(
    qkv: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor, num_q_heads: int, *form: Any
) -> str | None:
    if qkv.dtype not in DTYPE_CODES:
        return f"no kernel for {qkv.dtype}"
    head_dim = _check(qkv, cos, sin, pool, num_q_heads)
    if serves(qkv, cos, head_dim, *form[:4], *form[6:8]):
        return None
    return f"no kernel for head_dim {head_dim}, {form[0]}/{form[1]} bits, groups {form[2]}/{form[3]}"


rope_kv_append = registry.define_op(
    "rope_kv_append",
    "(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) pool, Tensor slots, int num_q_heads, int key_bits, "
    "int value_bits, int key_group, int value_group, float key_clip, float value_clip, int rotate_order, "
    "int rotate_pow2, "
    "Tensor? q_norm, Tensor? k_norm, float eps, bool one_each=False) -> Tensor query",
    reference=_reference,
    fake=_fake,
    cuda=launch,
    available=_available,
)
rope_kv_append.__doc__ = """Norm, RoPE and R3 on the queries and keys of a fused projection; append keys and values.

Args:
    qkv: fp16, bf16 or fp32 [T, (Hq + 2 Hkv) * D]: query heads, key heads, value heads.
    cos, sin: [P, R], transformers' layout (the two halves of R repeat); token t reads row t mod P.
    pool: uint8 pages of Hkv heads, changed in place. slots: int64 [T], negative = do not write.
    num_q_heads: Hq.
    key_bits .. rotate_pow2: as in :func:`quarot.ops.kv_append.kv_append`; R3 is applied to the queries too.
    q_norm, k_norm: [D] gains of a per-head RMSNorm with ``eps``, or None.
    one_each: every token is the last one of another sequence, so that a decode_attention of one query each may read
        older tokens before this kernel has finished.

Returns:
    query [T, Hq, D] in qkv's dtype: call decode_attention with rotate 0, 0.
"""
