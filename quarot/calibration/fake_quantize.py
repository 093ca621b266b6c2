"""Activations as the integer kernels will see them, as floating point values: the same codes times the same scales."""

from __future__ import annotations

import torch

from quarot.ops.quantize_per_token import quantize_per_token


def fake_quantize(x: torch.Tensor, bits: int, clip: float, group_size: int | None = None) -> torch.Tensor:
    """``codes * scale`` of :mod:`quarot.ops.quantize_per_token` for x [..., K], in the dtype of x; 16 bits: x itself.

    ``group_size`` gives every group of that many inputs a scale of its own.
    """
    if bits == 16:
        return x
    size = group_size or x.shape[-1]
    codes, scale = quantize_per_token(x.reshape(-1, size), bits, clip)
    return (codes[:, :size].float() * scale[:, None]).view(x.shape).to(x.dtype)
