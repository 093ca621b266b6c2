"""``silu_mul_hadamard_quantize``: the input of a gated MLP's down projection, from its fused gate and up outputs.

With ``gate, up = gate_up.chunk(2, -1)`` (gate first, n columns each) and ``silu(g) = g / (1 + exp(-g))``, equivalent to
``hadamard_quantize(silu(gate.float()) * up.float(), order, pow2, 1, bits, clip, packed)``.
``order = pow2 = 1`` means no Hadamard. fp32 throughout, nothing rounded to the input's dtype in between.
"""

from __future__ import annotations

import torch

from quarot.ops.hadamard import hadamard_reference
from quarot.ops.quantize_per_token import check_bits, empty_codes, quantize_rows
from quarot.ops.registry import define_op


def reference(
    gate_up: torch.Tensor, order: int, pow2: int, bits: int, clip: float, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification; see the module."""
    gate, up = _halves(gate_up)
    product = torch.nn.functional.silu(gate.float()) * up.float()
    if order * pow2 > 1:
        product = hadamard_reference(product, order, pow2, 1)
    return quantize_rows(product, bits, clip, packed)


def fake(
    gate_up: torch.Tensor, order: int, pow2: int, bits: int, clip: float, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the outputs."""
    check_bits(bits, packed)
    gate, _ = _halves(gate_up)
    return empty_codes(gate.shape[:-1].numel(), gate.shape[-1], packed, gate)


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; gate and up of equal width make an even number")
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


silu_mul_hadamard_quantize = define_op(
    "silu_mul_hadamard_quantize",
    "(Tensor gate_up, int order, int pow2, int bits, float clip, bool packed=False) -> (Tensor codes, Tensor scale)",
    reference=reference,
    fake=fake,
)
"""``(gate_up [..., 2n], order, pow2, bits, clip, packed=False) -> (codes [M, np] | [M, np/2], scale fp32 [M])``."""
