"""Two partial attention results over disjoint keys as one.

With outputs ``out_i`` and log-sum-exps ``lse_i`` (base 2, as :mod:`quarot.ops.decode_attention` has them)::

    lse = log2(2^lse_0 + 2^lse_1)        out = sum_i out_i 2^(lse_i - lse)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quarot.ops import registry
from quarot.ops.quantize_per_token import DTYPE_CODES


def _check(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Raise ValueError unless both parts have the same shape and device."""
    shapes = (one.shape, other.shape, one_lse.shape, other_lse.shape)
    if one.dim() != 4 or one.shape != other.shape or {one.shape[:3]} != {one_lse.shape, other_lse.shape}:
        raise ValueError(
            "merge_partials: parts must be [batch, heads, tokens, head_dim] with lse [batch, heads, tokens], got "
            + ", ".join(str(tuple(shape)) for shape in shapes)
        )
    if one_lse.dtype != torch.float32 or other_lse.dtype != torch.float32:
        raise ValueError(f"merge_partials: lse must be float32, got {one_lse.dtype} and {other_lse.dtype}")
    if len({x.device for x in (one, one_lse, other, other_lse)}) > 1:
        raise ValueError(f"merge_partials: parts on {one.device} and {other.device}")


def _empty(one: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, dim = one.shape
    return one.new_empty(batch, tokens, heads, dim, dtype=dtype), one.new_empty(
        batch, tokens, heads, dtype=torch.float32
    )


def _fake(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, lse = _empty(one, dtype)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _reference(
    one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _check(one, one_lse, other, other_lse)
    wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    lead = (other_lse - one_lse).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    weight = torch.sigmoid(lead / math.log2(math.e)).to(wide)
    out = one.to(wide).lerp(other.to(wide), weight[..., None]).to(dtype)
    lse = torch.logaddexp2(one_lse, other_lse)
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, lse))  # type: ignore[return-value]


def launch(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Launches csrc/attention/merge_partials.cu."""
    _check(one, one_lse, other, other_lse)
    out, lse = _empty(one, dtype)
    batch, heads, tokens, dim = one.shape
    one, other = (x if _aligned(x) else x.contiguous() for x in (one, other))
    with torch.cuda.device(one.device):
        registry.extension().merge_partials(  # type: ignore[union-attr]
            (one.data_ptr(), other.data_ptr()),
            (one_lse.data_ptr(), other_lse.data_ptr()),
            (one.stride()[:3], other.stride()[:3]),
            (one_lse.stride(), other_lse.stride()),
            (DTYPE_CODES[one.dtype], DTYPE_CODES[other.dtype]),
            out.data_ptr(),
            lse.data_ptr(),
            DTYPE_CODES[dtype],
            batch,
            tokens,
            heads,
            dim,
            registry.stream(one),
        )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _aligned(x: Tensor) -> bool:
    """Whether four neighbouring elements can be read at once everywhere."""
    return x.stride(3) == 1 and not any(s % 4 for s in x.stride()[:3]) and x.data_ptr() % (4 * x.element_size()) == 0


def _available(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor, dtype: torch.dtype) -> str | None:
    for kind in (one.dtype, other.dtype, dtype):
        if kind not in DTYPE_CODES:
            return f"no kernel for {kind}"
    return f"no kernel for a head_dim of {one.shape[3]}" if one.shape[3] % 4 else None


merge_partials = registry.define_op(
    "merge_partials",
    "(Tensor one, Tensor one_lse, Tensor other, Tensor other_lse, ScalarType dtype) -> (Tensor out, Tensor lse)",
    reference=_reference,
    fake=_fake,
    cuda=launch,
    available=_available,
)
merge_partials.__doc__ = """Attention over both parts: out [B, H, T, D] of ``dtype`` and lse float32 [B, H, T], base 2.

Args:
    one, other: [B, H, T, D] in fp16, bf16, fp32 or fp64, any strides; normalised over the keys of their part.
    one_lse, other_lse: float32 [B, H, T], base 2; -inf where no key was seen.
    dtype: of the result, rounded once from float32 (float64 where a part is).

The result lies in memory as [B, T, H, D]. Where no part saw a key it is the mean of both, with lse -inf.
"""
