"""RMSNorm without a gain, as it is in a rotated model: gains are folded into the linear layers that follow."""

from __future__ import annotations

import torch
from torch import nn


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimension, in the wider of fp32 and x's dtype, cast back once.

    Args:
        x: [..., hidden], any floating dtype.
        eps: added to the mean square (the model's own, never a constant).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """The gain-free RMSNorm of a rotated model (:func:`rms_normalize`)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_normalize(x, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
