"""The quantisers of training as two Triton kernels each, one pass over memory; CUDA only.

PyTorch's operations need some twenty passes, and as many launches, for the same: half of a training step's time. Triton
comes with PyTorch's CUDA builds; without it :mod:`quarot.tuning.straight_through` takes those operations. The formulas
are there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_ROW = 32768
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds an fp32 of at most 2^22 to an integer, half to even."""


@triton.jit
def _rint(x):  # type: ignore[no-untyped-def]
    # Beyond 2^22 codes are far outside of any range: the nearest integer does not matter.
    return tl.where(tl.abs(x) < 4194304.0, (x + _TO_INTEGER) - _TO_INTEGER, x)


@triton.jit
def _code(position, shift, low, high):  # type: ignore[no-untyped-def]
    # In steps, as position is: the stored code is shifted, and between low and high.
    return tl.minimum(tl.maximum(_rint(position) + shift, low), high) - shift


@triton.jit
def _of_scale(given, position, code, inside):  # type: ignore[no-untyped-def]
    return tl.sum(given * tl.where(inside, code - position, code), 0)


@triton.jit
def _cache_grid(least, most, clip: tl.constexpr, top: tl.constexpr):  # type: ignore[no-untyped-def]
    low, high = least * clip, most * clip
    return ((high - low) / top).to(tl.float16).to(tl.float32), low.to(tl.float16).to(tl.float32)


@triton.jit
def _cache_position(value, scale, offset):  # type: ignore[no-untyped-def]
    return tl.where(scale > 0, (value - offset) / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit
def _forward(x, y, clip, columns, qmax: tl.constexpr, smallest: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * columns
    place = tl.arange(0, block)
    mask = place < columns
    value = tl.load(x + start + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) * (tl.load(clip) / qmax), smallest)
    code = _code(value / scale, 0.0, -qmax - 1.0, qmax)
    tl.store(y + start + place, (code * scale).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x, grad, grad_x, grad_clip, clip, columns, qmax: tl.constexpr, smallest: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    mask = place < columns
    value = tl.load(x + row * columns + place, mask=mask, other=0.0).to(tl.float32)
    given = tl.load(grad + row * columns + place, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    ratio = tl.load(clip) / qmax
    position = value / tl.maximum(largest * ratio, smallest)
    inside = (position >= -qmax - 1.0) & (position <= qmax)
    of_scale = _of_scale(given, position, _code(position, 0.0, -qmax - 1.0, qmax), inside)
    result = tl.where(inside, given, 0.0)
    sign = tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0))
    result += tl.where(tl.abs(value) == largest, of_scale * ratio * sign, 0.0)
    tl.store(grad_x + row * columns + place, result.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_clip + row, of_scale * largest / qmax)


def forward(x: Tensor, clip: Tensor, qmax: int, smallest: float) -> Tensor:
    """The quantised x [..., K], in its dtype; ``clip`` is a scalar tensor on the same device."""
    columns = x.shape[-1]
    result = torch.empty_like(x)
    if x.numel():
        constants: dict[str, Any] = {"qmax": float(qmax), "smallest": smallest}
        _forward[(x.numel() // columns,)](x, result, clip, columns, block=triton.next_power_of_2(columns), **constants)
    return result


def backward(x: Tensor, grad: Tensor, clip: Tensor, qmax: int, smallest: float) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the clip ratio."""
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    grad_x, grad_clip = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        constants: dict[str, Any] = {"qmax": float(qmax), "smallest": smallest}
        block = triton.next_power_of_2(columns)
        _backward[(rows,)](x, grad, grad_x, grad_clip, clip, columns, block=block, **constants)
    return grad_x, grad_clip.sum().reshape(clip.shape)


@triton.jit
def _weights_forward(x, y, zero, columns, half: tl.constexpr, has_zero: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    mask = place < columns
    shift = 0.0
    if has_zero:
        shift = tl.load(zero + row)
    code = _code(tl.load(x + row * columns + place, mask=mask, other=0.0), shift, -half, half - 1.0)
    tl.store(y + row * columns + place, code, mask=mask)


@triton.jit
def _weights_backward(  # type: ignore[no-untyped-def]
    x, grad, grad_x, zero, columns, half: tl.constexpr, has_zero: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    mask = place < columns
    shift = 0.0
    if has_zero:
        shift = tl.load(zero + row)
    position = tl.load(x + row * columns + place, mask=mask, other=0.0)
    code = _code(position, shift, -half, half - 1.0)
    given = tl.load(grad + row * columns + place, mask=mask, other=0.0).to(tl.float32)
    inside = tl.abs(position - code) <= 0.5
    tl.store(grad_x + row * columns + place, tl.where(inside, given, 0.0), mask=mask)


def weights_forward(x: Tensor, zero: Tensor | None, half: int) -> Tensor:
    """Latents fp32 [N, G, K/G], contiguous -> their codes minus zeros; ``zero`` [N, G, 1]."""
    result, columns = torch.empty_like(x), x.shape[-1]
    constants: dict[str, Any] = {"half": float(half), "has_zero": zero is not None}
    if x.numel():
        block = triton.next_power_of_2(columns)
        _weights_forward[(x.numel() // columns,)](x, result, zero, columns, block=block, **constants)
    return result


def weights_backward(x: Tensor, grad: Tensor, zero: Tensor | None, half: int) -> Tensor:
    """Gradient of x."""
    grad_x, columns = torch.empty_like(x), x.shape[-1]
    constants: dict[str, Any] = {"half": float(half), "has_zero": zero is not None}
    if x.numel():
        block = triton.next_power_of_2(columns)
        _weights_backward[(x.numel() // columns,)](x, grad, grad_x, zero, columns, block=block, **constants)
    return grad_x


@triton.jit
def _cache_forward(x, y, clip: tl.constexpr, top: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place).to(tl.float32)
    scale, offset = _cache_grid(tl.min(value, 0), tl.max(value, 0), clip, top)
    code = _code(_cache_position(value, scale, offset), 0.0, 0.0, top)
    tl.store(y + place, (code * scale + offset).to(y.dtype.element_ty))


@triton.jit
def _cache_backward(x, grad, grad_x, clip: tl.constexpr, top: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place).to(tl.float32)
    given = tl.load(grad + place).to(tl.float32)
    least, most = tl.min(value, 0), tl.max(value, 0)
    scale, offset = _cache_grid(least, most, clip, top)
    position = _cache_position(value, scale, offset)
    inside = (position >= 0) & (position <= top)
    of_scale = _of_scale(given, position, _code(position, 0.0, 0.0, top), inside) * (clip / top)
    of_offset = tl.sum(tl.where(inside, 0.0, given), 0) * clip
    result = tl.where(inside, given, 0.0)
    result += tl.where(value == most, of_scale, 0.0) + tl.where(value == least, of_offset - of_scale, 0.0)
    tl.store(grad_x + place, result.to(grad_x.dtype.element_ty))


def cache_forward(x: Tensor, clip: float, top: int) -> Tensor:
    """x [..., group], a contiguous tensor with a power of two as group, as the cache gives it back."""
    result = torch.empty_like(x)
    if x.numel():
        rows, group = x.numel() // x.shape[-1], x.shape[-1]
        _cache_forward[(rows,)](x, result, clip=clip, top=float(top), block=group, num_warps=1)
    return result


def cache_backward(x: Tensor, grad: Tensor, clip: float, top: int) -> Tensor:
    """Gradient of x."""
    result = torch.empty_like(x)
    if x.numel():
        rows, group = x.numel() // x.shape[-1], x.shape[-1]
        _cache_backward[(rows,)](x, grad, result, clip=clip, top=float(top), block=group, num_warps=1)
    return result
