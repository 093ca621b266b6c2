"""INT4 weights with a scale for every 128 inputs x INT4 activations, against cuBLAS fp16; checked exactly first."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gemm_w4a4 import moved_bytes, operands, replays
from benchmarks.peers import cublas_fp16
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.registry import reference_backend

GROUP = 128


def rows(options: Options) -> Iterator[Row]:
    """One row a layer and M, of the first model."""
    for shape in list(options.shapes())[:1]:
        for layer, (n, k) in shape.linears.items():
            for m in options.tokens:
                if m > 2048:
                    continue

                def make(m: int = m, n: int = n, k: int = k) -> Call:
                    codes, row_scale, qweight, _ = operands(m, n, k)
                    scale = torch.rand(n, k // GROUP, device="cuda") * 0.01
                    return lambda: gemm_w4a4(codes, row_scale, qweight, scale, None, torch.float16, False)

                call = make(min(m, 64))
                with reference_backend():
                    want = call()
                if not torch.equal(call(), want):
                    raise AssertionError(f"gemm_w4a4 with groups differs from its reference at M={m}, N={n}, K={k}")
                moved, times = moved_bytes(m, n, k) + 4 * n * k // GROUP, replays(m, n, k)
                us = measure(make, moved, replays=times)
                peer_us = measure(cublas_fp16(m, n, k), 2 * (m * k + n * k + m * n), replays=times)
                roof = roof_us(moved, int8_ops=2 * m * n * k)
                yield Row("gemm_w4a4_g128", shape.model, layer, m=m, n=n, k=k, dtype="float16", us=us, roof_us=roof,
                          peer="cublas_fp16", peer_us=peer_us)  # fmt: skip
                torch.cuda.empty_cache()
