"""INT8 weights x INT8 activations against cuBLAS fp16 and row-wise FP8, checked exactly against the reference first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gemm_w4a4 import SUSTAIN, SUSTAINED_FROM, moved_bytes, replays
from benchmarks.peers import cublas_fp16, fp8_rowwise, int_mm
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.ops.registry import reference_backend


def _make(m: int, n: int, k: int) -> Call:
    codes = torch.randint(-128, 128, (m, k), device="cuda", dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
    row_scale, weight_scale = torch.rand(m, device="cuda") * 0.01, torch.rand(n, device="cuda") * 0.001
    return lambda: gemm_w8a8(codes, row_scale, weight, weight_scale, None, torch.float16)


def rows(options: Options) -> Iterator[Row]:
    """One row a layer, M and peer, of the first model."""
    for shape in list(options.shapes())[:1]:
        for layer, (n, k) in shape.linears.items():
            for m in options.tokens:
                call = _make(min(m, 64), n, k)
                with reference_backend():
                    want = call()
                if not torch.equal(call(), want):
                    raise AssertionError(f"gemm_w8a8 differs from its reference at M={min(m, 64)}, N={n}, K={k}")
                moved, times = moved_bytes(m, n, k, 8), replays(m, n, k)
                sustain = SUSTAIN if m >= SUSTAINED_FROM else 0.0
                us = measure(partial(_make, m, n, k), moved, replays=times, sustain=sustain)
                makes = {"cublas_fp16": (cublas_fp16(m, n, k), 2 * (m * k + n * k + m * n))}
                if m > 16:
                    makes["int_mm"] = int_mm(m, n, k), m * k + n * k + 4 * m * n
                if torch.cuda.get_device_capability() >= (8, 9):
                    makes["fp8_rowwise"] = fp8_rowwise(m, n, k), m * k + n * k + 2 * m * n
                peers = {p: measure(make, size, replays=times, sustain=sustain) for p, (make, size) in makes.items()}
                roof = roof_us(moved, int8_ops=2 * m * n * k)
                for peer, peer_us in peers.items():
                    yield Row("gemm_w8a8", shape.model, layer, m=m, n=n, k=k, dtype="float16", us=us, roof_us=roof,
                              peer=peer, peer_us=peer_us)  # fmt: skip
                torch.cuda.empty_cache()
