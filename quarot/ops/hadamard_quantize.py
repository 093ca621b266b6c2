"""``hadamard_quantize``: the structured Hadamard of :mod:`quarot.ops.hadamard`, then ``quantize_per_token``.

Equivalent to ``quantize_per_token(hadamard(x.float(), order, pow2, inner), bits, clip, packed)``: nothing is rounded to
the input's dtype in between. (A tensor-core kernel may round once to fp16 between the two Hadamard factors; its codes
then differ from these by one in fewer than 0.2 % of places.) This is R4 and the cross-head Hadamard of the paper's
section 4, fused with the quantiser of the linear layer behind it.
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
from quarot.ops.quantize_per_token import cuda as quantize_per_token_cuda
from quarot.ops.registry import define_op


def reference(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    packed: bool = False,
    upper: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification; see the module."""
    return quantize_rows(hadamard_reference(x.float(), order, pow2, inner), bits, clip, packed, upper)


def fake(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    packed: bool = False,
    upper: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the outputs."""
    check_bits(bits, packed, upper)
    return empty_codes(x.shape[:-1].numel(), x.shape[-1], packed, x)


def available(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    packed: bool = False,
    upper: bool = False,
) -> str | None:
    """Why no kernel can serve (None when one can)."""
    return hadamard_launch.unavailable(x, x.shape[-1], order, pow2, inner, packed)


def cuda(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    packed: bool = False,
    upper: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches csrc/hadamard."""
    check_bits(bits, packed, upper)
    if order * pow2 == 1:
        return quantize_per_token_cuda(x, bits, clip, packed, upper)
    check_shape(x, order, pow2, inner)
    rows = as_rows(x)
    codes, scale = code_buffers(rows.shape[0], rows.shape[1], packed, x)
    if not rows.numel():
        scale.zero_()  # of rows of nothing
    else:
        hadamard_launch.transform_quantize(
            rows, False, order, pow2, inner, bits, clip_over_qmax(clip, bits), code_layout(packed, upper), codes, scale
        )
    return codes, scale


hadamard_quantize = define_op(
    "hadamard_quantize",
    "(Tensor x, int order, int pow2, int inner, int bits, float clip, bool packed=False, bool upper=False)"
    " -> (Tensor codes, Tensor scale)",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(x [..., K], order, pow2, inner, bits, clip, packed=False, upper=False)
-> (codes [M, Kp] | [M, Kp/2], scale fp32 [M])``."""
