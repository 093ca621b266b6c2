"""``gemm_w4a4``: integer activation codes times packed INT4 weights (paper, section 4, stage 2a).

M tokens, K inputs (Kp padded to 32), N outputs (Np padded to 16), G groups of K/G inputs (a multiple of 32).

    acc[m, n] = sum_k codes[m, k] * weight[n, k]                       int32, exact
    out[m, n] = (float(acc) * row_scale[m]) * weight_scale[n] + bias[n]     fp32, cast to out_dtype last

With groups the partial sums ``float(acc_g) * weight_scale[n, g]`` are added in fp32 in the order of g, then multiplied
by row_scale. The accumulator never passes through a half: 7 * 7 * 11008 = 539392 is far beyond fp16.

``codes`` int8 [M, Kp] of 4, 6 or 8 bits, or uint8 [M, Kp/2] (packed int4); ``row_scale`` fp32 [M]; ``qweight`` int4
tiles (:mod:`quarot.quantization.packing`); ``weight_scale`` fp32 [N] or [N, G]; ``bias`` [N] or None.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from quarot.ops import gemm_launch
from quarot.ops.int4_rows import int4_rows
from quarot.ops.integer_matmul import scaled_integer_matmul
from quarot.ops.registry import define_op
from quarot.quantization.packing import unpack_int4_tiles, unpack_nibbles

_unpacked_on_cpu: WeakIdKeyDictionary = WeakIdKeyDictionary()


def unpacked(qweight: torch.Tensor) -> torch.Tensor:
    """int8 [Np, Kp] view of int4 tiles for the reference.

    On the CPU it is kept beside the tiles while they live (one byte a weight more, never saved), since unpacking costs
    more than the product of a short prompt; on a GPU it is made anew, because there memory is what INT4 is for.
    """
    n, k = qweight.shape[0] * 16, qweight.shape[1] * 32
    if qweight.device.type != "cpu":
        return unpack_int4_tiles(qweight, n, k)
    state = (qweight.data_ptr(), 0 if qweight.is_inference() else qweight._version, qweight.shape)
    kept = _unpacked_on_cpu.get(qweight)
    if kept is None or kept[0] != state:
        kept = (state, unpack_int4_tiles(qweight, n, k))
        _unpacked_on_cpu[qweight] = kept
    return kept[1]


def reference(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    packed_activations: bool = False,
) -> torch.Tensor:
    """Specification; see the module."""
    _check(codes, row_scale, qweight, weight_scale, bias, packed_activations)
    codes = unpack_nibbles(codes) if packed_activations else codes
    weight = unpacked(qweight)[: weight_scale.shape[0]]
    return scaled_integer_matmul(codes, row_scale, weight, weight_scale, bias, out_dtype, w_max=8)


def _check(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    packed: bool,
) -> None:
    ranks = codes.ndim == 2 and qweight.ndim == 3 and weight_scale.ndim in (1, 2) and qweight.shape[2] == 256
    rows, columns = (qweight.shape[0] * 16, qweight.shape[1] * 32) if ranks else (0, 0)
    if not ranks or codes.shape[1] * (2 if packed else 1) != columns or not rows - 16 < weight_scale.shape[0] <= rows:
        raise ValueError(
            f"gemm_w4a4: {'packed ' if packed else ''}codes {tuple(codes.shape)} and weight_scale"
            f" {tuple(weight_scale.shape)} do not fit tiles {tuple(qweight.shape)} of {rows} outputs, {columns} inputs"
        )
    gemm_launch.check_kinds(
        "gemm_w4a4", codes, row_scale, qweight, weight_scale, weight_kind=torch.uint8, packed=packed
    )
    gemm_launch.check_vectors("gemm_w4a4", codes, row_scale, weight_scale, bias)


def cuda(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    packed_activations: bool = False,
) -> torch.Tensor:
    """Launches ``csrc/gemm``.

    The tiles feed the int8 tensor cores. Packed activations go to the INT4 ones (with row-major weights) where the GPU
    has them, else they are unpacked first.
    """
    _check(codes, row_scale, qweight, weight_scale, bias, packed_activations)
    weight = qweight
    if packed_activations:
        int4_cores = torch.cuda.get_device_capability(codes.device) < (9, 0)
        if int4_cores and weight_scale.ndim == 1 and out_dtype != torch.float32:
            weight = int4_rows(qweight)
        else:
            codes, packed_activations = unpack_nibbles(codes), False
    return gemm_launch.launch(
        codes,
        row_scale,
        weight,
        weight_scale,
        bias,
        out_dtype,
        weight_format=gemm_launch.INT4_TILES,
        packed=packed_activations,
    )


def available(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    packed_activations: bool = False,
) -> str | None:
    """Why the kernels cannot serve these arguments, or None."""
    return gemm_launch.unavailable(codes, weight_scale, 32 * qweight.shape[1:2].numel(), out_dtype)


gemm_w4a4 = define_op(
    "gemm_w4a4",
    "(Tensor codes, Tensor row_scale, Tensor qweight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype,"
    " bool packed_activations=False) -> Tensor",
    reference=reference,
    fake=gemm_launch.fake,
    cuda=cuda,
    available=available,
)
"""``(codes, row_scale [M], qweight, weight_scale [N] | [N, G], bias, out_dtype, packed=False) -> [M, N]``."""
