"""Choice and launch of the Hadamard kernels (csrc/hadamard) for the ops ``hadamard``, ``hadamard_quantize`` and
``silu_mul_hadamard_quantize``.

Three families: the tensor-core transform of Hopper (``sm90``: fp16/bf16, rows of one unit, int8 codes, aligned), the
transform across heads with codes (``heads``: fp16/bf16, aligned) and ``any_size`` for everything else. The +-1 factor
H_order reaches a kernel as a table in the order it reads. Tables are made at first use (so run an op once before
capturing it), once per device, and stay for the life of the process: CUDA graphs may keep their addresses.
"""

from __future__ import annotations

import functools

import torch

from quarot.ops.code_rule import BYTES, NIBBLES, CodeRule
from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.registry import extension, stream
from quarot.rotation.hadamard import hadamard_matrix

_MAX_WIDTH = 1 << 24
_MAX_BLOCKS = 4095
_LEAST_CLIP = 1e-3
"""With a smaller clip codes before clamping may leave 16 bits: left to the kernel that clamps in fp32."""


@functools.cache
def sign_table(order: int, device: torch.device) -> torch.Tensor:
    """Signs of H_order as csrc/hadamard/any_size.h wants them: int32 [ceil(order / 16), ceil(order / 64), 32]."""
    row_tiles, k_tiles = -(-order // 16), -(-order // 64)
    negative = torch.zeros(row_tiles * 16, k_tiles * 64, dtype=torch.int64, device="cpu")
    negative[:order, :order] = hadamard_matrix(order) < 0
    # rows 16 mt + 8 i0 + g; columns 64 kt + 8 q + 4 i1 + c; bit 31 - (4 q + i0 + 2 i1) of lane 4 g + c
    parts = negative.view(row_tiles, 2, 8, k_tiles, 8, 2, 4).permute(0, 3, 2, 6, 4, 5, 1).reshape(-1, 32)
    words = (parts << torch.arange(31, -1, -1, device="cpu")).sum(-1)
    return words.to(torch.uint32).view(torch.int32).view(row_tiles, k_tiles, 32).to(device)


_MAX_HEADS, _MAX_HEAD_DIM = 64, 256


@functools.cache
def head_sign_table(order: int, pow2: int, device: torch.device) -> torch.Tensor:
    """Signs of H_order (x) H_pow2 as csrc/hadamard/heads.h wants them: int32 [2 or 4, 32]."""
    heads = order * pow2
    tiles = 2 if heads <= 32 else 4
    negative = torch.zeros(tiles * 16, 64, dtype=torch.int64, device="cpu")
    negative[:heads, :heads] = torch.kron(hadamard_matrix(order).cpu(), hadamard_matrix(pow2).cpu()) < 0
    # rows 16 mt + 8 i0 + g; columns 16 q + 8 i1 + 2 c + e; bit 15 - (4 q + i0 + 2 i1) + 16 e of lane 4 g + c
    parts = negative.view(tiles, 2, 8, 4, 2, 4, 2).permute(0, 2, 5, 6, 3, 4, 1).reshape(-1, 2, 16)
    shift = torch.arange(15, -1, -1, device="cpu") + 16 * torch.arange(2, device="cpu").view(2, 1)
    return (parts << shift).sum((1, 2)).to(torch.uint32).view(torch.int32).view(tiles, 32).to(device)


@functools.cache
def plan_sm90(order: int, pow2: int) -> tuple[int, int, int] | None:
    """(m, padded m, 64-column tiles) of the tensor-core transform, None where no compiled shape fits."""
    plan = extension().hadamard_plan_sm90(order, pow2)  # type: ignore[union-attr]
    return plan if plan[1] else None


@functools.cache
def factor_table(order: int, pow2: int, device: torch.device) -> torch.Tensor:
    """H_m^T of :func:`plan_sm90`, m = order * (the part of pow2 beyond the tiles), as csrc/hadamard/sm90 wants it."""
    plan = plan_sm90(order, pow2)
    assert plan is not None
    m, padded, tiles = plan
    matrix = torch.zeros(padded, padded, dtype=torch.float16, device="cpu")
    matrix[:m, :m] = torch.kron(hadamard_matrix(order).float(), hadamard_matrix(pow2 // (64 * tiles)).float())
    return matrix.view(padded, padded // 8, 8).permute(1, 0, 2).contiguous().to(device)


_MOST_FACTOR = 176
"""Rows and columns of :func:`factor_bits`, as csrc/gemm/prologue.h has it."""


@functools.cache
def factor_bits(order: int, pow2: int, device: torch.device) -> torch.Tensor:
    """Signs of H_m, order * pow2 = 64 m, as csrc/gemm/sm90/prologue_silu.cuh wants them: uint8 [22, 176]."""
    m = order * (pow2 // 64)
    negative = torch.zeros(_MOST_FACTOR, _MOST_FACTOR, dtype=torch.int64, device="cpu")
    negative[:m, :m] = torch.kron(hadamard_matrix(order).cpu(), hadamard_matrix(pow2 // 64).cpu()) < 0
    octets = negative.view(_MOST_FACTOR, -1, 8) << torch.arange(8, device="cpu")
    return octets.sum(-1).T.to(torch.uint8).contiguous().to(device)


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


def _tensor_core_plan(rows: torch.Tensor, order: int, pow2: int, width: int) -> tuple[int, int, int] | None:
    """The plan if the sm_90 transform serves these rows (order * pow2 elements each)."""
    if rows.dtype not in (torch.float16, torch.bfloat16) or not _is_hopper(rows.device.index):
        return None
    if width != order * pow2 or pow2 < 64 or not _aligned(rows):
        return None
    return plan_sm90(order, pow2)


def _aligned(rows: torch.Tensor) -> bool:
    return rows.data_ptr() % 16 == 0 and (rows.shape[0] == 1 or rows.stride(0) % 8 == 0)


def _heads_fit(rows: torch.Tensor, width: int, heads: int, head_dim: int) -> bool:
    """Whether the kernel for the transform across heads serves these rows."""
    if rows.dtype not in (torch.float16, torch.bfloat16) or width != heads * head_dim or not _aligned(rows):
        return False
    return heads <= _MAX_HEADS and head_dim % 32 == 0 and head_dim <= _MAX_HEAD_DIM


def heads_unavailable(rows: torch.Tensor, heads: int, head_dim: int) -> str | None:
    """Why the GEMM behind a transform across heads cannot make its codes itself (None when it can)."""
    if not _heads_fit(rows, rows.shape[1], heads, head_dim):
        return f"{heads} heads of {head_dim} are more than {_MAX_HEADS} of {_MAX_HEAD_DIM}, or no multiple of 32"
    # Each of 16 warps has 8 columns of 32 heads.
    if head_dim // 8 * (1 if heads <= 32 else 2) > 16 or heads * head_dim > 4096:
        return f"{heads} heads of {head_dim} are too many for the warps of a block"
    most = _most_rows_of_heads(heads, head_dim, _shared_bytes(rows.device.index))
    return f"{rows.shape[0]} rows are more than the {most} that shared memory holds" if rows.shape[0] > most else None


@functools.cache
def _shared_bytes(index: int) -> int:
    """Most shared memory of a block of a CUDA device: 227 KB on Hopper, 163 on sm_80, 99 on sm_86 and sm_89."""
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


@functools.cache
def _most_rows_of_heads(heads: int, head_dim: int, shared: int) -> int:
    return extension().hadamard_gemm_rows(heads, head_dim, shared)  # type: ignore[union-attr]


def bits_unavailable(gate_up: torch.Tensor, order: int, pow2: int, clip_over_qmax: float) -> str | None:
    """Why the GEMM behind SiLU and a transform cannot make the codes of the kernel here itself (None when it can)."""
    plan = _tensor_core_plan(gate_up, order, pow2, gate_up.shape[1] // 2)
    if plan is None or clip_over_qmax < _LEAST_CLIP:
        return f"the tensor-core transform does not serve {order} x {pow2}"
    m, _, tiles = plan
    return f"H_{m} over {tiles} x 64 columns is too large" if tiles > 1 or m > _MOST_FACTOR else None


def unavailable(x: torch.Tensor, width: int, order: int, pow2: int, inner: int, packed: bool) -> str | None:
    """Why no kernel serves these arguments (None when one does)."""
    if x.dtype not in DTYPE_CODES:
        return f"the kernels read fp16, bf16 or fp32, not {x.dtype}"
    if width > _MAX_WIDTH or width // (order * pow2 * inner) > _MAX_BLOCKS:
        return f"width {width} in {width // (order * pow2 * inner)} blocks is beyond the kernels"
    if packed and pow2 * inner % 2:
        return f"packed codes need an even pow2 * inner, got {pow2} * {inner}"
    return None


def identity_inner(width: int) -> int:
    """``inner`` with which a transform of order 1 x 1 moves through shared memory in few pieces."""
    return next(
        (width // blocks for blocks in range(1, _MAX_BLOCKS) if width % blocks == 0 and width // blocks <= 24576), 1
    )


def transform(rows: torch.Tensor, order: int, pow2: int, inner: int, out: torch.Tensor) -> None:
    """``out`` [M, width] contiguous = the transform of ``rows`` [M, width], M > 0."""
    width, unit = rows.shape[1], order * pow2
    ext = extension()
    assert ext is not None
    if inner == 1 and width > unit and rows.is_contiguous():  # the blocks of a row are rows as well
        rows = rows.view(-1, unit)
    plan = _tensor_core_plan(rows, order, pow2, rows.shape[1]) if inner == 1 else None
    with torch.cuda.device(rows.device):
        if plan is not None:
            table = factor_table(order, pow2, rows.device)
            ext.hadamard_sm90(
                plan,
                rows.data_ptr(),
                rows.dtype == torch.bfloat16,
                rows.stride(0),
                rows.shape[0],
                False,
                table.data_ptr(),
                out.data_ptr(),
                0,
                0.0,
                8,
                BYTES,
                stream(rows),
            )
            return
        ext.hadamard_any_size(
            rows.data_ptr(),
            DTYPE_CODES[rows.dtype],
            rows.stride(0),
            rows.shape[0],
            (rows.shape[1] // (unit * inner), order, pow2, inner),
            sign_table(order, rows.device).data_ptr() if order > 1 else 0,
            out.data_ptr(),
            stream(rows),
        )


def transform_quantize(
    rows: torch.Tensor,
    silu: bool,
    order: int,
    pow2: int,
    inner: int,
    rule: CodeRule,
    codes: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Codes and scale of the transform of ``rows`` [M, width], or silu(gate) * up of [M, 2 * width]; M > 0."""
    width = rows.shape[1] // 2 if silu else rows.shape[1]
    ext = extension()
    assert ext is not None
    plan = None if rule.layout == NIBBLES or inner > 1 else _tensor_core_plan(rows, order, pow2, width)
    if rule.clip_over_qmax < _LEAST_CLIP:
        plan = None
    quantiser = (rule.clip_over_qmax, rule.bits, rule.layout)
    with torch.cuda.device(rows.device):
        if plan is not None:
            table = factor_table(order, pow2, rows.device)
            ext.hadamard_sm90(
                plan,
                rows.data_ptr(),
                rows.dtype == torch.bfloat16,
                rows.stride(0),
                rows.shape[0],
                silu,
                table.data_ptr(),
                codes.data_ptr(),
                scale.data_ptr(),
                *quantiser,
                stream(rows),
            )
            return
        if _heads_fit(rows, width, order * pow2, inner) and not silu:
            ext.hadamard_heads_quantize(
                rows.data_ptr(),
                DTYPE_CODES[rows.dtype],
                rows.stride(0),
                rows.shape[0],
                order * pow2,
                inner,
                head_sign_table(order, pow2, rows.device).data_ptr(),
                codes.data_ptr(),
                scale.data_ptr(),
                *quantiser,
                stream(rows),
            )
            return
        ext.hadamard_quantize_any_size(
            rows.data_ptr(),
            DTYPE_CODES[rows.dtype],
            rows.stride(0),
            rows.shape[0],
            silu,
            (width // (order * pow2 * inner), order, pow2, inner),
            sign_table(order, rows.device).data_ptr() if order > 1 else 0,
            codes.data_ptr(),
            scale.data_ptr(),
            *quantiser,
            stream(rows),
        )
