"""``hadamard_gemm_w4a4``: a linear layer of few tokens with the Hadamard across heads before it, as one kernel.

    codes, scale = hadamard_quantize(x, order, pow2, inner, bits, clip)
    out = gemm_w4a4(codes, scale, qweight, weight_scale, bias, x.dtype) (+ residual)

``x`` [M, K], K = order * pow2 * inner: order * pow2 heads of ``inner`` columns; ``qweight`` int4 tiles of N x K;
``residual`` [M, N] or None. The kernel equals the kernels of these two ops and the addition bit for bit and serves fp16
and bf16, M up to 8, K up to 4096, up to 32 heads of up to 128 columns or 64 of up to 64 (multiples of 32), one weight
scale a channel.
"""

from __future__ import annotations

import torch

from quarot.ops import gemm_prologue as prologue
from quarot.ops import gemm_w4a4 as gemm_op
from quarot.ops import hadamard_launch
from quarot.ops import hadamard_quantize as rotate_op
from quarot.ops.code_rule import CodeRule
from quarot.ops.hadamard import check_shape
from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.registry import define_op


def _check(
    x: torch.Tensor,
    rule: CodeRule,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    prologue.check("hadamard_gemm_w4a4", x, rule, qweight, weight_scale, bias)
    prologue.check_residual("hadamard_gemm_w4a4", x, weight_scale, residual)


def reference(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification; see the module."""
    _check(x, CodeRule(bits, clip), qweight, weight_scale, bias, residual)
    codes, scale = rotate_op.reference(x, order, pow2, inner, bits, clip)
    return prologue.add(gemm_op.reference(codes, scale, qweight, weight_scale, bias, x.dtype), residual)


def fake(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shape and dtype of the output."""
    return x.new_empty((x.shape[0], weight_scale.shape[0]))


def available(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    return prologue.unavailable(x, weight_scale) or hadamard_launch.heads_unavailable(x, order * pow2, inner)


def cuda(
    x: torch.Tensor,
    order: int,
    pow2: int,
    inner: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launches csrc/gemm/prologue_heads.cu."""
    rule = CodeRule(bits, clip)
    _check(x, rule, qweight, weight_scale, bias, residual)
    check_shape(x, order, pow2, inner)
    signs = hadamard_launch.head_sign_table(order, pow2, x.device)
    heads = (order * pow2, inner, signs.data_ptr())
    arguments = (x.data_ptr(), x.stride(0), DTYPE_CODES[x.dtype], *heads, rule.clip_over_qmax, bits)
    return prologue.launch("hadamard_gemm", arguments, x, qweight, weight_scale, bias, residual)


hadamard_gemm_w4a4 = define_op(
    "hadamard_gemm_w4a4",
    "(Tensor x, int order, int pow2, int inner, int bits, float clip, Tensor qweight, Tensor weight_scale,"
    " Tensor? bias, Tensor? residual=None) -> Tensor",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(x [M, K], order, pow2, inner, bits, clip, qweight, weight_scale [N], bias, residual) -> out [M, N]``."""
