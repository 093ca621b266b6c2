"""``gemm_w8a8``: integer activation codes times int8 weights; the arithmetic of :mod:`quarot.ops.gemm_w4a4` exactly.

``codes`` int8 [M, Kp], ``row_scale`` fp32 [M], ``qweight`` int8 [N, Kp] (zeros behind K; N is not padded),
``weight_scale`` fp32 [N] or [N, G], ``bias`` [N] or None; returns [M, N] in ``out_dtype``. Also serves weights of 2, 3,
5, 6 and 7 bits, widened to int8.
"""

from __future__ import annotations

import torch

from quarot.ops import gemm_launch
from quarot.ops.integer_matmul import scaled_integer_matmul
from quarot.ops.registry import define_op


def reference(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Specification; see the module."""
    _check(codes, row_scale, qweight, weight_scale, bias)
    return scaled_integer_matmul(codes, row_scale, qweight, weight_scale, bias, out_dtype)


def _check(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    ranks = codes.ndim == qweight.ndim == 2 and weight_scale.ndim in (1, 2)
    if not ranks or codes.shape[1] != qweight.shape[1] or weight_scale.shape[0] != qweight.shape[0]:
        raise ValueError(
            f"gemm_w8a8: codes {tuple(codes.shape)}, qweight {tuple(qweight.shape)} and weight_scale"
            f" {tuple(weight_scale.shape)} do not fit; expected [M, Kp], [N, Kp] and [N] or [N, G]"
        )
    gemm_launch.check_kinds("gemm_w8a8", codes, row_scale, qweight, weight_scale, weight_kind=torch.int8, packed=False)
    gemm_launch.check_vectors("gemm_w8a8", codes, row_scale, weight_scale, bias)


def cuda(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launches ``csrc/gemm``."""
    _check(codes, row_scale, qweight, weight_scale, bias)
    return gemm_launch.launch(
        codes, row_scale, qweight, weight_scale, bias, out_dtype, weight_format=gemm_launch.INT8_ROWS
    )


def available(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    """Why the kernels cannot serve these arguments, or None."""
    if qweight.ndim != 2:
        return f"a weight of {qweight.ndim} dimensions is not [outputs, inputs]"
    if qweight.shape[1] % 32 or qweight.data_ptr() % 16:
        return f"int8 rows of {qweight.shape[1]} bytes are not padded to 32, or not aligned to 16"
    return gemm_launch.unavailable(codes, weight_scale, qweight.shape[1], out_dtype)


gemm_w8a8 = define_op(
    "gemm_w8a8",
    "(Tensor codes, Tensor row_scale, Tensor qweight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    reference=reference,
    fake=gemm_launch.fake,
    cuda=cuda,
    available=available,
)
"""``(codes [M, Kp], row_scale [M], qweight [N, Kp], weight_scale [N] | [N, G], bias, out_dtype) -> [M, N]``."""
