"""Attention of new query tokens over the packed pages (QuaRot section 3.2: decode on the quantized cache).

Per sequence and query head h of kv head h // (Hq / Hkv)::

    score_j = scale * q . (s_j code_j + b_j)
    out     = sum_j softmax(score)_j v_j
    lse     = log2(sum_j e^score_j)

The log-sum-exp is base 2 as in FlashInfer, so partial results over disjoint keys merge by
``out = sum_i out_i 2^(lse_i - lse)``.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from quarot.ops import registry
from quarot.ops.kv_append import check_rotation, order_signs, rotate_heads
from quarot.ops.kv_gather import dequantize
from quarot.ops.kv_layout import BLOCK_TOKENS, KVLayout
from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.workspace import zeroed_counters
from quarot.precision import tf32


def check_query(query: Tensor, pool: Tensor, page_table: Tensor, lengths: Tensor) -> None:
    """Raise ValueError unless the shapes, dtypes and devices of a decode call fit together."""
    if query.dim() != 4:
        raise ValueError(f"decode_attention: query must be [batch, tokens, heads, head_dim], got {tuple(query.shape)}")
    batch, _, heads, _ = query.shape
    if heads % pool.shape[1]:
        raise ValueError(f"decode_attention: {heads} query heads do not divide into {pool.shape[1]} kv heads")
    for name, tensor, shape in (("page_table", page_table, (batch, -1)), ("lengths", lengths, (batch,))):
        if tensor.dtype != torch.int32 or tensor.dim() != len(shape) or tensor.shape[0] != batch:
            raise ValueError(
                f"decode_attention: {name} must be int32 with {batch} rows, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if len({query.device, pool.device, page_table.device, lengths.device}) > 1:
        raise ValueError(
            f"decode_attention: query on {query.device}, pool {pool.device}, page_table {page_table.device}, "
            f"lengths {lengths.device}"
        )


@tf32(False)
def _row(
    query: Tensor,
    layout: KVLayout,
    pool: Tensor,
    pages: Tensor,
    length: int,
    scale: float,
    window: int,
    causal: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One sequence: query fp32/fp64 [T, Hq, D] -> (out [T, Hq, D], lse [T, Hq])."""
    tokens, heads, dim = query.shape
    kv_heads, page_size = pool.shape[1], 16 * pool.shape[2]
    ends = torch.arange(tokens, device=pool.device) + (length - tokens + 1)
    ends = ends if causal else torch.full_like(ends, length)
    first = max(0, length - tokens + 1 - window) if window > 0 else 0
    position = torch.arange(first, length, device=pool.device)
    slots = pages[position // page_size].long() * page_size + position % page_size
    # Only a 16-bit pool cares which 16-bit format the model has.
    raw = dtype if dtype == torch.bfloat16 else torch.float32
    key, value = (dequantize(layout, pool, slots, side, raw).to(query.dtype) for side in ("key", "value"))
    grouped = query.reshape(tokens, kv_heads, heads // kv_heads, dim)
    score = torch.einsum("thgd,lhd->thgl", grouped, key) * scale
    hidden = position[None, :] >= ends[:, None]
    if window > 0:
        hidden = hidden | (position[None, :] < ends[:, None] - window)
    score = score.masked_fill(hidden[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    weight = torch.where(lse.isneginf()[..., None], torch.zeros_like(score), (score - lse[..., None]).exp())
    out = torch.einsum("thgl,lhd->thgd", weight, value)
    return out.reshape(tokens, heads, dim), lse.reshape(tokens, heads) * math.log2(math.e)


def _reference(
    query: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    scale: float,
    window: int,
    rotate_order: int,
    rotate_pow2: int,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    layout = KVLayout(query.shape[-1], key_bits, value_bits, key_group, value_group)
    layout.check_pool(pool)
    check_query(query, pool, page_table, lengths)
    wide = query if query.dtype == torch.float64 else query.float()
    if check_rotation(rotate_order, rotate_pow2, layout.head_dim):
        wide = rotate_heads(wide, rotate_order, rotate_pow2)
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
    for row, length in enumerate(lengths.tolist()):
        if length > 0:
            result = _row(wide[row], layout, pool, page_table[row], length, scale, window, causal, query.dtype)
            out[row], lse[row] = result[0].to(query.dtype), result[1].float()
    return out, lse


def _fake(query: Tensor, pool: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@functools.lru_cache(maxsize=4096)
def _plan(device: int, *shape: int) -> tuple[int, ...]:
    """Grid, ring and workspace sizes of a call (see csrc/attention/decode_attention.h), from its shape alone."""
    with torch.cuda.device(device):
        return registry.extension().decode_plan(*shape)  # type: ignore[union-attr]


def launch(
    query: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    scale: float,
    window: int,
    rotate_order: int,
    rotate_pow2: int,
    causal: bool = True,
    tuning: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Launch csrc/attention. ``tuning``: see DecodeTuning there (0: as planned)."""
    layout = KVLayout(query.shape[-1], key_bits, value_bits, key_group, value_group)
    layout.check_pool(pool)
    check_query(query, pool, page_table, lengths)
    rotate = check_rotation(rotate_order, rotate_pow2, layout.head_dim)
    out, lse = _fake(query, pool)
    batch, tokens, heads, head_dim = query.shape
    if query.numel() == 0:
        return out, lse
    if page_table.shape[1] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    form = (head_dim, key_bits, value_bits, layout.key_group, layout.value_group)
    kv_heads, page_blocks, max_pages = pool.shape[1], pool.shape[2], page_table.shape[1]
    shape = (DTYPE_CODES[query.dtype], batch, tokens, heads, kv_heads, max_pages * page_blocks * BLOCK_TOKENS)
    plan = _plan(pool.device.index, *form, *shape, *tuning)
    _, max_splits, _, _, _, ring_stages, _, items, *_ = plan
    signs = 0
    if rotate and rotate_order > 1:
        if ring_stages:  # the tensor-core kernels rotate by powers of two only
            query = rotate_heads(query.float(), rotate_order, rotate_pow2).to(query.dtype)
            rotate_order = rotate_pow2 = 0
        else:
            signs = order_signs(rotate_order, query.device).data_ptr()
    query, page_table, lengths = query.contiguous(), page_table.contiguous(), lengths.contiguous()
    with torch.cuda.device(pool.device):
        stream = registry.stream(pool)
        partial = counters = None
        if max_splits > 1:
            partial = torch.empty(items * 8 * (head_dim + 2), dtype=torch.float32, device=pool.device)
            counters = zeroed_counters(items, pool.device, stream)
        registry.extension().decode_attention(  # type: ignore[union-attr]
            query.data_ptr(),
            pool.data_ptr(),
            page_table.data_ptr(),
            lengths.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            0 if partial is None else partial.data_ptr(),
            0 if partial is None else partial.data_ptr() + 4 * items * 8 * head_dim,
            0 if counters is None else counters.data_ptr(),
            signs,
            *form,
            *shape[:-1],
            pool.shape[0],
            max_pages,
            page_blocks,
            window,
            causal,
            rotate_order,
            rotate_pow2,
            scale,
            *plan,
            stream,
        )
    return out, lse


def _available(query: Tensor, *args: object) -> str | None:
    return None if query.dtype in DTYPE_CODES else f"no kernel for {query.dtype}"


decode_attention = registry.define_op(
    "decode_attention",
    "(Tensor query, Tensor pool, Tensor page_table, Tensor lengths, int key_bits, int value_bits, int key_group, "
    "int value_group, float scale, int window, int rotate_order, int rotate_pow2, bool causal=True) "
    "-> (Tensor out, Tensor lse)",
    reference=_reference,
    fake=_fake,
    cuda=launch,
    available=_available,
)
decode_attention.__doc__ = """Attention over the packed cache.

Returns out [B, T, Hq, D] in query's dtype and lse float32 [B, T, Hq], base 2.

Args:
    query: fp16, bf16 or fp32 [B, T, Hq, D], the last T tokens of every sequence, natural dim order, after RoPE.
    pool: uint8 [num_pages, kv_heads, page_size/16, block_bytes], contiguous.
    page_table: int32 [B, max_pages]; entries past a row's length are never read as pages.
    lengths: int32 [B], tokens in the cache including the T new ones. Query t sees keys j < length - T + 1 + t.
    key_bits, value_bits, key_group, value_group: the format of the pool.
    scale: of the scores, usually D^-1/2.
    window: > 0 limits every query to its last ``window`` visible keys.
    rotate_order, rotate_pow2: R3 applied to the queries (the keys in the pool are rotated); 0, 0 = none.
    causal: False shows every query all ``lengths`` tokens, the T queries then being none of them.

A query that sees no key gives zeros and lse -inf.
"""
