"""The mask function ``"quarot"``: boolean [B, 1, T, S], True = attend, or None where plain causal attention does.

With a :class:`~quarot.nn.quant_kv_cache.QuantKVCache` the mask covers the T new tokens only (S = T).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask


def quarot_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one forward; arguments as for ``transformers.masking_utils.sdpa_mask``.

    That serves all but the static cache, whose length is on the device (``kv_offset`` is a tensor): decoding never
    waits for it.
    """
    if not isinstance(kv_offset, Tensor):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            device=device,
            **kwargs,
        )
    windowed = local_size is not None and q_length >= local_size
    columns = kv_offset.to(device) + torch.arange(q_length, device=device)
    new = None
    if attention_mask is not None:
        new = attention_mask.to(torch.bool).index_select(1, columns.clamp(max=attention_mask.shape[1] - 1))
        if q_length > 1 and not torch.compiler.is_compiling() and bool(new.all()):
            new = None  # prefill without padding: let SDPA use its causal kernels
    if new is None and not windowed:
        return None
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.int64, device=device)[None, :, None, None]
    mask = mask_function(batch, head, columns[None, None, :, None], columns[None, None, None, :])
    mask = mask.expand(batch_size, -1, q_length, q_length)
    return mask if new is None else mask & new[:, None, None, :]
