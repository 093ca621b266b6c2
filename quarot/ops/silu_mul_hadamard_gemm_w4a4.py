"""``silu_mul_hadamard_gemm_w4a4``: the down projection of a gated MLP for one token, from gate and up on, in one go.

    codes, scale = silu_mul_hadamard_quantize(gate_up, order, pow2, bits, clip)
    out = gemm_w4a4(codes, scale, qweight, weight_scale, bias, gate_up.dtype) (+ residual)

``gate_up`` [M, 2K], K = order * pow2; ``qweight`` int4 tiles of N x K; ``residual`` [M, N] or None. The kernel equals
the kernels of these two ops and the addition bit for bit and serves fp16 and bf16 on Hopper, M = 1, transforms that are
H_m (x) H_64 with m <= 176 (11008 = 172 x 64) and one weight scale a channel.
"""

from __future__ import annotations

import torch

from quarot.ops import gemm_prologue as prologue
from quarot.ops import gemm_w4a4 as gemm_op
from quarot.ops import hadamard_launch
from quarot.ops import silu_mul_hadamard_quantize as silu_op
from quarot.ops.code_rule import CodeRule
from quarot.ops.registry import define_op

ROWS = 1
"""Most rows of the kernel; 0 turns it off (the two kernels then serve)."""


def reference(
    gate_up: torch.Tensor,
    order: int,
    pow2: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification; see the module."""
    _check(gate_up, CodeRule(bits, clip), qweight, weight_scale, bias, residual)
    codes, scale = silu_op.reference(gate_up, order, pow2, bits, clip)
    return prologue.add(gemm_op.reference(codes, scale, qweight, weight_scale, bias, gate_up.dtype), residual)


def fake(
    gate_up: torch.Tensor,
    order: int,
    pow2: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shape and dtype of the output."""
    return gate_up.new_empty((gate_up.shape[0], weight_scale.shape[0]))


def _check(
    gate_up: torch.Tensor,
    rule: CodeRule,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    op, width = "silu_mul_hadamard_gemm_w4a4", gate_up.shape[-1] // 2
    prologue.check(op, gate_up[..., :width], rule, qweight, weight_scale, bias)
    prologue.check_residual(op, gate_up, weight_scale, residual)


def available(
    gate_up: torch.Tensor,
    order: int,
    pow2: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    if gate_up.dim() != 2:
        return prologue.NOT_ROWS
    if not 1 <= gate_up.shape[0] <= ROWS:
        return f"the kernel takes at most {ROWS} rows, not {gate_up.shape[0]}"
    if gate_up.shape[1] != 2 * order * pow2:
        return f"{gate_up.shape[1]} columns are not gate and up of {order * pow2}"
    if gate_up.stride(1) != 1:
        return f"columns {gate_up.stride(1)} elements apart are not consecutive"
    if weight_scale.ndim != 1:
        return "weight scales are in groups"
    return hadamard_launch.bits_unavailable(gate_up, order, pow2, CodeRule(bits, clip).clip_over_qmax)


def cuda(
    gate_up: torch.Tensor,
    order: int,
    pow2: int,
    bits: int,
    clip: float,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launches csrc/gemm/sm90/prologue_silu.cu."""
    rule = CodeRule(bits, clip)
    _check(gate_up, rule, qweight, weight_scale, bias, residual)
    signs = hadamard_launch.factor_bits(order, pow2, gate_up.device)
    transform = (order * pow2 // 64, signs.data_ptr(), rule.clip_over_qmax, bits)
    arguments = (gate_up.data_ptr(), gate_up.dtype == torch.bfloat16, *transform)
    return prologue.launch("silu_gemm_sm90", arguments, gate_up, qweight, weight_scale, bias, residual)


silu_mul_hadamard_gemm_w4a4 = define_op(
    "silu_mul_hadamard_gemm_w4a4",
    "(Tensor gate_up, int order, int pow2, int bits, float clip, Tensor qweight, Tensor weight_scale, Tensor? bias,"
    " Tensor? residual=None) -> Tensor",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(gate_up [M, 2K], order, pow2, bits, clip, qweight, weight_scale [N], bias, residual) -> out [M, N]``."""
