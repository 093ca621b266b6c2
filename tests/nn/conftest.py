"""Small packed caches, what goes into them, and what they hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from quarot import QuantKVCache
from quarot.integrations.transformers.attention import quarot_attention


class Caches:
    """Caches of two layers with two heads of keys and values each, in pages of 16 tokens."""

    HEADS, DIM, LAYERS = 2, 32, 2
    CONFIG = LlamaConfig(num_attention_heads=4, num_key_value_heads=HEADS, head_dim=DIM, num_hidden_layers=LAYERS)

    class Attention(nn.Module):
        """What the attention function needs to know of a module."""

        num_key_value_groups, is_causal, training = 2, True, False

    def new(self, **options) -> QuantKVCache:
        return QuantKVCache(self.CONFIG, **({"page_size": 16} | options))

    def tokens(self, batch: int, count: int, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> tuple[Tensor, ...]:
        """Keys and values [batch, heads, count, dim]."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(batch, heads, count, dim, generator=generator) for _ in range(2))

    def push(self, cache: QuantKVCache, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """One forward through every layer; returns the attention outputs."""
        query = torch.cat([key, value], dim=1)
        outs = []
        for index in range(self.LAYERS):
            handles = cache.update(key * (index + 1), value, index)
            outs.append(quarot_attention(self.Attention(), query, *handles, mask)[0])
        return torch.stack(outs)

    def left_mask(self, valid: Tensor) -> Tensor:
        """4D mask of new tokens from bool [B, T]."""
        count = valid.shape[1]
        return torch.ones(count, count, dtype=torch.bool).tril() & valid[:, None, None, :]

    def stored(self, cache: QuantKVCache, layer: int = 0) -> list[Tensor]:
        """Dequantised keys and values of every row, as a list of [length, 2 * heads * dim]."""
        one = cache.layers[layer]
        rows = []
        for row, length in enumerate(cache.table.lengths[: cache.table.batch].tolist()):
            position = torch.arange(length)
            table = cache.table.table(one.device) if not cache.is_static else cache.table.pages
            slots = table[row][position // cache.page_size].long() * cache.page_size + position % cache.page_size
            key, value = one.gather(slots[None])
            rows.append(torch.cat([key[0].transpose(0, 1), value[0].transpose(0, 1)], 1).flatten(1))
        return rows

    def same(self, one: QuantKVCache, other: QuantKVCache) -> bool:
        """Whether two caches hold the same."""
        for layer in range(self.LAYERS):
            a, b = self.stored(one, layer), self.stored(other, layer)
            if len(a) != len(b) or any(not torch.equal(x, y) for x, y in zip(a, b, strict=True)):
                return False
        return True


@pytest.fixture
def kv() -> Caches:
    return Caches()
