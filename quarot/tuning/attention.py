"""The attention function ``"quarot_tuning"``: keys and values quantised as the cache does, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from quarot.architectures import architecture_of, decoder_layers
from quarot.config import QuarotConfig
from quarot.integrations.transformers.plain_attention import plain_attention
from quarot.nn.kv_format import KVFormat, dividing_group
from quarot.tuning.straight_through import quantize_cache
from quarot.tuning.transform import transform

NAME = "quarot_tuning"


def tuning_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention of whole windows: query [B, Hq, T, D], key and value [B, Hkv, T, D] -> ([B, T, Hq, D], None)."""
    cache: KVFormat = module.quarot_tuning_format  # type: ignore[assignment]
    group = dividing_group(key.shape[-1], cache.group)
    if cache.rotate[1]:
        query, key = transform(query, cache.rotation), transform(key, cache.rotation)
    key = quantize_cache(key, cache.key_bits, cache.key_clip, group)
    value = quantize_cache(value, cache.value_bits, cache.value_clip, group)
    return plain_attention(module, query, key, value, attention_mask, **kwargs)


def tuning_mask(*, kv_length: int, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """No mask, which is causal attention, except for sliding windows: training windows have no padding.

    transformers decides the same outside of a recording; inside one it draws the mask, and with a mask PyTorch takes
    attention kernels that cost several times as much.
    """
    if local_size is None or kv_length < local_size:
        return None
    return sdpa_mask(kv_length=kv_length, local_size=local_size, **kwargs)


@contextmanager
def quantized_attention(model: Any, config: QuarotConfig) -> Iterator[None]:
    """Let the model attend to keys and values as ``config`` quantises them, inside the ``with`` block."""
    AttentionInterface.register(NAME, tuning_attention)
    AttentionMaskInterface.register(NAME, tuning_mask)
    record = architecture_of(model)
    attentions = [layer.get_submodule(record.attention) for _, layer in decoder_layers(model)]
    for index, attention in enumerate(attentions):
        attention.quarot_tuning_format = KVFormat.from_config(config, index)  # type: ignore[assignment]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for attention in attentions:
            del attention.quarot_tuning_format
