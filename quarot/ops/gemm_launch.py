"""Launches the integer GEMM kernels (``csrc/gemm``); shared by ``gemm_w4a4`` and ``gemm_w8a8``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from quarot.ops import registry
from quarot.ops.workspace import zeroed_counters

INT4_TILES, INT8_ROWS = 0, 1
"""Weight formats, as in ``csrc/gemm/skinny.h``."""

OUT_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
MAX_K = 131040
"""Largest multiple of 32 whose sums of (16 * -8) * -128 stay below 2^31."""
_MAX_GROUP = 8192
"""Longest scale group whose activations of 8 tokens fit in the shared memory of every supported GPU."""
_WIDE_TOKENS = 32
"""From here on some kernels store 16 bytes at a time and need rows of the output to be multiples of that."""

_bias32: WeakIdKeyDictionary = WeakIdKeyDictionary()


def unavailable(codes: torch.Tensor, weight_scale: torch.Tensor, k: int, out_dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve a GEMM of padded width ``k`` (None when they can)."""
    if out_dtype not in OUT_TYPES:
        return f"out_dtype {out_dtype} is not float16, bfloat16 or float32"
    if not 0 < k <= MAX_K:
        return f"K={k} is no width, or may overflow the int32 accumulator (at most {MAX_K})"
    if weight_scale.ndim == 2:
        group = k // weight_scale.shape[1]
        if group * weight_scale.shape[1] != k or group % 32 or group > _MAX_GROUP:
            return f"groups of {k}/{weight_scale.shape[1]} inputs are not a multiple of 32 up to {_MAX_GROUP}"
    if codes.shape[0] > 2**20:
        return f"{codes.shape[0]} rows exceed one launch"
    return None


def check_kinds(
    op: str,
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    weight_kind: torch.dtype,
    packed: bool,
) -> None:
    """Raise ValueError for what a kernel would read as something else: other dtypes, or memory of another device."""
    kinds = (codes.dtype, row_scale.dtype, weight.dtype, weight_scale.dtype)
    wanted = (torch.uint8 if packed else torch.int8, torch.float32, weight_kind, torch.float32)
    if kinds != wanted:
        raise ValueError(
            f"{op}: {'packed ' if packed else ''}codes, row_scale, weight and weight_scale must be"
            f" {', '.join(map(str, wanted))}, got {', '.join(map(str, kinds))}"
        )
    if not codes.device == row_scale.device == weight.device == weight_scale.device:
        devices = {tensor.device for tensor in (codes, row_scale, weight, weight_scale)}
        raise ValueError(f"{op}: its tensors are on {', '.join(sorted(map(str, devices)))}")


def fake(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *rest: bool,
) -> torch.Tensor:
    """Shape and dtype of the output of every GEMM op."""
    return codes.new_empty((codes.shape[0], weight_scale.shape[0]), dtype=out_dtype)


def check_vectors(
    op: str, codes: torch.Tensor, row_scale: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError for row scales or a bias that a kernel would read beyond their end, or on another device."""
    if row_scale.shape != codes.shape[:1]:
        raise ValueError(f"{op}: row_scale {tuple(row_scale.shape)} must be [{codes.shape[0]}], one per row of codes")
    check_bias(op, weight_scale, bias)


def check_bias(op: str, weight_scale: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError for a bias that does not fit the outputs."""
    if bias is None:
        return
    n, device = weight_scale.shape[0], weight_scale.device
    if bias.shape != (n,) or bias.device != device or not bias.is_floating_point():
        raise ValueError(
            f"{op}: bias must be [{n}] floats on {device}, got {tuple(bias.shape)} {bias.dtype} on {bias.device}"
        )


def bias_float32(bias: torch.Tensor | None) -> torch.Tensor | None:
    """``bias`` in float32, converted once while it lives (the epilogue adds in float32)."""
    if bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()):
        return bias
    state = (bias.data_ptr(), 0 if bias.is_inference() else bias._version, bias.dtype)
    kept = _bias32.get(bias)
    if kept is None or kept[0] != state:
        kept = (state, bias.detach().float().contiguous())
        _bias32[bias] = kept
    return kept[1]


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous and 16-byte aligned."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _readable_rows(codes: torch.Tensor) -> int:
    """Rows of ``codes`` and of the memory behind it (``CodeRule.buffers`` leaves some), whatever they hold."""
    memory = codes.untyped_storage().nbytes() - codes.storage_offset() * codes.element_size()
    return min(memory // max(1, codes.shape[1] * codes.element_size()), 2**30)


@functools.lru_cache(maxsize=4096)
def _scratch(device: int, *size: int, tactic: tuple[int, ...]) -> tuple[int, int]:
    extension: Any = registry.extension()
    with torch.cuda.device(device):
        return extension.gemm_scratch(*size, list(tactic))


def launch(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    weight_format: int,
    packed: bool = False,
    tactic: Sequence[int] = (),
) -> torch.Tensor:
    """Run the GEMM on ``codes.device`` and its current stream; the ops have checked the arguments.

    Args:
        codes: int8 [M, Kp], or uint8 [M, Kp/2] with ``packed`` (then ``weight`` is row-major int4 [>=N, Kp/2]).
        row_scale: float32 [M].
        weight: int4 tiles or int8 rows, by ``weight_format``.
        weight_scale: float32 [N] or [N, G].
        bias: [N] in any float dtype, or None.
        out_dtype: float16, bfloat16 or float32.
        weight_format: :data:`INT4_TILES` or :data:`INT8_ROWS`.
        packed: int4 activations.
        tactic: kernel and its parameters (``csrc/gemm/dispatch.h``); empty lets the library choose.

    Returns:
        [M, N] in ``out_dtype``, contiguous.
    """
    m, k = codes.shape[0], codes.shape[1] * (2 if packed else 1)
    n = weight_scale.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=codes.device)
    if m == 0:
        return out
    groups = weight_scale.shape[1] if weight_scale.ndim == 2 else 0
    codes, row_scale, weight_scale = ready(codes), row_scale.contiguous(), weight_scale.contiguous()
    weight = ready(weight)
    bias = bias_float32(bias)
    stored = out
    if n % 8 and (packed or m > _WIDE_TOKENS) and out_dtype != torch.float32:
        stored = torch.empty((m, -(-n // 8) * 8), dtype=out_dtype, device=codes.device)
    kernel_n = n
    if packed and n % 8:  # the INT4 tensor-core epilogue reads 8 scales at a time; the weight has rows to spare
        kernel_n = -(-n // 8) * 8
        weight_scale = torch.nn.functional.pad(weight_scale, (0, kernel_n - n))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, kernel_n - n))
    size = (m, kernel_n, k, stored.shape[1], groups, OUT_TYPES[out_dtype], weight_format, packed)
    workspace, workspace_bytes, counters, stream = None, 0, None, registry.stream(codes)
    if packed or m > _WIDE_TOKENS or tactic:
        workspace_bytes, count = _scratch(codes.device.index, *size, tactic=tuple(tactic))
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=codes.device) if workspace_bytes else None
        counters = zeroed_counters(count, codes.device, stream) if count else None
    extension: Any = registry.extension()
    with torch.cuda.device(codes.device):
        extension.gemm(
            codes.data_ptr(),
            row_scale.data_ptr(),
            weight.data_ptr(),
            weight_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            stored.data_ptr(),
            *size,
            0 if workspace is None else workspace.data_ptr(),
            workspace_bytes,
            0 if counters is None else counters.data_ptr(),
            _readable_rows(codes),
            list(tactic),
            stream,
        )
    return out if stored is out else out.copy_(stored[:, :n])
