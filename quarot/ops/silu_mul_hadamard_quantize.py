"""``silu_mul_hadamard_quantize``: the input of a gated MLP's down projection, from its fused gate and up outputs.

With ``gate, up = gate_up.chunk(2, -1)`` (gate first, n columns each) and ``silu(g) = g / (1 + exp(-g))``, equivalent to
``hadamard_quantize(silu(gate.float()) * up.float(), order, pow2, 1, bits, clip, packed)``.
``order = pow2 = 1`` means no Hadamard. fp32 throughout, nothing rounded to the input's dtype in between.
"""

from __future__ import annotations

import torch

from quarot.ops import hadamard_launch
from quarot.ops.hadamard import check_shape, hadamard_reference
from quarot.ops.quantize_per_token import (
    as_rows,
    check_bits,
    clip_over_qmax,
    code_buffers,
    code_layout,
    empty_codes,
    quantize_rows,
)
from quarot.ops.registry import define_op


def reference(
    gate_up: torch.Tensor, order: int, pow2: int, bits: int, clip: float, packed: bool = False, upper: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification; see the module."""
    gate, up = _halves(gate_up)
    product = torch.nn.functional.silu(gate.float()) * up.float()
    if order * pow2 > 1:
        product = hadamard_reference(product, order, pow2, 1)
    return quantize_rows(product, bits, clip, packed, upper)


def fake(
    gate_up: torch.Tensor, order: int, pow2: int, bits: int, clip: float, packed: bool = False, upper: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the outputs."""
    check_bits(bits, packed, upper)
    gate, _ = _halves(gate_up)
    return empty_codes(gate.shape[:-1].numel(), gate.shape[-1], packed, gate)


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; gate and up of equal width make an even number")
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def available(
    gate_up: torch.Tensor, order: int, pow2: int, bits: int, clip: float, packed: bool = False, upper: bool = False
) -> str | None:
    """Why no kernel can serve (None when one can)."""
    width = gate_up.shape[-1] // 2
    inner = hadamard_launch.identity_inner(width) if order * pow2 == 1 else 1
    return hadamard_launch.unavailable(gate_up, width, order, pow2, inner, packed)


def cuda(
    gate_up: torch.Tensor, order: int, pow2: int, bits: int, clip: float, packed: bool = False, upper: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches csrc/hadamard."""
    check_bits(bits, packed, upper)
    gate, _ = _halves(gate_up)
    inner = hadamard_launch.identity_inner(gate.shape[-1]) if order * pow2 == 1 else 1
    check_shape(gate, order, pow2, inner)
    rows = as_rows(gate_up)
    codes, scale = code_buffers(rows.shape[0], gate.shape[-1], packed, gate_up)
    if not rows.numel():
        scale.zero_()  # of rows of nothing
    else:
        hadamard_launch.transform_quantize(
            rows, True, order, pow2, inner, bits, clip_over_qmax(clip, bits), code_layout(packed, upper), codes, scale
        )
    return codes, scale


silu_mul_hadamard_quantize = define_op(
    "silu_mul_hadamard_quantize",
    "(Tensor gate_up, int order, int pow2, int bits, float clip, bool packed=False, bool upper=False)"
    " -> (Tensor codes, Tensor scale)",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(gate_up [..., 2n], order, pow2, bits, clip, packed=False, upper=False)
-> (codes [M, np] | [M, np/2], scale fp32 [M])``."""
