"""The quantisers of the run-time path with gradients: the same integers forward, rounding as the identity backward.

Scales of activations, keys and values are part of the graph, so that a rotation learns to make the largest value
smaller and a clip ratio learns itself (in the manner of learned step sizes, Esser et al., 2020): with t = x / s and q
its code, ``y = s q`` has dy/dx = 1 inside the range and 0 outside, and dy/ds = q - t inside, q (the end of the range)
outside.

Written as autograd functions that keep nothing but their input: through PyTorch's own operations each of these would
keep five fp32 copies of every activation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quarot.ops.quantize_per_token import SMALLEST_SCALE


class _Activations(torch.autograd.Function):
    """``s * clamp(rint(x / s))``, ``s = max|x| * clip / qmax`` over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clip: Tensor, bits: int) -> Tensor:
        ctx.qmax = 2 ** (bits - 1) - 1
        ctx.kernels = _kernels(x)
        if ctx.kernels is not None:
            x = x.contiguous()
            ctx.save_for_backward(x, clip)
            return ctx.kernels.forward(x, clip, ctx.qmax, SMALLEST_SCALE)  # type: ignore[no-any-return]
        ctx.save_for_backward(x, clip)
        position, scale, _ = _position(x, clip, ctx.qmax)
        return position.round_().clamp_(-ctx.qmax - 1, ctx.qmax).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, clip = ctx.saved_tensors
        if ctx.kernels is not None:
            return (*ctx.kernels.backward(x, gradients[0].contiguous(), clip, ctx.qmax, SMALLEST_SCALE), None)
        qmax, gradient = ctx.qmax, gradients[0].float()
        position, _, largest = _position(x, clip, qmax)
        outside = position != position.clamp(-qmax - 1, qmax)
        code = position.round().clamp_(-qmax - 1, qmax)
        of_scale = (gradient * torch.where(outside, code, code - position)).sum(-1, keepdim=True)
        of_x = gradient.masked_fill(outside, 0)
        of_x.addcmul_((x.abs() == largest.to(x.dtype)) * x.sign(), of_scale * (clip / qmax))
        return of_x.to(x.dtype), (of_scale * largest).sum().reshape(clip.shape) / qmax, None


def _kernels(x: Tensor) -> ModuleType | None:
    """The Triton kernels, where they serve x."""
    if not x.is_cuda or x.dtype == torch.float64:
        return None
    try:
        from quarot.tuning import triton_rounding
    except ImportError:
        return None
    return triton_rounding if x.shape[-1] <= triton_rounding.LARGEST_ROW else None


def _position(x: Tensor, clip: Tensor, qmax: int) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 x / s, s and max|x|."""
    largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).float()
    scale = (largest * (clip / qmax)).clamp_min(SMALLEST_SCALE)
    return x / scale, scale, largest


def quantize_activations(x: Tensor, bits: int, clip: Tensor, group_size: int | None) -> Tensor:
    """:mod:`quarot.ops.quantize_per_token` and back, [..., K] in the dtype of x; gradients to x and ``clip`` (scalar).

    The largest value of a row and the clip ratio get the gradient of the scale. 16 bits: x itself.
    """
    if bits == 16:
        return x
    if group_size is None:
        return _Activations.apply(x, clip, bits)  # type: ignore[no-untyped-call,no-any-return]
    rows = x.unflatten(-1, (-1, group_size))
    return _Activations.apply(rows, clip, bits).flatten(-2)  # type: ignore[no-untyped-call,no-any-return]


class _Cache(torch.autograd.Function):
    """``s * code + b`` over groups, ``b = min * clip``, ``s = (max - min) * clip / top``, both rounded to fp16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clip: float, top: int) -> Tensor:
        ctx.clip, ctx.top = clip, top
        ctx.kernels = _kernels(x) if x.shape[-1] & (x.shape[-1] - 1) == 0 else None
        if ctx.kernels is not None:
            x = x.contiguous()
            ctx.save_for_backward(x)
            return ctx.kernels.cache_forward(x, clip, top)  # type: ignore[no-any-return]
        ctx.save_for_backward(x)
        position, scale, offset = _cache_position(x, clip, top)
        return position.round_().clamp_(0, top).mul_(scale).add_(offset).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.kernels is not None:
            return ctx.kernels.cache_backward(x, gradients[0].contiguous(), ctx.clip, ctx.top), None, None
        position, _, _ = _cache_position(x, ctx.clip, ctx.top)
        gradient = gradients[0].float()
        outside = position != position.clamp(0, ctx.top)
        code = position.round().clamp_(0, ctx.top)
        of_scale = (gradient * torch.where(outside, code, code - position)).sum(-1, keepdim=True) * (ctx.clip / ctx.top)
        of_offset = (gradient * outside).sum(-1, keepdim=True) * ctx.clip
        of_x = gradient.masked_fill(outside, 0)
        of_x += (x == x.amax(-1, keepdim=True)) * of_scale
        of_x += (x == x.amin(-1, keepdim=True)) * (of_offset - of_scale)
        return of_x.to(x.dtype), None, None


def _cache_position(x: Tensor, clip: float, top: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    low, high = wide.amin(-1, keepdim=True) * clip, wide.amax(-1, keepdim=True) * clip
    scale, offset = ((high - low) / top).half().float(), low.half().float()
    return ((wide - offset) / scale).masked_fill_(scale <= 0, 0.0), scale, offset


def quantize_cache(x: Tensor, bits: int, clip: float, group_size: int) -> Tensor:
    """What the cache of ``bits`` gives back for x [..., head_dim]; ends of a group's range get the scale's gradient."""
    if bits == 16:
        return x
    groups = x.unflatten(-1, (-1, group_size))
    return _Cache.apply(groups, clip, 2**bits - 1).flatten(-2)  # type: ignore[no-untyped-call,no-any-return]


class _Weights(torch.autograd.Function):
    """``clamp(rint(latent) + zero) - zero`` for fp32 latents [N, G, K/G] and zeros [N, G, 1]."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, zero: Tensor | None, half: int) -> Tensor:
        ctx.save_for_backward(latent, zero)
        ctx.half, ctx.kernels = half, _kernels(latent)
        if ctx.kernels is not None:
            return ctx.kernels.weights_forward(latent, zero, half)  # type: ignore[no-any-return]
        return _centred_codes(latent, zero, half)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        latent, zero = ctx.saved_tensors
        if ctx.kernels is not None:
            return ctx.kernels.weights_backward(latent, gradients[0].contiguous(), zero, ctx.half), None, None
        # Half a step beyond the last code still rounds to it, and may come back.
        outside = (latent - _centred_codes(latent, zero, ctx.half)).abs() > 0.5
        return gradients[0].masked_fill(outside, 0), None, None


def _centred_codes(latent: Tensor, zero: Tensor | None, half: int) -> Tensor:
    """Codes minus zeros."""
    if zero is None:
        return latent.round().clamp_(-half, half - 1)
    return latent.round().add_(zero).clamp_(-half, half - 1).sub_(zero)


def round_latents(latent: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """The code minus its zero of each weight, ``clamp(rint(latent) + zero) - zero``, with gradients inside the range.

    Args:
        latent: fp32 [N, G, K/G], weights in units of their scale.
        zero: fp32 [N, G], integers; None for symmetric codes.
        bits: of the codes.
    """
    return _Weights.apply(latent, None if zero is None else zero[..., None], 2 ** (bits - 1))  # type: ignore[no-untyped-call,no-any-return]
