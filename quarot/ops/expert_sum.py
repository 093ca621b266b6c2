"""``expert_sum``: what a token's experts give, each times its weight, added in their order.

``out[t, n] = sum over j of x[t * top_k + j, n] * weight[t, j]``: fp32 products and sums, each rounded by itself, j in
order, cast to x's dtype last (float64 throughout for float64 rows). So a token's result depends on its own rows only.
"""

from __future__ import annotations

import torch

from quarot.ops.gemm_launch import ready
from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.registry import define_op, extension, stream


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Specification; see the module."""
    _check(x, weight)
    rows = x.reshape(*weight.shape, x.shape[1])
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.new_zeros(weight.shape[0], x.shape[1], dtype=kind)
    for j in range(weight.shape[1]):
        total += rows[:, j].to(kind) * weight[:, j, None].to(kind)
    return total.to(x.dtype)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if not x.is_floating_point() or not weight.is_floating_point():
        raise ValueError(f"expert_sum: x and weight must be floats, got {x.dtype} and {weight.dtype}")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[0] != weight.numel() or x.device != weight.device:
        raise ValueError(
            f"expert_sum: x {tuple(x.shape)} on {x.device} must be [T * top_k, N] for a weight [T, top_k] on the same"
            f" device, got {tuple(weight.shape)} on {weight.device}"
        )


def fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Shape and dtype of the output."""
    return x.new_empty((weight.shape[0], x.shape[1]))


def available(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    if x.dtype not in DTYPE_CODES or weight.dtype not in DTYPE_CODES:
        return f"the kernel takes fp16, bf16 or fp32, not {x.dtype} and {weight.dtype}"
    return f"the width {x.shape[1]} is not a multiple of 8" if x.shape[1] % 8 else None


def cuda(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launches csrc/experts/expert_sum.cu."""
    _check(x, weight)
    out = fake(x, weight)
    if not out.numel() or not weight.numel():
        return out.zero_()
    x, weight = ready(x), weight.contiguous()
    with torch.cuda.device(x.device):
        for start in range(0, weight.shape[0], _MOST_TOKENS):
            some = weight[start : start + _MOST_TOKENS]
            extension().expert_sum(  # type: ignore[union-attr]
                x[start * weight.shape[1] :].data_ptr(),
                DTYPE_CODES[x.dtype],
                some.data_ptr(),
                DTYPE_CODES[weight.dtype],
                *some.shape,
                x.shape[1],
                out[start:].data_ptr(),
                stream(x),
            )
    return out


_MOST_TOKENS = 65535  # of one launch

expert_sum = define_op(
    "expert_sum",
    "(Tensor x, Tensor weight) -> Tensor",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(x [T * top_k, N], weight [T, top_k]) -> [T, N]``."""
