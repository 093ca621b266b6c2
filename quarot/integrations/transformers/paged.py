"""``"paged|quarot"``: attention under transformers' continuous batching (``model.generate_batch``).

Its ``PagedAttentionCache`` allocates keys and values in the model's dtype and has no hook for packed codes, so memory
is that of an unquantised cache. Keys and values are still rounded to the integers of the model's configuration, so
that outputs have the accuracy of the packed cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_paged import sdpa_attention_paged_forward

from quarot.integrations.transformers.attention import Output, refuse_unsupported
from quarot.nn.kv_format import KVFormat


def quarot_paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Output:
    """Packed-sequence attention; arguments as transformers' ``paged|sdpa`` gets them."""
    refuse_unsupported(kwargs)
    kv_format: KVFormat | None = getattr(module, "quarot_kv_format", None)
    if kv_format is not None and kv_format.quantizes:
        query = kv_format.rotate_heads(query)
        key, value = kv_format.simulate(key, value)
    return sdpa_attention_paged_forward(module, query, key, value, attention_mask, **kwargs)
