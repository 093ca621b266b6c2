"""Inputs, outputs and weights of more than 2^31 elements: what lies behind them is what it is in a small call."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from quarot.ops import registry
from quarot.ops.add_rms_norm_quantize import add_rms_norm_quantize
from quarot.ops.decode_attention import decode_attention
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.ops.hadamard import hadamard
from quarot.ops.hadamard_quantize import hadamard_quantize
from quarot.ops.kv_append import kv_append
from quarot.ops.kv_gather import kv_gather
from quarot.ops.kv_layout import KVLayout
from quarot.ops.quantize_per_token import quantize_per_token
from quarot.ops.rope_kv_append import rope_kv_append
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize
from quarot.quantization.packing import pack_int4_tiles, unpack_int4_tiles

BYTES = 24 * 2**30
"""Of the largest test."""

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None or torch.cuda.mem_get_info()[0] < 2 * BYTES,
    reason=f"needs the compiled extension and a GPU with {2 * BYTES >> 30} GiB to spare",
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One of these tests at a time, whatever process it is in; its memory is given back."""
    with open(os.path.join(tempfile.gettempdir(), f"quarot-large-shapes-{os.getuid()}"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda")


def expected(codes: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (codes.double() @ weight.double().T).float() * rows[:, None] * scale


@pytest.mark.parametrize(("dtype", "m"), [(torch.float16, 70001), (torch.float32, 66001)], ids=str)
def test_outputs(dtype: torch.dtype, m: int) -> None:
    n, k = 32768, 64
    codes, weight = integers(m, k), integers(n, k)
    rows, scale = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    for multiply, operand in ((gemm_w4a4, pack_int4_tiles(weight)), (gemm_w8a8, weight)):
        out = multiply(codes, rows, operand, scale, None, dtype)
        assert out.numel() > 2**31
        for at in (0, 32767, 65535, m - 64):  # 65536 rows are 2^31 elements
            some = slice(at, at + 64)
            assert torch.equal(out[some], expected(codes[some], rows[some], weight, scale).to(dtype))
        del out


@pytest.mark.parametrize("m", [1, 9, 17, 33, 64, 129, 600])
def test_int4_weights(m: int) -> None:
    """4.8 * 10^9 weights are 2.4 * 10^9 bytes."""
    n, k = 73728, 65536
    codes, rows, scale = integers(m, k), torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    tiles = torch.randint(0, 256, (n // 16, k // 32, 256), dtype=torch.uint8, device="cuda")
    out = gemm_w4a4(codes, rows, tiles, scale, None, torch.bfloat16)
    for strip in (0, n // 32, n // 16 - 4):
        weight = unpack_int4_tiles(tiles[strip : strip + 4], 64, k)
        some = slice(16 * strip, 16 * strip + 64)
        assert torch.equal(out[:, some], expected(codes, rows, weight, scale[some]).bfloat16())


@pytest.mark.parametrize("m", [1, 17, 33, 64, 300])
def test_int8_weights(m: int) -> None:
    n, k = 40960, 65536
    codes, rows, scale = integers(m, k), torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    out = gemm_w8a8(codes, rows, weight, scale, None, torch.bfloat16)
    for some in (slice(0, 64), slice(32736, 32800), slice(n - 64, n)):  # 32768 rows are 2^31 bytes
        assert torch.equal(out[:, some], expected(codes, rows, weight[some], scale[some]).bfloat16())


OPS = {
    "quantize": (11008, lambda x: quantize_per_token(x, 4, 0.9)),
    "upper": (11008, lambda x: quantize_per_token(x, 4, 0.9, False, True)),
    "norm": (8192, lambda x: add_rms_norm_quantize(x, x, 1e-5, 4, 0.9)),
    "rotate": (11008, lambda x: hadamard_quantize(x, 172, 64, 1, 4, 0.9)),
    "rotate 14336": (14336, lambda x: hadamard_quantize(x, 28, 512, 1, 4, 0.9)),
    "heads": (4096, lambda x: hadamard_quantize(x, 1, 32, 128, 4, 0.9)),
    "any size": (8640, lambda x: hadamard_quantize(x, 540, 16, 1, 4, 0.9)),
    "plain": (4096, lambda x: (hadamard(x, 1, 4096, 1),)),
    "silu": (22016, lambda x: silu_mul_hadamard_quantize(x, 172, 64, 4, 0.9)),
    "silu 14336": (28672, lambda x: silu_mul_hadamard_quantize(x, 28, 512, 4, 0.9)),
}


@pytest.mark.parametrize("op", OPS)
def test_rows(op: str) -> None:
    """Inputs of 2^32 elements; codes from twice as few on are beyond 2^31 too."""
    k, run = OPS[op]
    m = 2**32 // k + 1000
    x = torch.empty(m, k, dtype=torch.float16, device="cuda").normal_()
    together = run(x)
    for some in (slice(2**31 // k - 600, 2**31 // k + 600), slice(m - 1200, m)):  # the kernel for many rows as well
        for part, alone in zip(together, run(x[some].clone()), strict=True):
            assert torch.equal(part[some], alone)


@pytest.mark.parametrize(
    ("form", "rows"), [((128, 4, 4, 128, 128), 1), ((64, 8, 8, 64, 64), 70), ((96, 3, 4, 96, 96), 5)]
)
def test_pools(form: tuple[int, ...], rows: int) -> None:
    """The last pages of a pool of more than 2^32 bytes against a pool of these pages alone."""
    dim, heads, size, per_row = form[0], 8, 64, 6
    layout, count = KVLayout(*form), per_row * rows
    small = torch.zeros(layout.pool_shape(count, heads, size), dtype=torch.uint8, device="cuda")
    more = 2**32 // small[0].numel() + 5
    large = torch.zeros(layout.pool_shape(count + more, heads, size), dtype=torch.uint8, device="cuda")
    order = (1, dim) if dim & (dim - 1) == 0 else (0, 0)
    pages = torch.randperm(count, device="cuda").view(rows, per_row)
    lengths = torch.randint(200, per_row * size, (rows,), device="cuda", dtype=torch.int32)
    position = torch.arange(per_row * size - 1, device="cuda")
    slots = (pages[:, position // size] * size + position % size).flatten()
    key, value = torch.randn(2, len(slots), heads, dim, device="cuda", dtype=torch.float16)
    qkv = torch.randn(rows, (4 * heads + 2 * heads) * dim, device="cuda", dtype=torch.float16)
    angle = torch.randn(rows, dim // 2, device="cuda").repeat(1, 2)
    cos, sin = angle.cos().half(), angle.sin().half()
    last = pages[:, -1] * size + size - 1
    outs = []
    for pool, first in ((small, 0), (large, more)):
        kv_append(pool, key, value, slots + first * size, *form[1:], 0.95, 1.0, *order)
        query = rope_kv_append(
            qkv, cos, sin, pool, last + first * size, 4 * heads, *form[1:], 0.95, 1.0, *order, None, None, 0.0, True
        )
        table = (pages + first).int()
        query = query.view(rows, 1, 4 * heads, dim)
        out = decode_attention(query, pool, table, lengths, *form[1:], dim**-0.5, 0, 0, 0)
        outs.append((query, *out, *kv_gather(pool, slots + first * size, *form[1:], torch.float16), pool[first:]))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours, theirs)
    assert not large[:more].any()
