"""``add_rms_norm_gemm_w4a4``: a linear layer of few tokens from the residual stream on, as one kernel.

    codes, scale, sum = add_rms_norm_quantize(x, residual, eps, bits, clip)
    out = gemm_w4a4(codes, scale, qweight, weight_scale, bias, x.dtype)

``x`` and ``residual`` [M, K]; ``qweight`` int4 tiles of N x K. The kernel equals the kernels of these two ops bit for
bit and serves fp16 and bf16, M up to 8, K up to 8192, one weight scale a channel.
"""

from __future__ import annotations

import torch

from quarot.ops import add_rms_norm_quantize as norm_op
from quarot.ops import gemm_prologue as prologue
from quarot.ops import gemm_w4a4 as gemm_op
from quarot.ops.code_rule import CodeRule
from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.registry import define_op


def reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification; see the module."""
    prologue.check("add_rms_norm_gemm_w4a4", x, CodeRule(bits, clip), qweight, weight_scale, bias)
    codes, scale, total = norm_op.reference(x, residual, eps, bits, clip)
    return gemm_op.reference(codes, scale, qweight, weight_scale, bias, x.dtype), total


def fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the outputs."""
    return x.new_empty((x.shape[0], weight_scale.shape[0])), torch.empty_like(x)


def available(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    reason = prologue.unavailable(x, weight_scale) or norm_op.fits(x, residual)
    if reason is None and residual is not None and not prologue.aligned(residual):
        reason = "the rows of residual do not begin at multiples of 16 bytes"
    return reason


def cuda(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches csrc/gemm/prologue_norm.cu."""
    rule = CodeRule(bits, clip)
    prologue.check("add_rms_norm_gemm_w4a4", x, rule, qweight, weight_scale, bias)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = (x.data_ptr(), x.stride(0)) + ((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0)))
    norm = (x.shape[1], eps, rule.clip_over_qmax, bits)
    arguments = (*rows, DTYPE_CODES[x.dtype], *norm, total.data_ptr())
    return prologue.launch("add_rms_norm_gemm", arguments, x, qweight, weight_scale, bias), total


add_rms_norm_gemm_w4a4 = define_op(
    "add_rms_norm_gemm_w4a4",
    "(Tensor x, Tensor? residual, float eps, int bits, float clip, Tensor qweight, Tensor weight_scale, Tensor? bias)"
    " -> (Tensor out, Tensor sum)",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(x [M, K], residual, eps, bits, clip, qweight, weight_scale [N], bias) -> (out [M, N], sum [M, K])``."""
