"""FlashInfer's prefill kernels, where the package is installed (extra ``flashinfer``) and the GPU and shape are theirs.

FlashInfer compiles a kernel at its first use unless it has it prebuilt. Where that fails (no nvcc) the log says so once
and PyTorch serves. ``QUAROT_FLASHINFER=0`` turns it off; ``fa2`` or ``fa3`` instead of ``auto`` picks its back end.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any

import torch
from torch import Tensor

from quarot.ops import registry

logger = logging.getLogger("quarot")

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20
_CHOICES = ("auto", "fa2", "fa3", "0")
_broken: list[str] = []  # why it is off for the rest of the process


def backend() -> str:
    """The back end to ask for, "0" for none.

    Raises:
        ValueError: ``QUAROT_FLASHINFER`` has another value.
    """
    value = os.environ.get("QUAROT_FLASHINFER", "auto")
    if value not in _CHOICES:
        raise ValueError(f"QUAROT_FLASHINFER={value!r} is not one of {', '.join(_CHOICES)}")
    return value


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor] | None:
    """Attention of query [B, Hq, T, D] to key and value [B, Hkv, S, D]; None where FlashInfer cannot serve.

    Returns:
        out [B, Hq, T, D] and lse float32 [B, Hq, T], base 2.
    """
    if not _serves(query, key):
        return None
    batch, heads, count, dim = query.shape
    rows = (x.transpose(1, 2).reshape(-1, x.shape[1], dim) for x in (query, key, value))
    try:
        with torch.cuda.device(query.device):
            out, lse = _wrapper(*_plan_of(query, key, scale, causal)).run(*rows, return_lse=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # its compiler, its loader, its own checks: all mean that PyTorch serves
        _broken.append(str(error))
        logger.warning("FlashInfer is installed but cannot serve; PyTorch's kernels do: %s", str(error)[:500])
        return None
    return out.view(batch, count, heads, dim).transpose(1, 2), lse.view(batch, count, heads).transpose(1, 2)


def _serves(query: Tensor, key: Tensor) -> bool:
    if not query.is_cuda or not installed() or _broken or backend() == "0" or registry.forces_reference():
        return False
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return False  # a plan is made on the host
    shaped = query.shape[-1] in _HEAD_DIMS and min(query.numel(), key.numel()) > 0
    return shaped and query.dtype in (torch.float16, torch.bfloat16)


def _plan_of(query: Tensor, key: Tensor, scale: float, causal: bool) -> tuple[Any, ...]:
    sizes = (query.shape[0], query.shape[2], key.shape[2], query.shape[1], key.shape[1], query.shape[3])
    return (query.device, registry.stream(query), backend(), query.dtype, *sizes, scale, causal)


@functools.lru_cache(maxsize=8)
def _wrapper(
    device: torch.device,
    stream: int,
    back_end: str,
    dtype: torch.dtype,
    batch: int,
    count: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    scale: float,
    causal: bool,
) -> Any:
    """A planned wrapper, shared by the layers of a forward. One workspace a stream serves all, one after the other."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(device, stream), "NHD", backend=back_end)
    queries, keys = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (count, length))
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    wrapper.plan(queries, keys, heads, kv_heads, dim, causal=causal, sm_scale=scale, **types)
    return wrapper


@functools.lru_cache(maxsize=4)
def _workspace(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
