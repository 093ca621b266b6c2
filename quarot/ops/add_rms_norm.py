"""``add_rms_norm``: residual add and RMSNorm without gain, for the last norm of a model, whose output is not quantised.

The sum and the norm are those of :mod:`quarot.ops.add_rms_norm_quantize`; the result is rounded once, to x's dtype.
"""

from __future__ import annotations

import torch

from quarot.ops.add_rms_norm_quantize import fits
from quarot.ops.quantize_per_token import DTYPE_CODES, as_rows
from quarot.ops.registry import define_op, extension, stream


def reference(x: torch.Tensor, residual: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Specification; see the module."""
    wide = (x if residual is None else x + residual).float()
    return (wide * (1.0 / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def fake(x: torch.Tensor, residual: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Shape and dtype of the output."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def cuda(x: torch.Tensor, residual: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Launches csrc/quantize/add_rms_norm_quantize.cu."""
    rows_x = as_rows(x)
    if rows_x.numel() == 0:
        return reference(x, residual, eps)
    rows_residual = None if residual is None else as_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        extension().add_rms_norm(  # type: ignore[union-attr]
            rows_x.data_ptr(),
            rows_x.stride(0),
            0 if rows_residual is None else rows_residual.data_ptr(),
            0 if rows_residual is None else rows_residual.stride(0),
            DTYPE_CODES[x.dtype],
            *rows_x.shape,
            eps,
            out.data_ptr(),
            stream(x),
        )
    return out


add_rms_norm = define_op(
    "add_rms_norm",
    "(Tensor x, Tensor? residual, float eps) -> Tensor",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=lambda x, residual, eps: fits(x, residual),
)
"""``(x [..., K], residual, eps) -> [..., K]``."""
