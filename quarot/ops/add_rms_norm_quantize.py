"""``add_rms_norm_quantize``: residual add, RMSNorm without gain, and the per-token quantiser, in one pass.

``sum = x + residual`` in x's dtype (x itself without a residual); ``h = sum * (1 / sqrt(mean(sum^2) + eps))`` in fp32;
the codes are those of :mod:`quarot.ops.quantize_per_token` on ``h``, which is not rounded to x's dtype. The gain is
missing because rotation folds it into the following weights (paper, section 4, stage 1a). A kernel sums the squares in
its own order, so ``h`` may differ in the last bits: scales agree to 1e-6, codes within one on a rounding edge.
"""

from __future__ import annotations

from typing import Any

import torch

from quarot.ops.code_rule import CodeRule
from quarot.ops.quantize_per_token import DTYPE_CODES, as_rows, quantize_rows
from quarot.ops.registry import define_op, extension, stream

CodesAndSum = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(x: torch.Tensor, residual: torch.Tensor | None, eps: float, *rule: Any) -> CodesAndSum:
    """Specification; see the module."""
    # An op may not return its input, hence the copy.
    total = x.clone() if residual is None else x + residual
    wide = total.float()
    norm = 1.0 / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return *quantize_rows(wide * norm, CodeRule(*rule)), total


def fake(x: torch.Tensor, residual: torch.Tensor | None, eps: float, *rule: Any) -> CodesAndSum:
    """Shapes and dtypes of the outputs."""
    return *CodeRule(*rule).outputs(x.shape[:-1].numel(), x.shape[-1], x), torch.empty_like(x)


def fits(x: torch.Tensor, residual: torch.Tensor | None) -> str | None:
    """Why the kernel cannot read these rows (None when it can)."""
    if x.dtype not in DTYPE_CODES:
        return f"the kernel reads fp16, bf16 or fp32, not {x.dtype}"
    if not x.dim():
        return "x is no row"
    if residual is not None and (residual.dtype, residual.shape, residual.device) != (x.dtype, x.shape, x.device):
        kinds = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (residual, x))
        return "residual {} differs from x {}".format(*kinds)
    return None


def available(x: torch.Tensor, residual: torch.Tensor | None, eps: float, *rule: Any) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    return fits(x, residual)


def cuda(x: torch.Tensor, residual: torch.Tensor | None, eps: float, *arguments: Any) -> CodesAndSum:
    """Launches csrc/quantize/add_rms_norm_quantize.cu."""
    rule, rows_x = CodeRule(*arguments), as_rows(x)
    rows, k = rows_x.shape
    if rows == 0 or k == 0:
        return reference(x, residual, eps, *rule)
    rows_residual = None if residual is None else as_rows(residual)
    codes, scale = rule.buffers(rows, k, x)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        extension().add_rms_norm_quantize(  # type: ignore[union-attr]
            rows_x.data_ptr(),
            rows_x.stride(0),
            0 if rows_residual is None else rows_residual.data_ptr(),
            0 if rows_residual is None else rows_residual.stride(0),
            DTYPE_CODES[x.dtype],
            rows,
            k,
            eps,
            codes.data_ptr(),
            scale.data_ptr(),
            total.data_ptr(),
            rule.clip_over_qmax,
            rule.bits,
            rule.layout,
            stream(x),
        )
    return codes, scale, total


add_rms_norm_quantize = define_op(
    "add_rms_norm_quantize",
    "(Tensor x, Tensor? residual, float eps, int bits, float clip, bool packed=False, bool upper=False)"
    " -> (Tensor codes, Tensor scale, Tensor sum)",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(x [..., K], residual, eps, bits, clip, packed=False, upper=False)
-> (codes [M, Kp] | [M, Kp/2], scale fp32 [M], sum)``."""
