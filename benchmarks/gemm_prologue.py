"""GEMMs of few tokens that make their own codes, against the two kernels that they stand for, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.activations import BITS, CLIP, keeping, spec_of
from benchmarks.add_rms_norm_quantize import EPS
from benchmarks.gemm_w4a4 import moved_bytes, operands
from benchmarks.report import Row
from benchmarks.shapes import Options, Shape
from benchmarks.timing import Call, measure, roof_us
from quarot.ops import add_rms_norm_gemm_w4a4 as norm_gemm
from quarot.ops import hadamard_gemm_w4a4 as heads_gemm
from quarot.ops import silu_mul_hadamard_gemm_w4a4 as silu_gemm
from quarot.ops.add_rms_norm_quantize import add_rms_norm_quantize
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.hadamard_quantize import hadamard_quantize
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize
from quarot.rotation.hadamard import hadamard_spec

TOKENS = (1, 2, 4, 8)
Arguments = tuple[Any, ...]


def _operation(shape: Shape, layer: str) -> tuple[Any, Callable[..., Any], Arguments, int]:
    """Module of the op, the op before the GEMM of two kernels, what both take after the rows, columns over K."""
    if layer == "o_proj":
        spec = hadamard_spec(shape.heads)
        assert spec is not None
        return heads_gemm, hadamard_quantize, (spec.order, spec.pow2, shape.head_dim, BITS, CLIP), 1
    if layer == "down_proj":
        spec = spec_of(shape.intermediate)
        return silu_gemm, silu_mul_hadamard_quantize, (spec.order, spec.pow2, BITS, CLIP), 2
    return norm_gemm, add_rms_norm_quantize, (EPS, BITS, CLIP), 1


def _calls(shape: Shape, layer: str, m: int) -> tuple[Call, Call] | None:
    """The layer on fresh inputs by one kernel and by two; None where there is no such kernel."""
    n, k = shape.linears[layer]
    module, before, rule, width = _operation(shape, layer)
    rows: Arguments = (torch.randn(m, width * k, device="cuda", dtype=torch.float16),)
    if module is norm_gemm:
        rows += (torch.randn_like(rows[0]),)
    weight = (*operands(1, n, k)[2:], None)
    if module.available(*rows, *rule, *weight) is not None:
        return None
    op = getattr(module, module.__name__.rpartition(".")[2])

    def two() -> tuple[torch.Tensor, ...]:
        codes, scale, *rest = before(*rows, *rule)
        return gemm_w4a4(codes, scale, *weight, torch.float16), *rest

    return keeping(lambda: op(*rows, *rule, *weight)), keeping(two)


def rows(options: Options) -> Iterator[Row]:
    """One row a layer and M."""
    for shape in options.shapes():
        for layer, (n, k) in shape.linears.items():
            name = _operation(shape, layer)[0].__name__.rpartition(".")[2]
            for m in TOKENS[:1] if options.quick else TOKENS:
                if _calls(shape, layer, m) is None:
                    continue
                moved = moved_bytes(m, n, k) + 5 * m * k

                def make(index: int, shape: Shape = shape, layer: str = layer, m: int = m) -> Call:
                    calls = _calls(shape, layer, m)
                    assert calls is not None
                    return calls[index]

                one, two = (measure(lambda make=make, index=index: make(index), moved) for index in (0, 1))
                yield Row(name, shape.model, layer, m=m, n=n, k=k, dtype="float16", us=one, roof_us=roof_us(moved),
                          peer="two_kernels", peer_us=two)  # fmt: skip
                torch.cuda.empty_cache()
