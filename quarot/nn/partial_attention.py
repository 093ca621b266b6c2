"""Attention over a part of the keys, and the merge of such parts: a long past never has to be in memory at once.

The merge is :mod:`quarot.ops.merge_partials`; log-sum-exps are base 2 here, as FlashInfer and
:mod:`quarot.ops.decode_attention` have them.

Notation: B rows, Hq query heads, Hkv key/value heads, T queries, S keys, D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from quarot.integrations import flashinfer
from quarot.ops.merge_partials import merge_partials
from quarot.precision import tf32

_MOST_SCORES = 1 << 24
"""Elements of a mask or score matrix made at once (B or Hq included where it has them): queries are cut accordingly."""

_LOG2_E = math.log2(math.e)


class Partial(NamedTuple):
    """``out`` [B, Hq, T, D], normalised over the keys seen; ``lse`` float32 [B, Hq, T], base 2.

    A query that saw no key has an lse so low that any other part outweighs it, and a finite ``out``.
    """

    out: Tensor
    lse: Tensor


def merge(one: Partial, other: Partial, dtype: torch.dtype | None = None) -> Partial:
    """Both parts together in ``dtype`` (None: float32 or wider, for further merges), in memory as [B, T, Hq, D]."""
    wide = torch.promote_types(torch.promote_types(one.out.dtype, other.out.dtype), torch.float32)
    return Partial(*merge_partials(one.out, one.lse, other.out, other.lse, dtype or wide))


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, visible: Tensor | None = None
) -> Partial:
    """Attention of query [B, Hq, T, D] to key and value [B, Hkv, S, D].

    Args:
        scale: of the scores.
        causal: query t sees keys 0 .. t (S = T).
        visible: bool, broadcastable to [B, 1, T, S]: which keys a query sees; not with ``causal``.

    Without ``visible`` FlashInfer serves where it is installed, else cuDNN or PyTorch's flash kernel; with it, cuDNN or
    PyTorch's memory-efficient kernel; elsewhere (a CPU, float64) plain float32 matrix products. None of them forms
    more than 2^24 scores at once.
    """
    served = flashinfer.attend(query, key, value, scale, causal) if visible is None else None
    if served is not None:
        return Partial(*served)
    if not query.is_cuda or query.dtype == torch.float64:
        return _blocks(_plain, query, key, value, scale, causal, visible)
    key, value = (_every_head(x, query.shape[1]) for x in (key, value))
    part = _unmasked(query, key, value, scale, causal) if visible is None else None
    return part or _blocks(_biased, query, key, value, scale, causal, visible)


def _unmasked(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Partial | None:
    """cuDNN (twice as fast on Hopper) or PyTorch's flash kernel, as PyTorch itself chooses; None: it takes neither."""
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale)
    if chosen == SDPBackend.CUDNN_ATTENTION.value:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        out, lse = cudnn(query, key, value, None, True, 0.0, causal, False, scale=scale)[:2]
    elif chosen == SDPBackend.FLASH_ATTENTION.value:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse = flash(query, key, value, 0.0, causal, scale=scale)[:2]
    else:
        return None
    return Partial(out, lse.reshape(query.shape[:3]) * _LOG2_E)


def _every_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values [B, Hkv, S, D] once for each of ``heads`` query heads."""
    batch, kv_heads, length, dim = x.shape
    if kv_heads == heads:
        return x
    return x[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).reshape(batch, heads, length, dim)


def _blocks(
    function: object, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, visible: Tensor | None
) -> Partial:
    """``function`` on as many queries at a time as keep scores (or their mask) under ``_MOST_SCORES``."""
    batch, heads, count, _ = query.shape
    length = key.shape[2]
    tall = visible is not None and visible.shape[-2] > 1
    rows = max(1, _MOST_SCORES // (batch * length * (heads if function is _plain else 1)))
    if function is _biased and not tall and not causal:
        rows = count
    parts = []
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        seen = visible[..., start:stop, :] if visible is not None and tall else visible
        if causal:
            place = torch.arange(length, device=query.device)
            seen = place[:stop] <= place[start:stop, None]
        end = stop if causal else length
        parts.append(function(query[:, :, start:stop], key[:, :, :end], value[:, :, :end], scale, seen))  # type: ignore[operator]
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


@tf32(False)
def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None) -> Partial:
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    grouped = (query.to(wide) * scale).reshape(batch, kv_heads, -1, dim)
    score = (grouped @ key.to(wide).transpose(2, 3)).view(batch, heads, count, -1)
    if visible is not None:
        score = score.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(score, -1)
    weight = (score - lse.nan_to_num(neginf=0.0)[..., None]).exp_()
    out = weight.view(batch, kv_heads, -1, weight.shape[-1]) @ value.to(wide)
    return Partial(out.view(batch, heads, count, dim).to(query.dtype), (lse * _LOG2_E).float())


def _biased(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None) -> Partial:
    """cuDNN where PyTorch takes it (three times as fast on Hopper), else the memory-efficient kernel.

    Hidden keys get a large negative bias, not -inf: a query that sees no key of this part then has an lse near that
    bias, which the merge weighs with 0, instead of NaN.
    """
    batch, heads, count, _ = query.shape
    length, bias = key.shape[2], None
    if visible is not None:
        # The memory-efficient kernel wants rows aligned to 16 bytes.
        shape = (*torch.broadcast_shapes(visible.shape, (batch, 1, 1, 1))[:3], -(-length // 8) * 8)
        bias = torch.zeros(shape, dtype=query.dtype, device=query.device)[..., :length]
        bias.masked_fill_(~visible, torch.finfo(query.dtype).min / 2)
        whole = bias.expand(batch, heads, count, length)
        chosen = torch._fused_sdp_choice(query, key, value, whole, 0.0, False, scale=scale)
        if chosen == SDPBackend.CUDNN_ATTENTION.value:
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
            out, lse = cudnn(query, key, value, bias, True, 0.0, False, False, scale=scale)[:2]
            return Partial(out, lse.reshape(query.shape[:3]) * _LOG2_E)
        bias = whole
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse = kernel(query, key, value, bias, True, 0.0, False, scale=scale)[:2]
    return Partial(out, lse[:, :, :count] * _LOG2_E)
