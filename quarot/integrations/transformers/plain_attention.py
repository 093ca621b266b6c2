"""Attention over plain tensors: transformers' scaled dot product attention, and a way around its slowest case.

PyTorch's fused kernels take float32 on a GPU only where there are as many key heads as query heads; for grouped queries
it falls back to forming all scores, several times slower than the rest of a small model. Repeating the key and value
heads costs a copy of them and keeps the fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from quarot.architectures import ARCHITECTURES

_UNGROUPED = nn.Identity()
"""Stands for an attention module without groups."""


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [B, Hq, T, D], key and value [B, Hkv, S, D] -> ([B, T, Hq, D], None); as ``sdpa_attention_forward``."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is None and query.is_cuda and query.dtype == torch.float32:
        module, key, value = _UNGROUPED, repeat_kv(key, groups), repeat_kv(value, groups)
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
    return out


@contextmanager
def fused_float32_attention(model: Any) -> Iterator[None]:
    """Inside the block a float32 model on a GPU attends through :func:`plain_attention`; others are left alone."""
    slow = (
        getattr(model, "dtype", None) == torch.float32
        and model.device.type == "cuda"
        and getattr(model.config, "_attn_implementation", None) == "sdpa"
        and any(cls.__name__ in ARCHITECTURES for cls in type(model).__mro__)
    )
    if not slow:
        yield
        return
    model.set_attn_implementation("quarot")
    try:
        yield
    finally:
        if model.config._attn_implementation == "quarot":
            model.set_attn_implementation("sdpa")
