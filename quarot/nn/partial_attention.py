"""Attention over a part of the keys, and the merge of such parts: a long past never has to be in memory at once.

The merge is :mod:`quarot.ops.merge_partials`; log-sum-exps are base 2 here, as FlashInfer and
:mod:`quarot.ops.decode_attention` have them.

Notation: B rows, Hq query heads, Hkv key/value heads, T queries, S keys, D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from quarot.integrations import flashinfer
from quarot.ops.merge_partials import merge_partials
from quarot.precision import tf32

_MOST_SCORES = 1 << 24
"""Elements of a mask or score matrix made at once (B or Hq included where it has them): queries are cut accordingly."""

TILE = 128
"""Queries, and keys, that cuDNN takes at once on Hopper: up to a multiple of it, more of them cost no time."""

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

    cuDNN plans every new combination of sizes anew (42-56 ms on an H200, as long as dozens of layers compute), and the
    last chunk of each prompt brings one. So it gets sizes rounded up to few different ones, by queries that are thrown
    away and keys that nobody sees.
    """
    served = flashinfer.attend(query, key, value, scale, causal) if visible is None else None
    if served is not None:
        return Partial(*served)
    if not query.is_cuda or query.dtype == torch.float64:
        return _blocks(_plain, query, key, value, scale, causal, visible)
    length = key.shape[2]
    if visible is not None:
        visible = visible.expand(*visible.shape[:-1], length)
    room = length if visible is None else rounded(length)
    key, value = (_every_head(x, query.shape[1], room) for x in (key, value))
    part = _unmasked(query, key, value, scale, causal) if visible is None else None
    return part or _blocks(_biased, query, key, value, scale, causal, visible)


def rounded(length: int) -> int:
    """``length`` rounded up to a multiple of the tile, and to one of eight lengths an octave."""
    step = max(TILE, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def _unmasked(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Partial | None:
    """cuDNN (twice as fast on Hopper) or PyTorch's flash kernel, as PyTorch itself chooses; None: it takes neither.

    Without a mask, keys can be added only behind those of a causal part: other numbers of them go to the flash kernel.
    """
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale)
    regular = causal or key.shape[2] % TILE == 0 or not torch.backends.cuda.is_flash_attention_available()
    if chosen == SDPBackend.CUDNN_ATTENTION.value and regular:
        length = rounded(key.shape[2]) if causal else key.shape[2]
        return _cudnn(query, _longer(key, length), _longer(value, length), None, scale, causal)
    if chosen not in (SDPBackend.CUDNN_ATTENTION.value, SDPBackend.FLASH_ATTENTION.value):
        return None
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    out, lse = flash(query, key, value, 0.0, causal, scale=scale)[:2]
    return Partial(out, lse.reshape(query.shape[:3]) * _LOG2_E)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, causal: bool = False
) -> Partial:
    count = query.shape[2]
    query = _longer(query, rounded(count))
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse = kernel(query, key, value, bias, True, 0.0, causal, False, scale=scale)[:2]
    return Partial(out[:, :, :count], lse.reshape(query.shape[:3])[:, :, :count] * _LOG2_E)


def _longer(x: Tensor, length: int) -> Tensor:
    """[B, H, S, D] with zeros behind, [B, H, length, D]."""
    return x if x.shape[2] == length else nn.functional.pad(x, (0, 0, 0, length - x.shape[2]))


def _every_head(x: Tensor, heads: int, room: int) -> Tensor:
    """Keys or values [B, Hkv, S, D] once for each of ``heads`` query heads, with zeros behind: [B, heads, room, D]."""
    batch, kv_heads, length, dim = x.shape
    if kv_heads == heads:
        return _longer(x, room)
    every = x.new_empty(batch, heads, room, dim)
    every.view(batch, kv_heads, -1, room, dim)[:, :, :, :length] = x[:, :, None]
    every[:, :, length:] = 0
    return every


def _blocks(
    function: object, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, visible: Tensor | None
) -> Partial:
    """``function`` on as many queries at a time as keep scores (or their mask) under ``_MOST_SCORES``."""
    batch, heads, count, _ = query.shape
    length = key.shape[2] if visible is None else visible.shape[-1]
    tall = visible is not None and visible.shape[-2] > 1
    rows = max(1, _MOST_SCORES // (batch * length * (heads if function is _plain else 1)))
    if function is _biased and not tall and not causal:
        rows = count
    elif function is _biased and rows > TILE:
        rows -= rows % TILE
    parts = []
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        seen = visible[..., start:stop, :] if visible is not None and tall else visible
        if causal:
            place = torch.arange(length, device=query.device)
            seen = place[:stop] <= place[start:stop, None]
        end = stop if causal else key.shape[2]
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
    bias, which the merge weighs with 0, instead of NaN. ``key`` and ``value`` may be longer than ``visible``.
    """
    batch, heads, count, _ = query.shape
    bias = None
    if visible is not None:
        length, tall = visible.shape[-1], visible.shape[-2] > 1
        # Rows of whole tiles are aligned to 16 bytes too, as the memory-efficient kernel wants them.
        shape = (batch, 1, rounded(count) if tall else 1, rounded(length))
        padded = torch.full(shape, torch.finfo(query.dtype).min / 2, dtype=query.dtype, device=query.device)
        padded[..., : visible.shape[-2], :length].masked_fill_(visible, 0.0)
        bias = padded[..., : visible.shape[-2], :length].expand(batch, heads, count, length)
        given = key[:, :, :length], value[:, :, :length]
        chosen = torch._fused_sdp_choice(query, *given, bias, 0.0, False, scale=scale)
        if chosen == SDPBackend.CUDNN_ATTENTION.value:
            return _cudnn(query, _longer(key, shape[-1]), _longer(value, shape[-1]), padded, scale)
        key, value = given
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse = kernel(query, key, value, bias, True, 0.0, False, scale=scale)[:2]
    return Partial(out, lse[:, :, :count] * _LOG2_E)
