"""SiLU(gate) * up -> Hadamard -> codes against a copy of the same bytes and against the PyTorch chain."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.activations import (
    BITS,
    CLIP,
    keeping,
    row_per_peer,
    same_codes,
    spec_of,
    tokens,
    torch_hadamard,
    torch_quantize,
    torch_silu_mul,
)
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call
from quarot.ops.registry import reference_backend
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize


def rows(options: Options) -> Iterator[Row]:
    """One row an intermediate width, M and peer."""
    done = set()
    for shape in options.shapes():
        width = shape.intermediate
        if width in done:
            continue
        done.add(width)
        spec, transform = spec_of(width), torch_hadamard(spec_of(width))

        def make_for(m: int, width: int = width, spec=spec) -> Call:  # type: ignore[no-untyped-def]
            pair = torch.randn(m, 2 * width, device="cuda", dtype=torch.float16)
            return keeping(lambda: silu_mul_hadamard_quantize(pair, spec.order, spec.pow2, BITS, CLIP, False))

        pair = torch.randn(300, 2 * width, device="cuda", dtype=torch.float16)
        codes, _ = silu_mul_hadamard_quantize(pair, spec.order, spec.pow2, BITS, CLIP, False)
        with reference_backend():
            expected, _ = silu_mul_hadamard_quantize(pair, spec.order, spec.pow2, BITS, CLIP, False)
        same_codes(codes, expected, f"silu_mul_hadamard_quantize of {width}", 0.002)
        for m in tokens(options):

            def make(m: int = m, make_for=make_for) -> Call:  # type: ignore[no-untyped-def]
                return make_for(m)

            def make_unfused(m: int = m, width: int = width, transform=transform) -> Call:  # type: ignore[no-untyped-def]
                pair = torch.randn(m, 2 * width, device="cuda", dtype=torch.float16)
                return keeping(lambda: torch_quantize(transform(torch_silu_mul(pair))))

            yield from row_per_peer(
                "silu_mul_hadamard_quantize", shape.model, "down_proj", m, width, 5 * m * width, make, make_unfused
            )
