"""What the ops ``*_gemm_w4a4`` share: GEMMs of few tokens that make their own activation codes.

Every block of such a GEMM repeats the norm or rotation of the rows, which for one row costs less than a kernel of its
own and the wait for it. Results are the bits of the two ops in sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from quarot.ops import gemm_launch
from quarot.ops.code_rule import CodeRule
from quarot.ops.registry import extension, stream

ROWS = 1
"""Up to here one kernel is faster than two (csrc/gemm/NOTES.md)."""

NOT_ROWS = "its input is not [rows, columns]"
"""The reference then says so, as :func:`check` does."""
_MOST_ROWS, _MOST_COLUMNS = 8, 8192
_OUT_TYPES = {torch.float16: 0, torch.bfloat16: 1}


def unavailable(x: torch.Tensor, weight_scale: torch.Tensor) -> str | None:
    """Why no kernel serves the rows ``x`` [M, K] (None when one does)."""
    if x.dim() != 2:
        return NOT_ROWS
    rows, columns = x.shape
    if x.dtype not in _OUT_TYPES:
        return f"the kernel reads fp16 or bf16, not {x.dtype}"
    if not 1 <= rows <= _MOST_ROWS or columns > _MOST_COLUMNS:
        return f"{rows} rows of {columns} columns are more than {_MOST_ROWS} of {_MOST_COLUMNS}"
    if columns % 8 or not aligned(x):
        return f"rows of {columns} columns, {x.stride(0)} apart, do not begin at multiples of 16 bytes"
    return "weight scales are in groups" if weight_scale.ndim != 1 else None


def aligned(rows: torch.Tensor) -> bool:
    """Whether each row of [M, K] is consecutive and begins at a multiple of 16 bytes."""
    return rows.data_ptr() % 16 == 0 and rows.stride(1) == 1 and (rows.shape[0] == 1 or rows.stride(0) % 8 == 0)


def check(
    op: str,
    x: torch.Tensor,
    rule: CodeRule,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Raise ValueError for what a kernel would read as something else, beyond its end or on another device."""
    rule.check()
    if x.dim() != 2:
        raise ValueError(f"{op}: x {tuple(x.shape)} must be [rows, columns]")
    tiles, outputs = qweight.shape, weight_scale.shape[:1].numel()
    kinds = (qweight.dtype, weight_scale.dtype)
    fit = tuple(tiles) == (-(-outputs // 16), -(-x.shape[1] // 32), 256) and weight_scale.ndim in (1, 2)
    if not fit or kinds != (torch.uint8, torch.float32):
        raise ValueError(
            f"{op}: tiles {tuple(tiles)} {kinds[0]} and weight_scale {tuple(weight_scale.shape)} {kinds[1]} do not fit"
            f" rows of {x.shape[1]} columns; int4 tiles are uint8 [outputs / 16, columns / 32, 256], scales float32"
        )
    if not x.device == qweight.device == weight_scale.device:
        raise ValueError(f"{op}: rows on {x.device}, weights on {qweight.device}, scales on {weight_scale.device}")
    gemm_launch.check_bias(op, weight_scale, bias)


def check_residual(op: str, x: torch.Tensor, weight_scale: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raise ValueError for rows that cannot be added to the output of ``x`` [M, K]."""
    if residual is None:
        return
    kind, expected = (tuple(residual.shape), residual.dtype, residual.device), (x.shape[0], weight_scale.shape[0])
    if kind != (expected, x.dtype, x.device):
        raise ValueError(f"{op}: residual {kind} must be the output's {(expected, x.dtype, x.device)}")


def add(out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What the ops with a residual return: it is added to the output as rounded, and the sum is rounded again."""
    return out if residual is None else out + residual


def launch(
    binding: str,
    arguments: tuple[Any, ...],
    x: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """[M, N] in the dtype of ``x`` from a binding of csrc/bindings/gemm.cpp that takes ``arguments`` first."""
    m, n = x.shape[0], weight_scale.shape[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    qweight, weight_scale = gemm_launch.ready(qweight), weight_scale.contiguous()
    bias = gemm_launch.bias_float32(bias)
    pointers = (qweight.data_ptr(), weight_scale.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    linear = (*pointers, m, n, 32 * qweight.shape[1], _OUT_TYPES[x.dtype], *added)
    with torch.cuda.device(x.device):
        getattr(extension(), binding)(*arguments, linear, stream(x))
    return out
