"""``hadamard_quantize``: the structured Hadamard of :mod:`quarot.ops.hadamard`, then ``quantize_per_token``.

Equivalent to ``quantize_per_token(hadamard(x.float(), order, pow2, inner), bits, clip, packed)``: nothing is rounded to
the input's dtype in between. (A tensor-core kernel may round once to fp16 between the two Hadamard factors; its codes
then differ from these by one in fewer than 0.2 % of places.) This is R4 and the cross-head Hadamard of the paper's
section 4, fused with the quantiser of the linear layer behind it.
"""

from __future__ import annotations

from typing import Any

import torch

from quarot.ops import hadamard_launch
from quarot.ops.code_rule import CodeRule, Codes
from quarot.ops.hadamard import check_shape, hadamard_reference
from quarot.ops.quantize_per_token import as_rows, quantize_rows
from quarot.ops.quantize_per_token import cuda as quantize_per_token_cuda
from quarot.ops.registry import define_op


def reference(x: torch.Tensor, order: int, pow2: int, inner: int, *rule: Any) -> Codes:
    """Specification; see the module."""
    return quantize_rows(hadamard_reference(x.float(), order, pow2, inner), CodeRule(*rule))


def fake(x: torch.Tensor, order: int, pow2: int, inner: int, *rule: Any) -> Codes:
    """Shapes and dtypes of the outputs."""
    return CodeRule(*rule).outputs(x.shape[:-1].numel(), x.shape[-1], x)


def available(x: torch.Tensor, order: int, pow2: int, inner: int, *rule: Any) -> str | None:
    """Why no kernel can serve (None when one can)."""
    return hadamard_launch.unavailable(x, x.shape[-1], order, pow2, inner, CodeRule(*rule).packed)


def cuda(x: torch.Tensor, order: int, pow2: int, inner: int, *arguments: Any) -> Codes:
    """Launches csrc/hadamard."""
    if order * pow2 == 1:
        return quantize_per_token_cuda(x, *arguments)
    check_shape(x, order, pow2, inner)
    rule, rows = CodeRule(*arguments), as_rows(x)
    codes, scale = rule.buffers(rows.shape[0], rows.shape[1], x)
    if not rows.numel():
        scale.zero_()  # of rows of nothing
    else:
        hadamard_launch.transform_quantize(rows, False, order, pow2, inner, rule, codes, scale)
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
