"""Op ``hadamard``: the structured, orthonormal Hadamard transform of the last dimension, in O(d (order + log d)).

Notation: ``d = blocks * order * pow2 * inner`` is the last dimension; H_m is :func:`hadamard_matrix` of order m.
"""

from __future__ import annotations

import functools

import torch

from quarot.ops import fast_hadamard, hadamard_launch
from quarot.ops.quantize_per_token import as_rows
from quarot.ops.registry import define_op
from quarot.precision import tf32
from quarot.rotation.hadamard import hadamard_matrix, hadamard_spec
from quarot.rotation.spec import HadamardSpec

_RADIX = 64
"""Sylvester factors go through matmuls of at most this order: on a CPU 3-5x faster than butterflies."""


@functools.lru_cache(maxsize=64)
def _scaled_matrix(order: int, scale: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (hadamard_matrix(order).to(torch.float64) * scale).to(device=device, dtype=dtype)


def check_shape(x: torch.Tensor, order: int, pow2: int, inner: int) -> None:
    """Raise unless x is floating point and its last dimension a multiple of ``order * pow2 * inner``."""
    if not x.is_floating_point() or x.itemsize < 2:
        raise TypeError(f"hadamard: x must be floating point of 16 bits or more, got {x.dtype}")
    if x.dim() == 0 or min(order, pow2, inner) < 1 or pow2 & (pow2 - 1) or x.shape[-1] % (order * pow2 * inner):
        raise ValueError(
            f"hadamard: the last dimension of x {tuple(x.shape)} must be a multiple of "
            f"order {order} * pow2 {pow2} * inner {inner}, with pow2 a power of two"
        )


def hadamard_reference(x: torch.Tensor, order: int, pow2: int, inner: int) -> torch.Tensor:
    """``F.linear(x, I_blocks (x) H_order (x) H_pow2 (x) I_inner) / sqrt(order * pow2)``, without building the matrix.

    Args:
        x: [..., d] fp16, bf16, fp32 or fp64, any strides.
        order, pow2: orders of the dense +-1 factor and of the Sylvester factor.
        inner: width of the identity on the inside (head_dim for the transform across heads, else 1).

    Returns:
        [..., d] in the dtype of x, contiguous, never an alias of x. Computed in the wider of fp32 and that, cast once.

    Raises:
        ValueError: d is not a multiple of ``order * pow2 * inner``, or pow2 is no power of two.
        TypeError: x is not floating point.
    """
    check_shape(x, order, pow2, inner)
    if x.numel() == 0 or order * pow2 == 1:
        return x.clone(memory_format=torch.contiguous_format)
    y = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    scale, stride = (order * pow2) ** -0.5, inner
    while pow2 * order > 1:
        radix = min(pow2, _RADIX) if pow2 > 1 else order
        pow2, order = (pow2 // radix, order) if pow2 > 1 else (1, 1)
        factor = _scaled_matrix(radix, scale, y.dtype, y.device)
        with tf32(False):
            y = y.view(-1, radix) @ factor.T if stride == 1 else torch.matmul(factor, y.view(-1, radix, stride))
        scale, stride = 1.0, stride * radix
    return y.view(x.shape).to(x.dtype)


def _fake(x: torch.Tensor, order: int, pow2: int, inner: int) -> torch.Tensor:
    check_shape(x, order, pow2, inner)
    return x.new_empty(x.shape)


def _available(x: torch.Tensor, order: int, pow2: int, inner: int) -> str | None:
    check_shape(x, order, pow2, inner)
    return hadamard_launch.unavailable(x, x.shape[-1], order, pow2, inner, packed=False)


def _cuda(x: torch.Tensor, order: int, pow2: int, inner: int) -> torch.Tensor:
    """Launches csrc/hadamard: the tensor-core transform where it serves, else the one for any size."""
    if x.numel() == 0 or order * pow2 == 1:
        return x.clone(memory_format=torch.contiguous_format)
    if fast_hadamard.selected() and fast_hadamard.serves(order, pow2, inner):
        return fast_hadamard.transform(x, order, pow2)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hadamard_launch.transform(as_rows(x), order, pow2, inner, out)
    return out


def _gradient(grad: torch.Tensor, order: int, pow2: int, inner: int) -> torch.Tensor:
    return transposed_hadamard(grad, order, pow2, inner)


def _transposed_reference(x: torch.Tensor, order: int, pow2: int, inner: int) -> torch.Tensor:
    """``x H``, where :func:`hadamard_reference` is ``x H^T``; same shapes and rounding.

    A Sylvester factor is its own transpose (and has a kernel); the dense one is multiplied by as it is.
    """
    check_shape(x, order, pow2, inner)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = hadamard(wide, 1, pow2, inner)
    if order > 1:
        factor = _scaled_matrix(order, order**-0.5, wide.dtype, wide.device)
        with tf32(False):
            y = torch.matmul(factor.T, y.view(-1, order, pow2 * inner)).view(x.shape)
    return y.to(x.dtype)


hadamard = define_op(
    "hadamard",
    "(Tensor x, int order, int pow2, int inner) -> Tensor",
    reference=hadamard_reference,
    fake=_fake,
    cuda=_cuda,
    available=_available,
    gradient=_gradient,
)

transposed_hadamard = define_op(
    "transposed_hadamard",
    "(Tensor x, int order, int pow2, int inner) -> Tensor",
    reference=_transposed_reference,
    fake=_fake,
    gradient=hadamard,
)
"""The inverse of :func:`hadamard`, and its gradient."""


def hadamard_transform(x: torch.Tensor, spec: HadamardSpec | None = None) -> torch.Tensor:
    """The orthonormal Hadamard transform of the last dimension of x; ``spec`` None takes the cheapest full-width one.

    Equivalent to ``F.linear(x, H)`` with the orthogonal H that ``spec`` describes. Shapes, dtypes and rounding as in
    :func:`hadamard_reference`.

    Raises:
        TypeError: not a tensor, or not a spec.
        ValueError: x has no dimension, no full-width transform of the last one exists, or ``spec`` is for another size.
    """
    if not isinstance(x, torch.Tensor) or not (spec is None or isinstance(spec, HadamardSpec)):
        raise TypeError(f"hadamard_transform takes a tensor and a HadamardSpec or None, not {x!r} and {spec!r}")
    if x.dim() == 0:
        raise ValueError("hadamard_transform: x is a scalar tensor; it needs a dimension to transform")
    width = x.shape[-1]
    if spec is None:
        spec = hadamard_spec(width)
        if spec is None:
            raise ValueError(
                f"hadamard_transform: a width of {width} has no full Hadamard transform; "
                f"pass spec=quarot.rotation.hadamard.block_hadamard_spec({width}) for a block-diagonal one"
            )
    if spec.size != width:
        raise ValueError(f"hadamard_transform: spec {spec} is for a width of {spec.size}, x is {tuple(x.shape)}")
    return hadamard(x, spec.order, spec.pow2, spec.inner)
