"""Reading packed tokens back as fp16, as chunked prefill does, against a copy of that size (m = tokens, n = heads)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kv_append import PAGE
from benchmarks.peers import copy_floor
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.kv_gather import kv_gather
from quarot.ops.kv_layout import KVLayout


def rows(options: Options) -> Iterator[Row]:
    """One row a kv geometry and number of tokens."""
    for shape in options.cache_shapes():
        heads, dim = shape.kv_heads, shape.head_dim
        layout = KVLayout(dim)
        for tokens in options.tokens:
            nbytes = tokens * (heads * (4 * dim + layout.bytes_per_token) + 8)

            def make(tokens: int = tokens, heads: int = heads, layout: KVLayout = layout) -> Call:
                pages = -(-tokens // PAGE)
                # Bytes below 0x3c: fp16 params between 0 and 1.06, any codes.
                shape = layout.pool_shape(pages, heads, PAGE)
                pool = torch.randint(0, 0x3C, shape, dtype=torch.uint8, device="cuda")
                slots = torch.arange(tokens, device="cuda")
                return lambda: kv_gather(pool, slots, 4, 4, 128, 128, torch.float16)

            fields = {"m": tokens, "n": heads, "k": dim, "dtype": "int4", "us": measure(make, nbytes)}
            fields |= {"roof_us": roof_us(nbytes), "peer": "copy_floor", "peer_us": measure(copy_floor(nbytes), nbytes)}
            yield Row("kv_gather", shape.model, **fields)
