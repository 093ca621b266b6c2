"""Appending to the packed 4-bit cache (R3, quantise, write) against a copy of that size (m = tokens, n = heads)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.peers import copy_floor
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.kv_append import kv_append
from quarot.ops.kv_layout import KVLayout

PAGE = 64


def rows(options: Options) -> Iterator[Row]:
    """One row a kv geometry and number of tokens."""
    for shape in options.cache_shapes():
        heads, dim = shape.kv_heads, shape.head_dim
        layout, rest = KVLayout(dim), (4, 4, 128, 128, 0.95, 0.95, 1, dim)
        for tokens in options.tokens:
            nbytes = tokens * (heads * (4 * dim + layout.bytes_per_token) + 8)
            pages = -(-tokens // PAGE)

            def make(tokens: int = tokens, pages: int = pages) -> Call:
                pool = torch.zeros(layout.pool_shape(pages, heads, PAGE), dtype=torch.uint8, device="cuda")  # noqa: B023
                key, value = (torch.randn(tokens, heads, dim, device="cuda", dtype=torch.float16) for _ in range(2))  # noqa: B023
                slots = torch.arange(tokens, device="cuda")
                return lambda: kv_append(pool, key, value, slots, *rest)  # noqa: B023

            fields = {"m": tokens, "n": heads, "k": dim, "dtype": "int4", "us": measure(make, nbytes)}
            fields |= {"roof_us": roof_us(nbytes), "peer": "copy_floor", "peer_us": measure(copy_floor(nbytes), nbytes)}
            yield Row("kv_append", shape.model, **fields)
