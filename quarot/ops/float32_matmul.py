"""Op ``float32_matmul``: a small product in full float32, under ``torch.compile`` too, whatever is said about TF32."""

from __future__ import annotations

import torch

from quarot.ops.registry import define_op
from quarot.precision import tf32


def float32_matmul_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of fp32 [M, K] and [K, N]; never rounded to TF32 on the way in."""
    with tf32(False):
        return a @ b


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


float32_matmul = define_op(
    "float32_matmul", "(Tensor a, Tensor b) -> Tensor", reference=float32_matmul_reference, fake=_fake
)
