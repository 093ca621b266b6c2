"""The activation quantiser of training as two Triton kernels, one pass over memory each; CUDA only.

PyTorch's operations need some twenty passes for the same, half of a training step's time. Triton comes with PyTorch's
CUDA builds; without it :mod:`quarot.tuning.straight_through` takes those operations. The formulas are there.
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
def _forward(x, y, clip, columns, qmax: tl.constexpr, smallest: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * columns
    place = tl.arange(0, block)
    mask = place < columns
    value = tl.load(x + start + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) * (tl.load(clip) / qmax), smallest)
    code = (value / scale + _TO_INTEGER) - _TO_INTEGER
    code = tl.minimum(tl.maximum(code, -qmax - 1.0), qmax)
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
    code = (position + _TO_INTEGER) - _TO_INTEGER
    code = tl.minimum(tl.maximum(code, -qmax - 1.0), qmax)
    inside = (position >= -qmax - 1.0) & (position <= qmax)
    of_scale = tl.sum(given * tl.where(inside, code - position, code), 0)
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
