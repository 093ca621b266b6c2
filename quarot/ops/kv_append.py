"""Rotate, quantize and append keys and values to the packed pages (QuaRot section 3.2, KV cache quantization).

Per token, kv head and group of dims (asymmetric, two fp16 params), all in float32 with every operation rounded::

    mn, mx = min(x), max(x);  lo, hi = mn * clip, mx * clip
    mn == mx:  s = 0, b = fp16(mn), codes 0
    else:      s = fp16((hi - lo) / (2^bits - 1)), b = fp16(lo)          (saturated at 65504)
               code = clamp(rint((x - b) * (1 / s)), 0, 2^bits - 1)      (0 if s == 0)

and value = s * code + b. A group with a NaN gives s = b = NaN and codes 0. 16 bits: raw fp16 or bf16 (float32 is stored
as fp16). Keys are first rotated by R3, the Hadamard of head_dim, in float32 (:func:`rotate_heads` states the order of
the sums).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quarot.ops import registry
from quarot.ops.kv_layout import KVLayout, Side
from quarot.ops.quantize_per_token import DTYPE_CODES

_FP16_MAX = 65504.0


@functools.cache
def order_signs(order: int, device: torch.device) -> Tensor:
    """The +-1 matrix H_order, int8 [order, order]."""
    from quarot.rotation.hadamard import hadamard_matrix  # the rotation package imports ops: avoid the cycle

    return torch.as_tensor(hadamard_matrix(order), dtype=torch.int8).contiguous().to(device)


def check_rotation(order: int, pow2: int, head_dim: int) -> bool:
    """Whether to rotate; ValueError unless (order, pow2) is (0, 0) or multiplies to ``head_dim``."""
    if order == 0 and pow2 == 0:
        return False
    if order * pow2 != head_dim or pow2 & (pow2 - 1) or order < 1:
        raise ValueError(
            f"R3 of order {order} x {pow2} does not fit head_dim {head_dim}: "
            f"order * 2^k must equal it, or 0, 0 for none"
        )
    return True


def rotate_heads(x: Tensor, order: int, pow2: int) -> Tensor:
    """``F.linear(x, kron(H_order, H_pow2)) / sqrt(order * pow2)`` over the last dim, in x's dtype (fp32 or fp64).

    The sums are ordered as the kernels do them, so that results are bit-equal: butterflies of distance 1, 2, 4, ..
    within each run of ``pow2``, then the rows of H_order summed left to right, then the scale.
    """
    shape = x.shape
    for distance in (1 << k for k in range(pow2.bit_length() - 1)):
        pair = x.reshape(-1, 2, distance)
        x = torch.stack((pair[:, 0] + pair[:, 1], pair[:, 0] - pair[:, 1]), dim=1)
    if order > 1:
        signs = order_signs(order, x.device).to(x.dtype)
        runs = x.reshape(-1, order, pow2)
        total = signs[:, :1] * runs[:, :1]
        for j in range(1, order):
            total = total + signs[:, j : j + 1] * runs[:, j : j + 1]
        x = total
    return x.reshape(shape) * torch.tensor((order * pow2) ** -0.5, dtype=x.dtype, device=x.device)


def quantize_groups(x: Tensor, bits: int, group: int, clip: float) -> tuple[Tensor, Tensor]:
    """Quantize [.., D]: (uint8 codes [.., D], fp16 params [.., D/group, 2]) by the rule at the top of this file."""
    groups = x.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    factor = torch.tensor(clip, dtype=torch.float32, device=x.device)
    # Divided by a tensor: CUDA's division by a Python number multiplies by the reciprocal instead.
    levels = torch.tensor(float(2**bits - 1), device=x.device)
    lo, hi = low * factor, high * factor
    scale = ((hi - lo) / levels).clamp(-_FP16_MAX, _FP16_MAX).half()
    constant = low == high
    scale = torch.where(constant, torch.zeros_like(scale), scale)
    # + 0 turns -0 into 0: which zero a minimum is depends on the order.
    offset = (torch.where(constant, low, lo) + 0.0).clamp(-_FP16_MAX, _FP16_MAX).half()
    inverse = scale.float().reciprocal()[..., None]
    codes = ((groups - offset.float()[..., None]) * inverse).round().clamp(0, 2**bits - 1)
    codes = torch.where((scale > 0)[..., None], codes, torch.zeros_like(codes)).to(torch.uint8)
    return codes.flatten(-2), torch.stack((scale, offset), dim=-1)


def _store(layout: KVLayout, pool: Tensor, slots: Tensor, side: Side, x: Tensor, clip: float) -> None:
    if layout.bits(side) == 16:
        raw = x if x.dtype in (torch.float16, torch.bfloat16) else x.clamp(-_FP16_MAX, _FP16_MAX).half()
        layout.write(pool, slots, side, raw.contiguous(), None)
    else:
        layout.write(pool, slots, side, *quantize_groups(x, layout.bits(side), layout.group(side), clip))


def check_rows(pool: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Raise ValueError unless key and value are [T, kv_heads, D] and slots int64 [T], all on the pool's device."""
    if key.dim() != 3 or key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"kv_append: key {key.dtype} {tuple(key.shape)} and value {value.dtype} {tuple(value.shape)} must both be "
            f"[tokens, kv_heads, head_dim] of one dtype"
        )
    if key.shape[1] != pool.shape[1]:
        raise ValueError(f"kv_append: {key.shape[1]} kv heads for a pool of {pool.shape[1]}")
    if slots.dtype != torch.int64 or slots.shape != key.shape[:1]:
        raise ValueError(f"kv_append: slots must be int64 [{key.shape[0]}], got {slots.dtype} {tuple(slots.shape)}")
    if len({pool.device, key.device, value.device, slots.device}) > 1:
        raise ValueError(
            f"kv_append: pool on {pool.device}, key {key.device}, value {value.device}, slots {slots.device}"
        )


def _reference(
    pool: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    key_clip: float,
    value_clip: float,
    rotate_order: int,
    rotate_pow2: int,
) -> None:
    layout = KVLayout(key.shape[-1], key_bits, value_bits, key_group, value_group)
    layout.check_pool(pool)
    check_rows(pool, key, value, slots)
    kept = slots >= 0
    key, value, slots = key[kept], value[kept], slots[kept]
    if check_rotation(rotate_order, rotate_pow2, layout.head_dim):
        rotated = rotate_heads(key.float(), rotate_order, rotate_pow2)
        key = rotated.to(key.dtype) if key_bits == 16 else rotated
    _store(layout, pool, slots, "key", key, key_clip)
    _store(layout, pool, slots, "value", value, value_clip)


def _fake(pool: Tensor, *args: object) -> None:
    return None


def _rows(x: Tensor) -> Tensor:
    """``x`` with unit stride in the last dim and rows aligned to 16 bytes, copied only if it is not so already."""
    vector = 16 // x.element_size()
    if x.stride(2) == 1 and x.stride(0) % vector == 0 and x.stride(1) % vector == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.contiguous()


def launch(
    pool: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int,
    key_clip: float,
    value_clip: float,
    rotate_order: int,
    rotate_pow2: int,
    generic: bool = False,
) -> None:
    """Launch csrc/kv_cache/kv_append.cu; ``generic`` forces the kernel that serves every format (tests)."""
    layout = KVLayout(key.shape[-1], key_bits, value_bits, key_group, value_group)
    layout.check_pool(pool)
    check_rows(pool, key, value, slots)
    rotate = check_rotation(rotate_order, rotate_pow2, layout.head_dim)
    if key.shape[0] == 0:
        return
    key, value, slots = _rows(key), _rows(value), slots.contiguous()
    signs = order_signs(rotate_order, key.device).data_ptr() if rotate and rotate_order > 1 else 0
    with torch.cuda.device(pool.device):
        registry.extension().kv_append(  # type: ignore[union-attr]
            pool.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            slots.data_ptr(),
            signs,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            layout.head_dim,
            key_bits,
            value_bits,
            layout.key_group,
            layout.value_group,
            DTYPE_CODES[key.dtype],
            key.shape[0],
            key.shape[1],
            pool.shape[0],
            pool.shape[2],
            key_clip,
            value_clip,
            rotate_order,
            rotate_pow2,
            generic,
            registry.stream(pool),
        )


def _available(pool: Tensor, key: Tensor, *args: object) -> str | None:
    return None if key.dtype in DTYPE_CODES else f"no kernel for {key.dtype}"


kv_append = registry.define_op(
    "kv_append",
    "(Tensor(a!) pool, Tensor key, Tensor value, Tensor slots, int key_bits, int value_bits, int key_group, "
    "int value_group, float key_clip, float value_clip, int rotate_order, int rotate_pow2) -> ()",
    reference=_reference,
    fake=_fake,
    cuda=launch,
    available=_available,
)
kv_append.__doc__ = """Append tokens to the pages of ``pool`` in place.

Args:
    pool: uint8 [num_pages, kv_heads, page_size/16, block_bytes] (:class:`quarot.ops.kv_layout.KVLayout`), contiguous.
    key, value: fp16, bf16 or fp32 [T, kv_heads, head_dim], keys after RoPE.
    slots: int64 [T], page * page_size + offset; negative = do not write. No slot twice.
    key_bits, value_bits, key_group, value_group: the format of the pool.
    key_clip, value_clip: shrink the range of a group (the paper: 0.95).
    rotate_order, rotate_pow2: R3 on the keys, order * pow2 == head_dim; 0, 0 = none.
"""
