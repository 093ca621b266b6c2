"""``"paged|quarot"``: attention under transformers' continuous batching (``model.generate_batch``).

Its ``PagedAttentionCache`` allocates keys and values in the model's dtype and has no hook for packed codes, so memory
is that of an unquantised cache. Keys and values are still rounded to the integers of the model's configuration, so
outputs have the accuracy of the packed cache. Where flash-attn is installed transformers would switch to it: call
``model.set_attn_implementation("paged|quarot")`` before.

Notation: all sequences of a batch lie one after the other, Tq new tokens and Tk keys in all; sequence s owns
``cu_seq_lens_q[s] : cu_seq_lens_q[s + 1]`` of the queries, and likewise of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quarot.integrations.transformers.attention import Output, refuse_unsupported
from quarot.nn.kv_format import KVFormat


def quarot_paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Output:
    """Attention of query [1, Hq, Tq, D]; returns ([1, Tq, Hq, D], None). transformers builds no mask for it.

    Raises:
        ValueError: called outside ``generate_batch``.
        NotImplementedError: as :func:`quarot.integrations.transformers.attention.refuse_unsupported`.
    """
    refuse_unsupported(kwargs)
    cache = kwargs.get("cache")
    if cache is None or kwargs.get("block_table") is not None:
        raise ValueError("attention 'paged|quarot' serves generate_batch() with read and write indices; use 'quarot'")
    kv_format: KVFormat | None = getattr(module, "quarot_kv_format", None)
    if kv_format is not None and kv_format.quantizes:
        query = kv_format.rotate_heads(query)
        key, value = kv_format.simulate(key, value)
    indices = {name: kwargs[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
    key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    ends_k = kwargs["cu_seq_lens_k"]
    if isinstance(ends_k, dict):
        ends_k = ends_k["sliding_attention" if sliding_window else "full_attention"]
    mask = packed_mask(query.shape[2], key.shape[2], kwargs["cu_seq_lens_q"], ends_k, sliding_window)
    grouped = query.shape[1] != key.shape[1]
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def packed_mask(queries: int, keys: int, ends_q: Tensor, ends_k: Tensor, window: int | None) -> Tensor:
    """Which of ``keys`` each of ``queries`` sees: its own sequence, up to itself; bool [1, 1, Tq, Tk]."""
    device = ends_q.device
    q, k = torch.arange(queries, device=device), torch.arange(keys, device=device)
    of_q = torch.bucketize(q, ends_q[1:].to(q.dtype).contiguous(), right=True)
    of_k = torch.bucketize(k, ends_k[1:].to(k.dtype).contiguous(), right=True)
    last = len(ends_q) - 2
    of_q_safe = of_q.clamp(max=last)
    # The last query of a sequence stands at its last key.
    place = q - ends_q[1:].long()[of_q_safe] + ends_k[1:].long()[of_q_safe]
    seen = (of_q[:, None] == of_k) & (k <= place[:, None])
    if window:
        seen = seen & (k > place[:, None] - window)
    return seen[None, None]
