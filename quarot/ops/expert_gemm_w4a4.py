"""``expert_gemm_w4a4``: :mod:`quarot.ops.gemm_w4a4` with an expert for every row, for the few tokens of a decode step.

M rows of codes, top_k experts for each of them (1 behind the first projection: every pair of token and expert has codes
of its own there), K inputs (Kp padded to 32), N outputs (a multiple of 16), E experts. Output row r = m * top_k + j is
row m of the codes through expert ``e = expert[m, j]``:

    acc[r, n] = sum_k codes[m, k] * weight[e, n, k]                     int32, exact
    out[r, n] = (float(acc) * row_scale[m]) * weight_scale[e, n]        fp32, cast to out_dtype last

which is bit for bit what ``gemm_w4a4`` gives for the weight of that expert alone. Rows whose expert does not exist are
NaN: the numbers of the experts are on the device, and nobody waits for them to look.

``codes`` int8 [M, Kp]; ``row_scale`` fp32 [M]; ``expert`` int64 [M, top_k]; ``qweight`` int4 tiles
[E, N/16, Kp/32, 256]; ``weight_scale`` fp32 [E, N].
"""

from __future__ import annotations

import torch

from quarot.ops import registry
from quarot.ops.gemm_launch import MAX_K, OUT_TYPES, ready
from quarot.ops.gemm_w4a4 import unpacked
from quarot.ops.integer_matmul import scaled_integer_matmul
from quarot.ops.registry import define_op

ROWS = 256
"""Most output rows of one launch (csrc/experts/expert_gemm_w4a4.h)."""


def reference(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    expert: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Specification; see the module."""
    _check(codes, row_scale, expert, qweight, weight_scale, out_dtype)
    flat = expert.flatten()
    out = torch.full((flat.numel(), weight_scale.shape[1]), torch.nan, dtype=out_dtype, device=codes.device)
    for index in flat.unique().tolist():
        if 0 <= index < qweight.shape[0]:
            rows = (flat == index).nonzero()[:, 0]
            some = rows // expert.shape[1]
            weight, scale = unpacked(qweight[index]), weight_scale[index]
            out[rows] = scaled_integer_matmul(codes[some], row_scale[some], weight, scale, None, out_dtype, w_max=8)
    return out


def _check(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    expert: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    """Raise ValueError for what a kernel would read as something else, or beyond its end."""
    given = {"codes": codes, "row_scale": row_scale, "expert": expert, "qweight": qweight, "weight_scale": weight_scale}
    kinds = (torch.int8, torch.float32, torch.int64, torch.uint8, torch.float32)
    for (name, tensor), kind in zip(given.items(), kinds, strict=True):
        if tensor.dtype != kind or tensor.device != codes.device:
            raise ValueError(
                f"expert_gemm_w4a4: {name} must be {kind} on {codes.device}, got {tensor.dtype} on {tensor.device}"
            )
    if not out_dtype.is_floating_point:
        raise ValueError(f"expert_gemm_w4a4: out_dtype {out_dtype} holds no fractions")
    # Of a tensor with other dimensions these are numbers that do not fit either.
    m, k, top_k, e, n = (*codes.shape, *expert.shape[1:], *weight_scale.shape, 0, 0, 0, 0, 0)[:5]
    wanted = {
        "row_scale": (m,),
        "expert": (m, top_k),
        "qweight": (e, n // 16, k // 32, 256),
        "weight_scale": (e, n // 16 * 16),
    }
    for name, shape in wanted.items():
        if tuple(given[name].shape) != shape or codes.ndim != 2 or k % 32:
            raise ValueError(
                f"expert_gemm_w4a4: {name} {tuple(given[name].shape)} does not fit codes {tuple(codes.shape)};"
                " wanted are codes [M, Kp], row_scale [M], expert [M, top_k], qweight [E, N/16, Kp/32, 256] and"
                " weight_scale [E, N], where 16 divides N and 32 Kp"
            )


def fake(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    expert: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Shape and dtype of the output."""
    return codes.new_empty((expert.numel(), weight_scale.shape[1]), dtype=out_dtype)


def available(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    expert: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> str | None:
    """Why the kernel cannot serve these arguments, or None."""
    if out_dtype not in OUT_TYPES:
        return f"out_dtype {out_dtype} is not float16, bfloat16 or float32"
    if codes.shape[1] > MAX_K:
        return f"K={codes.shape[1]} may overflow the int32 accumulator (at most {MAX_K})"
    return f"{expert.numel()} rows exceed one launch (at most {ROWS})" if expert.numel() > ROWS else None


def cuda(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    expert: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launches csrc/experts/expert_gemm_w4a4.cu."""
    _check(codes, row_scale, expert, qweight, weight_scale, out_dtype)
    experts, n, (m, top_k), k = qweight.shape[0], weight_scale.shape[1], expert.shape, codes.shape[1]
    out = torch.empty((m * top_k, n), dtype=out_dtype, device=codes.device)
    if not out.numel():
        return out
    codes, row_scale, expert = ready(codes), ready(row_scale), ready(expert)
    qweight, weight_scale = ready(qweight), ready(weight_scale)
    with torch.cuda.device(codes.device):
        registry.extension().expert_gemm_w4a4(  # type: ignore[union-attr]
            codes.data_ptr(),
            row_scale.data_ptr(),
            expert.data_ptr(),
            qweight.data_ptr(),
            weight_scale.data_ptr(),
            out.data_ptr(),
            m * top_k,
            top_k,
            experts,
            n,
            k,
            OUT_TYPES[out_dtype],
            registry.stream(codes),
        )
    return out


expert_gemm_w4a4 = define_op(
    "expert_gemm_w4a4",
    "(Tensor codes, Tensor row_scale, Tensor expert, Tensor qweight, Tensor weight_scale, ScalarType out_dtype)"
    " -> Tensor",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(codes [M, Kp], row_scale [M], expert [M, top_k], qweight, weight_scale [E, N], out_dtype) -> [M * top_k, N]``."""
