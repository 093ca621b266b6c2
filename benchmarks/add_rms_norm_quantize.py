"""Residual add + RMSNorm + codes against a copy of the same bytes and against the PyTorch chain."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.activations import BITS, CLIP, keeping, row_per_peer, same_codes, tokens, torch_quantize
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call
from quarot.ops.add_rms_norm_quantize import add_rms_norm_quantize
from quarot.ops.registry import reference_backend

EPS = 1e-5


def _pair(m: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = (torch.randn(m, width, device="cuda", dtype=torch.float16) for _ in range(2))
    return x, residual


def rows(options: Options) -> Iterator[Row]:
    """One row a hidden width, M and peer."""
    done = set()
    for shape in options.shapes():
        width = shape.hidden
        if width in done:
            continue
        done.add(width)
        x, residual = _pair(300, width)
        codes = add_rms_norm_quantize(x, residual, EPS, BITS, CLIP, False)[0]
        with reference_backend():
            same_codes(
                codes, add_rms_norm_quantize(x, residual, EPS, BITS, CLIP, False)[0], "add_rms_norm_quantize", 2e-4
            )
        for m in tokens(options):

            def make(m: int = m, width: int = width) -> Call:
                x, residual = _pair(m, width)
                return keeping(lambda: add_rms_norm_quantize(x, residual, EPS, BITS, CLIP, False))

            def make_unfused(m: int = m, width: int = width) -> Call:
                x, residual = _pair(m, width)

                def chain() -> tuple[torch.Tensor, ...]:
                    total = x + residual
                    return (total, *torch_quantize(F.rms_norm(total, (width,), eps=EPS)))

                return keeping(chain)

            yield from row_per_peer(
                "add_rms_norm_quantize", shape.model, "attn_norm", m, width, 7 * m * width, make, make_unfused
            )
