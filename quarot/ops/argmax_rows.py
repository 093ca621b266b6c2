"""``argmax_rows``: the index of the largest element of each row, in one short kernel (greedy choice of a token)."""

from __future__ import annotations

import torch

from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.registry import define_op, extension, stream


def reference(x: torch.Tensor) -> torch.Tensor:
    """Specification: the first of equal elements; NaN is larger than everything."""
    return x.argmax(-1)


def fake(x: torch.Tensor) -> torch.Tensor:
    """Shape and dtype of the output."""
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def available(x: torch.Tensor) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    return None if x.dtype in DTYPE_CODES else f"the kernel reads fp16, bf16 or fp32, not {x.dtype}"


def cuda(x: torch.Tensor) -> torch.Tensor:
    """Launches csrc/decode_step/argmax_rows.cu."""
    if x.dim() != 2 or not x.numel() or x.stride(1) != 1:
        return reference(x)
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    with torch.cuda.device(x.device):
        extension().argmax_rows(  # type: ignore[union-attr]
            x.data_ptr(), DTYPE_CODES[x.dtype], x.stride(0), *x.shape, out.data_ptr(), stream(x)
        )
    return out


argmax_rows = define_op(
    "argmax_rows", "(Tensor x) -> Tensor", reference=reference, fake=fake, cuda=cuda, available=available
)
"""``x [B, V] -> int64 [B]``."""
