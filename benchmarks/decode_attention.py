"""Decode attention on the packed 4-bit cache against FlashInfer's fp16 and fp8 decode (m = batch, n = context)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import flashinfer_decode
from benchmarks.report import Row
from benchmarks.shapes import Options, Shape
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.decode_attention import decode_attention
from quarot.ops.kv_append import kv_append
from quarot.ops.kv_gather import kv_gather
from quarot.ops.kv_layout import KVLayout

PAGE = 64
BITS = (4, 8, 3, 2)
_LARGEST_CACHE = 8 << 30  # bytes in fp16, so that two copies of the peer's cache fit

# Mixed lengths: one long among short, uniform, log-uniform.
MIXED = {
    "1x32k+15x2k": [32768] + [2048] * 15,
    "64 uniform 1..8k": [1 + 130 * (i * 37 % 64) for i in range(64)],
    "64 log-uniform 128..16k": [int(128 * 2 ** (7 * (i * 29 % 64) / 64)) for i in range(64)],
}


def _tables(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Page table with shuffled pages, lengths, number of pages."""
    pages = [-(-length // PAGE) for length in lengths]
    order, used = torch.randperm(sum(pages), dtype=torch.int32), 0
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, count in enumerate(pages):
        table[row, :count] = order[used : used + count]
        used += count
    return table.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"), used


def _check(shape: Shape, bits: int) -> None:
    """Against float64 on the dequantised cache, once a shape."""
    dim, length = shape.head_dim, 300
    layout, form = KVLayout(dim, bits, bits), (bits, bits, 128, 128)
    pool = torch.zeros(layout.pool_shape(5, shape.kv_heads, PAGE), dtype=torch.uint8, device="cuda")
    key, value = (torch.randn(length, shape.kv_heads, dim, device="cuda", dtype=torch.float16) for _ in range(2))
    slots = torch.arange(length, device="cuda")
    kv_append(pool, key, value, slots, *form, 0.95, 0.95, 0, 0)
    query = torch.randn(1, 1, shape.heads, dim, device="cuda", dtype=torch.float16)
    table = torch.arange(5, dtype=torch.int32, device="cuda")[None]
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    out, _ = decode_attention(query, pool, table, lengths, *form, dim**-0.5, 0, 0, 0)
    key, value = (x.double().transpose(0, 1) for x in kv_gather(pool, slots, *form, torch.float32))
    grouped = query.double().view(shape.kv_heads, -1, dim)
    exact = (torch.softmax(grouped @ key.transpose(1, 2) * dim**-0.5, -1) @ value).view_as(out)
    error = (out.double() - exact).norm() / exact.norm()
    if error > 1e-3:
        raise AssertionError(f"decode_attention of {shape.model} at {bits} bits is off by {error:.1e}")


def decode_us(shape: Shape, lengths: list[int], bits: int) -> tuple[float, int]:
    """(microseconds, bytes of the packed tokens) of one call."""
    layout, form = KVLayout(shape.head_dim, bits, bits), (bits, bits, 128, 128)
    table, device_lengths, pages = _tables(lengths)
    query = torch.randn(len(lengths), 1, shape.heads, shape.head_dim, device="cuda", dtype=torch.float16)
    nbytes = sum(lengths) * shape.kv_heads * layout.bytes_per_token

    def make() -> Call:
        # Bytes below 0x3c: fp16 params between 0 and 1.06, any codes.
        pool = torch.randint(0, 0x3C, layout.pool_shape(pages, shape.kv_heads, PAGE), dtype=torch.uint8, device="cuda")
        arguments = (query, pool, table, device_lengths, *form, shape.head_dim**-0.5, 0, 0, 0)
        return lambda: decode_attention(*arguments)

    return measure(make, nbytes, replays=10), nbytes


def rows(options: Options) -> Iterator[Row]:
    """One row a model, batch, context and peer; other widths and mixed lengths against the byte roof."""
    geometries: dict[tuple[int, int, int], Shape] = {}
    for shape in options.shapes():
        geometries.setdefault((shape.heads, shape.kv_heads, shape.head_dim), shape)
    for shape in geometries.values():
        _check(shape, 4)
        for batch in options.batches:
            for context in options.contexts:
                if 4 * batch * context * shape.kv_heads * shape.head_dim > _LARGEST_CACHE:
                    continue
                us, nbytes = decode_us(shape, [context] * batch, 4)
                base = {"m": batch, "n": context, "k": shape.head_dim, "dtype": "int4", "us": us}
                base["roof_us"] = roof_us(nbytes)
                peers = []
                if flashinfer_decode.available():
                    peers = list(
                        flashinfer_decode.decode_us([context] * batch, shape.heads, shape.kv_heads, shape.head_dim)
                    )
                for peer, peer_us in peers or [(None, None)]:
                    yield Row("decode_attention", shape.model, **base, peer=peer, peer_us=peer_us)
                torch.cuda.empty_cache()
    if options.quick:
        return
    shape = next(shape for shape in geometries.values())
    for bits in BITS[1:]:
        us, nbytes = decode_us(shape, [8192] * 16, bits)
        fields = {"m": 16, "n": 8192, "k": shape.head_dim, "dtype": f"int{bits}", "us": us, "roof_us": roof_us(nbytes)}
        yield Row("decode_attention", shape.model, **fields)
    for name, lengths in MIXED.items():
        us, nbytes = decode_us(shape, lengths, 4)
        fields = {"m": len(lengths), "k": shape.head_dim, "dtype": "int4", "us": us, "roof_us": roof_us(nbytes)}
        yield Row("decode_attention", shape.model, name, **fields)
