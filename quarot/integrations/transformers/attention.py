"""The attention function ``"quarot"``: reads a :class:`~quarot.nn.quant_kv_cache.QuantKVCache`, or simulates one.

Three cases for the keys and values that the model hands over (B rows, T new tokens, S keys, D head_dim):

* a handle of a ``QuantKVCache``: the new tokens are stored as codes; the first tokens of a row attend to their own
  unquantised keys and values (the paper's prefill), a few tokens over a past read codes, a longer chunk reads the
  past's codes and its own unquantised tokens.
* tensors, and the model's configuration quantises keys or values: they are quantised and dequantised first, all of
  them, with the integers that the cache would store. So ``use_cache=False`` (perplexity) measures what is advertised.
* tensors otherwise: PyTorch's scaled dot product attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quarot.integrations import flashinfer
from quarot.integrations.transformers.plain_attention import plain_attention
from quarot.nn.kv_format import KVFormat
from quarot.nn.page_table import Step
from quarot.nn.partial_attention import attend, merge
from quarot.nn.quant_kv_cache import KVHandle, QuantKVCache
from quarot.nn.quant_kv_layer import QuantKVLayer
from quarot.ops.inference_only import refuse_gradient

Output = tuple[Tensor, Tensor | None]


def quarot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | KVHandle,
    value: Tensor | KVHandle,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Output:
    """Attention of query [B, Hq, T, D]; returns ([B, T, Hq, D], None).

    Raises:
        NotImplementedError: attention weights, a softcap or sinks were asked for.
    """
    refuse_unsupported(kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, KVHandle):
        out = cached_attention(module, query, key, attention_mask, scale, sliding_window or 0)
        return refuse_gradient("attention over a quantised KV cache", query, out), None
    assert isinstance(value, Tensor)
    kv_format: KVFormat | None = getattr(module, "quarot_kv_format", None)
    if kv_format is not None and kv_format.quantizes:
        query = kv_format.rotate_heads(query)
        rounded, value = kv_format.simulate(key, value)
        key = refuse_gradient("attention over a quantised KV cache", key, rounded)
    return plain_attention(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scale, is_causal=kwargs.get("is_causal")
    )


def refuse_unsupported(options: dict[str, Any]) -> None:
    """Raise for attention variants that would be computed wrongly."""
    if options.get("softcap") is not None:
        raise NotImplementedError(
            f"attention 'quarot' has no logit softcap (this model asks for {options['softcap']}); "
            "use model.set_attn_implementation('eager') and an unquantised KV cache (k_bits=16, v_bits=16)"
        )
    if options.get("s_aux") is not None:
        raise NotImplementedError(
            "attention 'quarot' has no attention sinks; use model.set_attn_implementation('eager')"
        )
    if options.get("output_attentions"):
        raise NotImplementedError(
            "attention 'quarot' never forms the attention weights; call model.set_attn_implementation('eager') and "
            "pass past_key_values=DynamicCache() or use_cache=False to get output_attentions=True"
        )


def cached_attention(
    module: nn.Module, query: Tensor, handle: KVHandle, mask: Tensor | None, scale: float, window: int
) -> Tensor:
    """Store the new tokens of ``handle`` and attend over the rows: query [B, Hq, T, D] -> [B, T, Hq, D]."""
    cache, layer = handle.cache, handle.layer
    if torch.compiler.is_compiling():
        return _store_and_attend(module, query, handle, mask, scale, window)
    try:
        if cache.offloads:
            layer.prefetch()
        out = _store_and_attend(module, query, handle, mask, scale, window)
        if cache.offloads:
            layer.offload()
        return out
    except BaseException:  # an interrupt, too, leaves a token without its codes
        cache.failed()
        raise


def _store_and_attend(
    module: nn.Module, query: Tensor, handle: KVHandle, mask: Tensor | None, scale: float, window: int
) -> Tensor:
    cache, layer = handle.cache, handle.layer
    batch, _, count, _ = query.shape
    mask = new_token_mask(mask, count, cache)
    step = cache.advance(layer, batch, count, None if mask is None else valid_tokens(mask, batch))
    layer.store(handle.key, handle.value, step)
    if step.past == 0:
        return _prefill(module, query, handle, step, mask, scale)
    if count == 1 or (mask is None and count <= cache.DECODE_TOKENS):
        return layer.decode(query, step, scale, window)
    return _chunk(query, handle, step, mask, scale, window)


def new_token_mask(mask: Tensor | None, count: int, cache: QuantKVCache) -> Tensor | None:
    """The part of a mask [B, 1, T, S] about the T new tokens, bool [B, 1, T, T]; the rest must agree with the cache."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    if mask.shape[-1] > count and not torch.compiler.is_compiling():
        cache.check_mask(mask[:, 0, -1])
    return mask[:, :, :, -count:]


def valid_tokens(mask: Tensor, batch: int) -> Tensor:
    """Which new tokens are real: those that see themselves. [B or 1, 1, T, T] -> bool [B, T]."""
    return mask[:, 0].diagonal(dim1=-2, dim2=-1).expand(batch, -1)


def _prefill(
    module: nn.Module, query: Tensor, handle: KVHandle, step: Step, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention among the first tokens of the rows: of the unquantised tokens, or of their codes."""
    key, value = handle.key, handle.value
    if handle.cache.prefill_mode == "quantized":
        query, key, value = _stored(query, handle.layer, step)
    served = flashinfer.attend(query, key, value, scale, query.shape[2] > 1) if mask is None else None
    if served is not None:
        return served[0].transpose(1, 2)
    return plain_attention(module, query, key, value, mask, scaling=scale)[0]


def _stored(query: Tensor, layer: QuantKVLayer, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """The rotated query, and the new tokens as the cache holds them."""
    key, value = layer.gather(step.slots.view(len(step.lengths), -1))
    return layer.format.rotate_heads(query), key, value


def _chunk(query: Tensor, handle: KVHandle, step: Step, mask: Tensor | None, scale: float, window: int) -> Tensor:
    """Attention of many new tokens to the stored past, merged with that to each other.

    Distances from the past are counted in real tokens, which left padding does not change.
    """
    layer, count = handle.layer, query.shape[2]
    rotated, key, value = layer.format.rotate_heads(query), handle.key, handle.value
    valid = None if mask is None else valid_tokens(mask, len(step.before))
    past = layer.attend_past(rotated, step, scale, window, valid)
    if handle.cache.prefill_mode == "quantized":
        query, key, value = _stored(query, layer, step)
    if mask is None and 0 < window < count:
        place = torch.arange(count, device=query.device)
        mask = (place <= place[:, None]) & (place > place[:, None] - window)
    new = attend(query, key, value, scale, causal=mask is None, visible=mask)
    both = new if past is None else merge(past, new, query.dtype)
    return both.out.transpose(1, 2).contiguous()
