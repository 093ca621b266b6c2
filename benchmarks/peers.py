"""What the kernels are compared with: each function returns ``make`` for :func:`benchmarks.timing.measure`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.timing import Call

Make = Callable[[], Call]


def cublas_fp16(m: int, n: int, k: int, dtype: torch.dtype = torch.float16) -> Make:
    """``F.linear`` in half precision: what the full-precision model runs."""

    def make() -> Call:
        x, w = (torch.randn(rows, k, device="cuda", dtype=dtype) for rows in (m, n))
        return lambda: F.linear(x, w)

    return make


def int_mm(m: int, n: int, k: int) -> Make:
    """``torch._int_mm`` (cuBLASLt INT8, int32 out, no scales); it needs 17 rows and multiples of 8, so M is padded."""
    padded = max(32, -(-m // 8) * 8)

    def make() -> Call:
        x = torch.randint(-8, 8, (padded, k), device="cuda", dtype=torch.int8)
        w = torch.randint(-8, 8, (n, k), device="cuda", dtype=torch.int8)
        return lambda: torch._int_mm(x, w.t())

    return make


def fp8_rowwise(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Make:
    """``torch._scaled_mm`` with a scale per row and per column, the FP8 peer (M padded to 16)."""
    padded = -(-m // 16) * 16

    def make() -> Call:
        x = torch.randn(padded, k, device="cuda").to(torch.float8_e4m3fn)
        w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        row, column = torch.rand(padded, 1, device="cuda"), torch.rand(1, n, device="cuda")
        return lambda: torch._scaled_mm(x, w.t(), scale_a=row, scale_b=column, out_dtype=dtype)

    return make


def _quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a float32 scale a row, largest magnitude to 448."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


@functools.cache
def _compiled_quantise_fp8() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    # One kernel: here it takes 10 s, through a pool of processes that import torch first more than twice as long.
    return torch.compile(_quantise_fp8, dynamic=True, options={"compile_threads": 1})


def fp8_rowwise_quantised(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Make:
    """The FP8 peer from 16-bit activations on: its row-wise quantiser as one compiled kernel, then the product."""
    padded, quantise = -(-m // 16) * 16, _compiled_quantise_fp8()

    def make() -> Call:
        x = torch.randn(padded, k, device="cuda", dtype=dtype)
        w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        column = torch.rand(1, n, device="cuda")

        def call() -> torch.Tensor:
            codes, scale = quantise(x)
            return torch._scaled_mm(codes, w.t(), scale_a=scale, scale_b=column, out_dtype=dtype)

        return call

    return make


def copy_floor(nbytes: int) -> Make:
    """A copy that moves ``nbytes`` in all (half read, half written): no kernel with that traffic is faster."""

    def make() -> Call:
        source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return make
