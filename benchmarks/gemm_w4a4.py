"""INT4 weights x INT4 activations: every GEMM of a decoder layer alone, and the four of a layer in sequence.

Peers: cuBLAS fp16 (what the model runs unquantised), ``torch._int_mm`` and row-wise FP8. Each row is checked against
the reference op, exactly, before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.peers import Make, cublas_fp16, fp8_rowwise, int_mm
from benchmarks.report import Row
from benchmarks.shapes import Options, Shape
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.quantize_per_token import UPPER_FACTOR, UPPER_ROWS
from quarot.ops.registry import reference_backend

TOKENS = (1, 16, 32, 64, 256, 512, 1024, 2048)
SEQUENCE_TOKENS = (1, 8, 16)
SUSTAINED_FROM, SUSTAIN = 1024, 0.2
"""From this many tokens on a prefill keeps the GPU at its power limit: each kernel and peer runs for this many seconds
before it is timed. ``benchmarks.gemm_candidates`` times all of them in turns, at the same clocks."""
SEQUENCE_REPLAYS = 100
"""0.1 to 0.9 s, because the clocks dip now and then for a tenth of a second (70B at M = 1: 122 us instead of 106)."""
CHECKED_ROWS = 64
"""Rows compared with the reference: results do not depend on M, so a slice of the tokens is as good as all of them."""


def replays(m: int, n: int, k: int) -> int:
    """Fewer repetitions where one call takes milliseconds."""
    return max(3, min(10, int(2e12 / (m * n * k))))


def moved_bytes(m: int, n: int, k: int, weight_bits: int = 4) -> int:
    """Bytes a call must move: packed weights, int8 codes, 16-bit outputs, scales."""
    return n * k * weight_bits // 8 + m * k + 2 * m * n + 4 * (m + n)


def operands(
    m: int, n: int, k: int, weight_bits: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes as the layers make them, token scales, weights (int4 tiles or int8 rows) and channel scales."""
    codes = torch.randint(-8, 8, (m, k), device="cuda", dtype=torch.int8)
    if m >= UPPER_ROWS:
        codes *= UPPER_FACTOR
    if weight_bits == 8:
        qweight = torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
    else:
        qweight = torch.randint(0, 256, (n // 16, k // 32, 256), device="cuda", dtype=torch.uint8)
    return codes, torch.rand(m, device="cuda") * 0.1, qweight, torch.rand(n, device="cuda") * 0.01


def check(m: int, n: int, k: int) -> None:
    """Raise unless the kernel equals the reference on this size."""
    codes, row_scale, qweight, weight_scale = operands(m, n, k)
    got = gemm_w4a4(codes, row_scale, qweight, weight_scale, None, torch.float16, False)
    rows = torch.randperm(m, device="cuda")[:CHECKED_ROWS].sort().values
    with reference_backend():
        want = gemm_w4a4(codes[rows], row_scale[rows], qweight, weight_scale, None, torch.float16, False)
    if not torch.equal(got[rows], want):
        raise AssertionError(f"gemm_w4a4 differs from its reference at M={m}, N={n}, K={k}")


def gemm(m: int, n: int, k: int) -> Make:
    """The op itself, for :func:`measure`."""

    def make() -> Call:
        codes, row_scale, qweight, weight_scale = operands(m, n, k)
        return lambda: gemm_w4a4(codes, row_scale, qweight, weight_scale, None, torch.float16, False)

    return make


def _single(shape: Shape, layer: str, m: int) -> Iterator[Row]:
    n, k = shape.linears[layer]
    check(m, n, k)
    moved, times = moved_bytes(m, n, k), replays(m, n, k)
    sustain = SUSTAIN if m >= SUSTAINED_FROM else 0.0
    us = measure(gemm(m, n, k), moved, replays=times, sustain=sustain)
    makes = {"cublas_fp16": (cublas_fp16(m, n, k), 2 * (m * k + n * k + m * n))}
    if m in (64, 1024):  # it is never the closest peer
        makes["int_mm"] = int_mm(m, n, k), m * k + n * k + 4 * m * n
    if torch.cuda.get_device_capability() >= (8, 9):
        makes["fp8_rowwise"] = fp8_rowwise(m, n, k), m * k + n * k + 2 * m * n
    peers = {name: measure(make, size, replays=times, sustain=sustain) for name, (make, size) in makes.items()}
    roof = roof_us(moved, int8_ops=2 * m * n * k)
    for peer, peer_us in peers.items():
        sizes = {"m": m, "n": n, "k": k, "dtype": "float16"}
        yield Row("gemm_w4a4", shape.model, layer, **sizes, us=us, roof_us=roof, peer=peer, peer_us=peer_us)


def _sequence(shape: Shape, m: int) -> Row:
    layers = list(shape.linears.values())

    def quantised() -> Call:
        calls = [gemm(m, n, k)() for n, k in layers]
        return lambda: [call() for call in calls]

    def full() -> Call:
        pairs = [[torch.randn(rows, k, device="cuda", dtype=torch.float16) for rows in (m, n)] for n, k in layers]
        return lambda: [F.linear(x, w) for x, w in pairs]

    moved = sum(moved_bytes(m, n, k) for n, k in layers)
    us = measure(quantised, moved, replays=SEQUENCE_REPLAYS)
    peer_us = measure(full, sum(2 * (m * k + n * k + m * n) for n, k in layers), replays=SEQUENCE_REPLAYS)
    roof = roof_us(moved)
    return Row("gemm_w4a4", shape.model, "sequence", m=m, dtype="float16", us=us, roof_us=roof, peer="cublas_fp16",
               peer_us=peer_us)  # fmt: skip


def rows(options: Options) -> Iterator[Row]:
    """Rows of every layer and M, then the four GEMMs of a layer in sequence."""
    for shape in options.shapes():
        for layer in shape.linears:
            for m in options.tokens if options.quick else TOKENS:
                yield from _single(shape, layer, m)
                torch.cuda.empty_cache()
        for m in SEQUENCE_TOKENS:
            yield _sequence(shape, m)
            torch.cuda.empty_cache()
