"""Online Hadamard transforms as plain matrix products: gradients pass through, and a GPU is fast at them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from quarot.rotation.hadamard import hadamard_matrix
from quarot.rotation.spec import HadamardSpec

_DENSE = 4096
"""Blocks up to this width are one matrix product; wider ones are two, of a Kronecker factor each."""
_RIGHT = 256


@functools.lru_cache(maxsize=16)
def dense_matrix(spec: HadamardSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One block H of the transform, [width, width]: a row x becomes ``x H^T``."""
    signs = _kron(hadamard_matrix(spec.order), hadamard_matrix(spec.pow2))
    wide = torch.kron(signs, torch.eye(spec.inner, dtype=torch.float64))
    return (wide / (spec.order * spec.pow2) ** 0.5).to(device, dtype)


@functools.lru_cache(maxsize=16)
def _factors(spec: HadamardSpec, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    right = min(spec.pow2, _RIGHT)
    left = _kron(hadamard_matrix(spec.order), hadamard_matrix(spec.pow2 // right))
    signs = hadamard_matrix(right).to(torch.float64)
    return (left / left.shape[0] ** 0.5).to(device, dtype), (signs / right**0.5).to(device, dtype)


def _kron(left: Tensor, right: Tensor) -> Tensor:
    return torch.kron(left.to(torch.float64), right.to(torch.float64))


def transform(x: Tensor, spec: HadamardSpec | None) -> Tensor:
    """The online transform of x [..., size]; None: x itself. Under autocast in autocast's dtype, else in that of x."""
    if spec is None:
        return x
    width = spec.order * spec.pow2 * spec.inner
    if width <= _DENSE or spec.inner > 1:
        return _rows_times(x, dense_matrix(spec, x.dtype, x.device))
    left, right = _factors(spec, x.dtype, x.device)
    rows = F.linear(x.unflatten(-1, (-1, left.shape[0], right.shape[0])), right)
    return F.linear(rows.transpose(-1, -2), left).transpose(-1, -2).flatten(-3)


def undo_transform(x: Tensor, spec: HadamardSpec | None) -> Tensor:
    """The inverse of :func:`transform`; for weights, ``W H^T -> W``."""
    if spec is None:
        return x
    if spec.inner == 1 and spec.order * spec.pow2 > _DENSE:
        left, right = _factors(spec, x.dtype, x.device)
        rows = F.linear(x.unflatten(-1, (-1, left.shape[0], right.shape[0])), right.T)
        return F.linear(rows.transpose(-1, -2), left.T).transpose(-1, -2).flatten(-3)
    return _rows_times(x, dense_matrix(spec, x.dtype, x.device).T)


def _rows_times(x: Tensor, matrix: Tensor) -> Tensor:
    """Every block of x [..., n * width] times the matrix.

    As one product of rows: of a strided x of several dimensions (the heads of a query) PyTorch makes a batch of
    one-row products, ten times slower.
    """
    return F.linear(x.reshape(-1, matrix.shape[1]), matrix).view(x.shape)
