"""The exact integer product behind the GEMM references, and their fp32 epilogue."""

from __future__ import annotations

import torch

_FP32_EXACT = 2**24


def integer_matmul(a: torch.Tensor, w: torch.Tensor, w_max: int = 128) -> torch.Tensor:
    """``a`` int8 [M, K] times ``w`` int8 [N, K] transposed, exact: [M, N] int32, or fp32 where that holds it exactly.

    On a CPU a float32 matmul is the fastest integer matmul there is, and exact while every partial sum stays within
    2^24: K is cut into chunks that guarantee it (codes in ``w`` reach at most ``w_max``), added as int32.
    """
    m, k = a.shape
    n = w.shape[0]
    if a.is_cuda and m and n and k:
        # cuBLAS wants more than 16 rows and multiples of 8.
        rows, columns, depth = max(24, -(-m // 8) * 8), -(-n // 8) * 8, -(-k // 8) * 8
        a = torch.nn.functional.pad(a, (0, depth - k, 0, rows - m))
        w = torch.nn.functional.pad(w, (0, depth - k, 0, columns - n))
        return torch._int_mm(a, w.T)[:m, :n]
    a_max = 128
    if k > _FP32_EXACT // (a_max * w_max) and m:
        low, high = a.aminmax()
        a_max = max(-int(low), int(high), 1)
    chunk = _FP32_EXACT // (a_max * w_max)
    if k <= chunk:
        return a.float() @ w.float().T
    total = torch.zeros(m, n, dtype=torch.int32, device=a.device)
    for start in range(0, k, chunk):
        total += (a[:, start : start + chunk].float() @ w[:, start : start + chunk].float().T).to(torch.int32)
    return total


def scaled_integer_matmul(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    w_max: int = 128,
) -> torch.Tensor:
    """The epilogue of both GEMM ops in fp32, cast last; every operation rounded by itself:

    * per channel (``weight_scale`` [N]): ``(float(acc) * row_scale[m]) * weight_scale[n] (+ bias[n])``
    * groups ([N, G]): ``sum over g in order of float(acc_g) * weight_scale[n, g]``, then ``* row_scale[m] (+ bias[n])``
    """
    rows = row_scale[:, None]
    if weight_scale.ndim == 1:
        out = integer_matmul(codes, weight, w_max).float() * rows * weight_scale
    else:
        groups = weight_scale.shape[1]
        if codes.shape[1] % groups:
            raise ValueError(f"{groups} weight groups do not divide the padded width {codes.shape[1]}")
        out = torch.zeros(codes.shape[0], weight.shape[0], device=codes.device)
        parts = zip(codes.chunk(groups, 1), weight.chunk(groups, 1), weight_scale.unbind(1), strict=True)
        for code_part, weight_part, scale in parts:
            out += integer_matmul(code_part, weight_part, w_max).float() * scale
        out *= rows
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)
