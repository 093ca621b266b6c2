"""``expert_route``: which experts a token goes to, and with what weights, from the logits of the router.

T tokens, E experts, k of them a token. All in fp32: the k largest logits (largest first, the first of equals first, NaN
larger than everything), their softmax over all E experts, divided by the sum of the k where ``normalize`` says so, cast
last. transformers takes the k largest of the softmax instead, where unequal logits can become equal, and leaves the
order of equals open. Weights of a kernel agree to 1e-6 before the cast.
"""

from __future__ import annotations

import torch

from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.registry import define_op, extension, stream

_MOST_EXPERTS, _MOST_CHOICES = 512, 32


def reference(
    logits: torch.Tensor, top_k: int, normalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification; see the module."""
    _check(logits, top_k, dtype)
    wide = logits.float()
    expert = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weight = wide.softmax(-1).gather(-1, expert)
    if normalize:
        weight = weight / weight.sum(-1, keepdim=True)
    return weight.to(dtype), expert


def _check(logits: torch.Tensor, top_k: int, dtype: torch.dtype) -> None:
    if not logits.is_floating_point() or not dtype.is_floating_point:
        raise ValueError(f"expert_route: logits and weights must be floats, got {logits.dtype} and {dtype}")
    if logits.ndim != 2 or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"expert_route: logits must be [T, E] and top_k={top_k} at most E, got {tuple(logits.shape)}")


def fake(logits: torch.Tensor, top_k: int, normalize: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the outputs."""
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def available(logits: torch.Tensor, top_k: int, normalize: bool, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    if logits.dtype not in DTYPE_CODES or dtype not in DTYPE_CODES:
        return f"the kernel takes fp16, bf16 or fp32, not {logits.dtype} and {dtype}"
    if logits.shape[-1] > _MOST_EXPERTS or top_k > _MOST_CHOICES:
        return f"the kernel has at most {_MOST_EXPERTS} experts and {_MOST_CHOICES} a token"
    return None


def cuda(logits: torch.Tensor, top_k: int, normalize: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches csrc/experts/expert_route.cu."""
    _check(logits, top_k, dtype)
    weight, expert = fake(logits, top_k, normalize, dtype)
    if not len(logits):
        return weight, expert
    logits = logits.contiguous()
    with torch.cuda.device(logits.device):
        extension().expert_route(  # type: ignore[union-attr]
            logits.data_ptr(),
            DTYPE_CODES[logits.dtype],
            *logits.shape,
            top_k,
            normalize,
            weight.data_ptr(),
            DTYPE_CODES[dtype],
            expert.data_ptr(),
            stream(logits),
        )
    return weight, expert


expert_route = define_op(
    "expert_route",
    "(Tensor logits, int top_k, bool normalize, ScalarType dtype) -> (Tensor weight, Tensor expert)",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
"""``(logits [T, E], top_k, normalize, dtype) -> (weight [T, top_k], expert int64 [T, top_k])``."""
