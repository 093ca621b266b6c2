"""``quantize_per_token``: symmetric integer codes of each row (paper, section 4, "quantizing activations").

M rows (the product of the leading dimensions), K columns, Kp = K rounded up to 32. All arithmetic is fp32, every
operation rounded by itself (no FMA), so that a kernel can be equal bit for bit:

    absmax = max |x|                         over the row
    s      = absmax * fp32(clip / qmax)      qmax = 2^(bits-1) - 1
    s < 2^-126      -> s = 0,   codes 0      (zero rows; a subnormal scale never reaches the GEMM)
    s not finite    -> s = NaN, codes 0      (NaN and inf stay in their row)
    otherwise       -> code = clamp(rint(x * (1/s)), -qmax-1, qmax)     half to even

Input fp16, bf16, fp32 (or wider, rounded to fp32 first). ``value ~ code * s``.

With ``upper`` (codes of at most 4 bits, a byte each) what is stored is ``16 * code`` and ``s / 16``. They stand for
the same values, and products of them are the same bit for bit, but a byte whose lower half is zero toggles fewer wires
in the tensor cores than one with five copies of a sign: at the power limit of the board a GEMM is 6 to 9 % faster
(``csrc/gemm/NOTES.md``, "Codes in upper halves"). Where ``s / 16 < 2^-126`` the row is zero.
"""

from __future__ import annotations

from typing import Any

import torch

from quarot.ops.code_rule import CodeRule, Codes
from quarot.ops.registry import define_op, extension, stream
from quarot.quantization.packing import K_ALIGNMENT, pack_nibbles, padded

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32: smaller scales become zero."""


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes the reference takes; any other would be quantised as what it happens to cast to."""


UPPER_ROWS = 512
"""From this many rows on the GEMM runs at the power limit of the board: its codes had better be in upper halves."""
UPPER_FACTOR = 16


def quantize_rows(x: torch.Tensor, rule: CodeRule) -> Codes:
    """The rule of the module on ``x`` [..., K]: codes (int8 [M, Kp] or packed uint8 [M, Kp/2]) and scale fp32 [M]."""
    bits, _, packed, upper = rule.check()
    if x.dtype not in FLOATS or not x.dim():
        raise TypeError(
            f"only float16, bfloat16, float32 and float64 rows can be quantised, not {x.dtype} {[*x.shape]}"
        )
    rows = x.float().reshape(x.shape[:-1].numel(), x.shape[-1])
    qmax = 2 ** (bits - 1) - 1
    absmax = rows.abs().amax(-1, keepdim=True) if rows.shape[1] else rows.new_zeros(rows.shape[0], 1)
    scale = absmax * rule.clip_over_qmax
    # masked_fill, not where: a scalar in where is a copy from the host, which waits and cannot be recorded in a graph.
    factor = UPPER_FACTOR if upper else 1
    scale = scale.masked_fill(scale < SMALLEST_SCALE * factor, 0.0)
    scale = scale.masked_fill(~scale.isfinite(), torch.nan)
    usable = scale > 0
    values = (rows * scale.reciprocal()).masked_fill_(~usable, 0.0).round_().clamp_(-qmax - 1, qmax)
    values = values.mul_(factor) if upper else values
    codes = torch.nn.functional.pad(values.to(torch.int8), (0, padded(rows.shape[1], K_ALIGNMENT) - rows.shape[1]))
    return (pack_nibbles(codes) if packed else codes), (scale / factor if upper else scale).squeeze(-1)


def reference(x: torch.Tensor, *rule: Any) -> Codes:
    """Specification; see the module."""
    return quantize_rows(x, CodeRule(*rule))


def fake(x: torch.Tensor, *rule: Any) -> Codes:
    """Shapes and dtypes of the outputs."""
    return CodeRule(*rule).outputs(x.shape[:-1].numel(), x.shape[-1], x)


DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""Element types the activation kernels read, as csrc/device/dtype.h numbers them."""


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., K] as [M, K] whose rows are consecutive in memory: a view wherever strides allow, else a copy."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def available(x: torch.Tensor, *rule: Any) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    if x.dtype not in DTYPE_CODES or not x.dim():
        return f"the kernel reads rows of fp16, bf16 or fp32, not {x.dtype} {[*x.shape]}"
    return None


def cuda(x: torch.Tensor, *arguments: Any) -> Codes:
    """Launches csrc/quantize/quantize_per_token.cu."""
    rule, x = CodeRule(*arguments), as_rows(x)
    rows, k = x.shape
    if rows == 0 or k == 0:
        return quantize_rows(x, rule)
    codes, scale = rule.buffers(rows, k, x)
    with torch.cuda.device(x.device):
        extension().quantize_per_token(  # type: ignore[union-attr]
            x.data_ptr(),
            DTYPE_CODES[x.dtype],
            x.stride(0),
            rows,
            k,
            codes.data_ptr(),
            scale.data_ptr(),
            rule.clip_over_qmax,
            rule.bits,
            rule.layout,
            stream(x),
        )
    return codes, scale


quantize_per_token = define_op(
    "quantize_per_token",
    "(Tensor x, int bits, float clip, bool packed=False, bool upper=False) -> (Tensor codes, Tensor scale)",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(x [..., K], bits, clip, packed=False, upper=False) -> (codes int8 [M, Kp] | uint8 [M, Kp/2], scale fp32 [M])``."""
