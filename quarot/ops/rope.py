"""``quarot::rope``: rotary position embedding of the query and key heads of a fused projection, in place.

Notation: T tokens, Hq query and Hkv key heads, D head_dim, R rotary dimensions (R <= D).
"""

from __future__ import annotations

import torch

from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.registry import define_op, extension, stream


def _rms_norm(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    if gain is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.to(x.dtype)


def _reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Rotate ``qkv[:, :(Hq + Hkv) * D]`` in place.

    Args:
        qkv: [T, >= (Hq + Hkv) * D], query heads first, then key heads; later columns (the values) are left alone.
        cos, sin: [P, R] in the dtype of ``qkv``, transformers' layout (the two halves of R repeat); token t reads row
            ``t mod P``, so one table serves every row of a batch.
        q_norm, k_norm: [D] gains of a per-head RMSNorm applied first (Qwen3), or None.
        eps: of that norm.

    Computed in the wider of float32 and the input's dtype, rounded once. A head x becomes
    ``x * cos + rotate_half(x) * sin`` on its first R channels.
    """
    heads, rotary_dim = num_q_heads + num_kv_heads, cos.shape[-1]
    _check(qkv, cos, sin, heads, head_dim)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    view = qkv[:, : heads * head_dim].unflatten(-1, (heads, head_dim))
    x = view.to(wide)
    x = torch.cat([_rms_norm(x[:, :num_q_heads], q_norm, eps), _rms_norm(x[:, num_q_heads:], k_norm, eps)], dim=1)
    row = torch.arange(qkv.shape[0], device=qkv.device) % cos.shape[0]
    c, s = (table.to(wide)[row].unsqueeze(1) for table in (cos, sin))
    a, b = x[..., :rotary_dim].chunk(2, dim=-1)
    rotated = x[..., :rotary_dim] * c + torch.cat([-b, a], dim=-1) * s
    view.copy_(torch.cat([rotated, x[..., rotary_dim:]], dim=-1).to(qkv.dtype))


def _fake(qkv: torch.Tensor, *args: object) -> None:
    return None


def _available(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> str | None:
    if qkv.dtype not in DTYPE_CODES:
        return f"dtype {qkv.dtype} has no kernel"
    others = [tensor for tensor in (cos, sin, q_norm, k_norm) if tensor is not None]
    if any(tensor.dtype != qkv.dtype for tensor in others):
        return f"tables and gains of {[str(tensor.dtype) for tensor in others]} differ from qkv's {qkv.dtype}"
    if qkv.stride(-1) != 1 or not all(tensor.is_contiguous() for tensor in others):
        return "rows must be contiguous"
    return None


def _check(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, head_dim: int) -> None:
    """Raise ValueError unless the shapes fit together."""
    if qkv.dim() != 2 or qkv.shape[1] < heads * head_dim:
        raise ValueError(f"rope: qkv {tuple(qkv.shape)} has no {heads} heads of {head_dim}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] > head_dim or cos.shape[1] % 2 or not cos.shape[0]:
        raise ValueError(
            f"rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [rows, rotary_dim] with an even "
            f"rotary_dim up to head_dim {head_dim}"
        )


def _cuda(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    _check(qkv, cos, sin, num_q_heads + num_kv_heads, head_dim)
    if qkv.shape[0] == 0:
        return
    module = extension()
    assert module is not None
    with torch.cuda.device(qkv.device):
        module.rope(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            eps,
            qkv.shape[0],
            qkv.stride(0),
            cos.shape[0],
            num_q_heads,
            num_kv_heads,
            head_dim,
            cos.shape[-1],
            DTYPE_CODES[qkv.dtype],
            stream(qkv),
        )


rope = define_op(
    "rope",
    "(Tensor(a!) qkv, Tensor cos, Tensor sin, int num_q_heads, int num_kv_heads, int head_dim, Tensor? q_norm,"
    " Tensor? k_norm, float eps) -> ()",
    reference=_reference,
    fake=_fake,
    cuda=_cuda,
    available=_available,
)
