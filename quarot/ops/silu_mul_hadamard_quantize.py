"""``silu_mul_hadamard_quantize``: the input of a gated MLP's down projection, from its fused gate and up outputs.

With ``gate, up = gate_up.chunk(2, -1)`` (gate first, n columns each) and ``silu(g) = g / (1 + exp(-g))``, equivalent to
``hadamard_quantize(silu(gate.float()) * up.float(), order, pow2, 1, bits, clip, packed)``.
``order = pow2 = 1`` means no Hadamard. fp32 throughout, nothing rounded to the input's dtype in between.
"""

from __future__ import annotations

from typing import Any

import torch

from quarot.ops import hadamard_launch
from quarot.ops.code_rule import CodeRule, Codes
from quarot.ops.hadamard import check_shape, hadamard_reference
from quarot.ops.quantize_per_token import as_rows, quantize_rows
from quarot.ops.registry import define_op


def reference(gate_up: torch.Tensor, order: int, pow2: int, *rule: Any) -> Codes:
    """Specification; see the module."""
    gate, up = _halves(gate_up)
    product = torch.nn.functional.silu(gate.float()) * up.float()
    if order * pow2 > 1:
        product = hadamard_reference(product, order, pow2, 1)
    return quantize_rows(product, CodeRule(*rule))


def fake(gate_up: torch.Tensor, order: int, pow2: int, *rule: Any) -> Codes:
    """Shapes and dtypes of the outputs."""
    gate, _ = _halves(gate_up)
    return CodeRule(*rule).outputs(gate.shape[:-1].numel(), gate.shape[-1], gate)


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; gate and up of equal width make an even number")
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def available(gate_up: torch.Tensor, order: int, pow2: int, *rule: Any) -> str | None:
    """Why no kernel can serve (None when one can)."""
    width = gate_up.shape[-1] // 2
    inner = hadamard_launch.identity_inner(width) if order * pow2 == 1 else 1
    return hadamard_launch.unavailable(gate_up, width, order, pow2, inner, CodeRule(*rule).packed)


def cuda(gate_up: torch.Tensor, order: int, pow2: int, *arguments: Any) -> Codes:
    """Launches csrc/hadamard."""
    gate, _ = _halves(gate_up)
    inner = hadamard_launch.identity_inner(gate.shape[-1]) if order * pow2 == 1 else 1
    check_shape(gate, order, pow2, inner)
    rule, rows = CodeRule(*arguments), as_rows(gate_up)
    codes, scale = rule.buffers(rows.shape[0], gate.shape[-1], gate_up)
    if not rows.numel():
        scale.zero_()  # of rows of nothing
    else:
        hadamard_launch.transform_quantize(rows, True, order, pow2, inner, rule, codes, scale)
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
