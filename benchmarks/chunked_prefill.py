"""Attention of a chunk of a prompt over its packed past, against PyTorch on an fp16 past (m = chunk, n = past)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from transformers import LlamaConfig

from benchmarks.report import Row
from benchmarks.shapes import Options, Shape
from benchmarks.timing import Call, measure, roof_us
from quarot import QuantKVCache
from quarot.integrations.transformers.attention import _chunk

CHUNKS = (32, 128, 512, 2048)
PASTS = (8192, 32768)


def _qkv(shape: Shape, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(1, n, count, shape.head_dim, device="cuda", dtype=torch.float16) for n in sizes)
    return q, k, v


def _ours(shape: Shape, chunk: int, past: int) -> Call:
    config = LlamaConfig(
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
    )
    cache = QuantKVCache(config, reserve=past + chunk)
    step: Any = None
    for start in range(0, past + chunk, 2048):
        count = min(2048, past + chunk - start) if start < past else chunk
        query, key, value = _qkv(shape, count)
        handle, _ = cache.update(key, value, 0)
        step = cache.advance(cache.layers[0], 1, count, None)
        cache.layers[0].store(key, value, step)
    handle = SimpleNamespace(cache=cache, layer=cache.layers[0], key=key, value=value)
    return lambda: _chunk(query, handle, step, None, shape.head_dim**-0.5, 0)  # type: ignore[arg-type]


def _peer(shape: Shape, chunk: int, past: int) -> Call:
    query = _qkv(shape, chunk)[0]
    _, key, value = _qkv(shape, past + chunk)
    mask = causal_lower_right(chunk, past + chunk)
    return lambda: nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def rows(options: Options) -> Iterator[Row]:
    """One row a geometry, chunk and past; eager launches, as prefill runs."""
    shape = next(options.shapes())
    for past in PASTS[:1] if options.quick else PASTS:
        for chunk in CHUNKS:
            flops = 4.0 * shape.heads * shape.head_dim * chunk * (past + chunk / 2)
            times = [
                measure(lambda make=make: make(shape, chunk, past), 1 << 30, graph=False)  # type: ignore[misc] # noqa: B023
                for make in (_ours, _peer)
            ]
            fields = {"m": chunk, "n": past, "k": shape.head_dim, "dtype": "int4", "us": times[0]}
            fields |= {"roof_us": roof_us(0, fp16_flops=flops), "peer": "torch_sdpa_fp16", "peer_us": times[1]}
            yield Row("chunked_prefill", shape.model, **fields)
