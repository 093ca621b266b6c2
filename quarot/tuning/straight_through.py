"""The quantisers of the run-time path with gradients: the same integers forward, rounding as the identity backward."""

from __future__ import annotations

from typing import Any

import torch

from quarot.ops.quantize_per_token import SMALLEST_SCALE


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def round_through(x: torch.Tensor) -> torch.Tensor:
    """Half to even; gradient 1."""
    return _Round.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def quantize_activations(x: torch.Tensor, bits: int, clip: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """:mod:`quarot.ops.quantize_per_token` and back, [..., K] in the dtype of x; gradients to x and ``clip`` (scalar).

    Inside the clipped range x has gradient 1; the largest value of a row and the clip ratio get that of the scale.
    """
    if bits == 16:
        return x
    qmax = 2 ** (bits - 1) - 1
    rows = x.float().unflatten(-1, (-1, group_size or x.shape[-1]))
    scale = (rows.abs().amax(-1, keepdim=True) * (clip / qmax)).clamp_min(SMALLEST_SCALE)
    codes = round_through((rows / scale).clamp(-qmax - 1, qmax))
    return (codes * scale).flatten(-2).to(x.dtype)


def quantize_cache(x: torch.Tensor, bits: int, clip: float, group_size: int) -> torch.Tensor:
    """What the cache of ``bits`` gives back for x [..., head_dim]; gradient 1 everywhere."""
    if bits == 16:
        return x
    with torch.no_grad():
        groups = x.float().unflatten(-1, (-1, group_size))
        low = groups.amin(-1, keepdim=True) * clip
        top = 2**bits - 1
        scale = ((groups.amax(-1, keepdim=True) * clip - low) / top).half().float()
        offset = low.half().float()
        codes = torch.where(scale > 0, (groups - offset) / scale, 0.0).round_().clamp_(0, top)
        change = (codes * scale + offset - groups).flatten(-2)
    return x + change.to(x.dtype)


def quantize_weights(latent: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int) -> torch.Tensor:
    """``(clamp(round(latent)) - zero) * scale``, [N, K]: the learned step size quantiser (Esser et al., 2020).

    ``latent`` [N, K] is in units of the scale; ``scale`` and ``zero`` [N, G]. Gradients to latent (inside the range)
    and scale.
    """
    half = 2 ** (bits - 1)
    codes = round_through(latent.clamp(-half, half - 1)).unflatten(-1, (scale.shape[1], -1))
    centred = codes if zero is None else codes - zero[..., None]
    return (centred * scale[..., None]).flatten(-2)
