"""INT4 weights with a scale for every 128 inputs x INT4 activations, against cuBLAS fp16; checked exactly first."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gemm_w4a4 import CHECKED_ROWS, SUSTAIN, SUSTAINED_FROM, moved_bytes, operands, replays
from benchmarks.peers import Make, cublas_fp16
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.registry import reference_backend

GROUP = 128


def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    return *operands(m, n, k)[:3], torch.rand(n, k // GROUP, device="cuda") * 0.01


def check(m: int, n: int, k: int) -> None:
    """Raise unless the kernel equals the reference on this size."""
    codes, row_scale, qweight, scale = _operands(m, n, k)
    got = gemm_w4a4(codes, row_scale, qweight, scale, None, torch.float16, False)
    rows = torch.randperm(m, device="cuda")[:CHECKED_ROWS].sort().values
    with reference_backend():
        want = gemm_w4a4(codes[rows], row_scale[rows], qweight, scale, None, torch.float16, False)
    if not torch.equal(got[rows], want):
        raise AssertionError(f"gemm_w4a4 with groups differs from its reference at M={m}, N={n}, K={k}")


def gemm(m: int, n: int, k: int) -> Make:
    """The op itself, for :func:`measure`."""

    def make() -> Call:
        inputs = _operands(m, n, k)
        return lambda: gemm_w4a4(*inputs, None, torch.float16, False)

    return make


def rows(options: Options) -> Iterator[Row]:
    """One row a layer and M, of the first model."""
    for shape in list(options.shapes())[:1]:
        for layer, (n, k) in shape.linears.items():
            for m in options.tokens:
                if m > 2048:
                    continue
                check(m, n, k)
                moved, times = moved_bytes(m, n, k) + 4 * n * k // GROUP, replays(m, n, k)
                sustain = SUSTAIN if m >= SUSTAINED_FROM else 0.0
                us = measure(gemm(m, n, k), moved, replays=times, sustain=sustain)
                peer_size = 2 * (m * k + n * k + m * n)
                peer_us = measure(cublas_fp16(m, n, k), peer_size, replays=times, sustain=sustain)
                roof = roof_us(moved, int8_ops=2 * m * n * k)
                yield Row("gemm_w4a4_g128", shape.model, layer, m=m, n=n, k=k, dtype="float16", us=us, roof_us=roof,
                          peer="cublas_fp16", peer_us=peer_us)  # fmt: skip
                torch.cuda.empty_cache()
