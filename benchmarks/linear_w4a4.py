"""A whole linear layer, from 16-bit activations to 16-bit outputs: quantiser (with its Hadamard) and GEMM.

The layers are those of a rotated decoder: qkv and gate_up quantise, o_proj rotates across heads first, down_proj over
its full width (R4). Peers do the same product: cuBLAS fp16 on its own, and row-wise FP8 with its quantisation (compiled
by ``torch.compile``), neither with a rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.activations import BITS, CLIP, keeping, spec_of
from benchmarks.gemm_w4a4 import CHECKED_ROWS, SUSTAIN, SUSTAINED_FROM, moved_bytes, operands, replays
from benchmarks.peers import cublas_fp16, fp8_rowwise_quantised
from benchmarks.report import Row
from benchmarks.shapes import Options, Shape
from benchmarks.timing import Call, measure, roof_us
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.hadamard_quantize import hadamard_quantize
from quarot.ops.quantize_per_token import UPPER_ROWS, quantize_per_token
from quarot.ops.registry import reference_backend
from quarot.rotation.hadamard import hadamard_spec

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096)
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _upper(x: torch.Tensor) -> bool:
    """As ``QuantLinear`` asks for its codes."""
    return len(x) >= UPPER_ROWS


def quantiser(shape: Shape, layer: str) -> Quantise:
    """What stands in front of this layer's GEMM."""
    if layer == "down_proj":
        spec = spec_of(shape.intermediate)
        return lambda x: hadamard_quantize(x, spec.order, spec.pow2, 1, BITS, CLIP, False, _upper(x))
    heads = hadamard_spec(shape.heads)
    if layer == "o_proj" and heads is not None:
        return lambda x: hadamard_quantize(x, heads.order, heads.pow2, shape.head_dim, BITS, CLIP, False, _upper(x))
    return lambda x: quantize_per_token(x, BITS, CLIP, False, _upper(x))


def _linear(shape: Shape, layer: str, m: int) -> Callable[[], Call]:
    n, k = shape.linears[layer]
    quantise = quantiser(shape, layer)

    def make() -> Call:
        _, _, qweight, weight_scale = operands(1, n, k)
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        return keeping(lambda: gemm_w4a4(*quantise(x), qweight, weight_scale, None, torch.float16, False))

    return make


def _check(shape: Shape, layer: str, m: int) -> None:
    """Raise unless the layer is the reference's, within the last bit of the few codes that a fused kernel may move."""
    n, k = shape.linears[layer]
    quantise = quantiser(shape, layer)
    _, _, qweight, weight_scale = operands(1, n, k)
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    rows = torch.randperm(m, device="cuda")[:CHECKED_ROWS].sort().values
    got = gemm_w4a4(*quantise(x), qweight, weight_scale, None, torch.float16, False)[rows].double()
    with reference_backend():
        want = gemm_w4a4(*quantise(x[rows]), qweight, weight_scale, None, torch.float16, False).double()
    error = float((got - want).norm() / want.norm())
    if not error < 2e-2:
        raise AssertionError(f"linear {layer} of {shape.model} is off by {error:.1e} at M={m}")


def rows(options: Options) -> Iterator[Row]:
    """One row a layer, M and peer."""
    for shape in options.shapes():
        for layer, (n, k) in shape.linears.items():
            for m in options.tokens if options.quick else TOKENS:
                _check(shape, layer, m)
                moved, times = moved_bytes(m, n, k) + 3 * m * k, replays(m, n, k)
                sustain = SUSTAIN if m >= SUSTAINED_FROM else 0.0
                us = measure(_linear(shape, layer, m), moved, replays=times, sustain=sustain)
                makes = {"cublas_fp16": cublas_fp16(m, n, k)}
                if torch.cuda.get_device_capability() >= (8, 9):
                    makes["fp8_rowwise"] = fp8_rowwise_quantised(m, n, k)
                for peer, make in makes.items():
                    weight_bytes = n * k * (2 if peer == "cublas_fp16" else 1)
                    peer_bytes = weight_bytes + 2 * (m * k + m * n)
                    peer_us = measure(make, peer_bytes, replays=times, sustain=sustain)
                    roof = roof_us(moved, int8_ops=2 * m * n * k)
                    yield Row("linear_w4a4", shape.model, layer, m=m, n=n, k=k, dtype="float16", us=us, roof_us=roof,
                              peer=peer, peer_us=peer_us)  # fmt: skip
                torch.cuda.empty_cache()
