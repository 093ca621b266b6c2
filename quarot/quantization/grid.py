"""The integer grid of a weight: codes, scales, zeros, and the linear search for the scale (paper, section 5).

N outputs, K inputs, G groups of K/G inputs (G = 1: one scale per output channel). Codes are signed and centred:

    symmetric    value = scale * code              code in -2^(b-1) .. 2^(b-1)-1,  scale = ratio * max|w| / (2^(b-1)-1)
    asymmetric   value = scale * (code - zero)     same codes,  scale = ratio * (max - min) / (2^b - 1),  integer zero

Codes are ``rint(w / scale)`` (half to even) in fp32, clamped. Ranges always contain zero, so zero is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GRID_STEPS = 100
"""Clip ratios tried are ``1 - i / GRID_STEPS`` for the first ``GRID_DEPTH`` values of i."""
GRID_DEPTH = 80
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Weights searched at once: what stays in a core's cache, and what keeps a GPU busy."""


class QuantizedWeight(NamedTuple):
    """``codes`` int8 [N, K]; ``scale`` and ``zero`` (None when symmetric) fp32, [N] per channel or [N, G]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """fp32 [N, K]."""
        return dequantize(self.codes, self.scale, self.zero)


class Grid(NamedTuple):
    """Scales and zeros by group, both fp32 [N, G]; ``zero`` is None when symmetric."""

    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Codes (as fp32) of ``values`` [N, ...] that broadcast against [N, G]."""
        codes = (values / self.scale).masked_fill_(self.scale <= 0, 0.0).round_()
        if self.zero is not None:
            codes += self.zero
        half = 2 ** (self.bits - 1)
        return codes.clamp_(-half, half - 1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """fp32 values of codes; inverse of :meth:`encode` up to rounding."""
        return self.scale * (codes if self.zero is None else codes - self.zero)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """``scale * (codes - zero)`` in fp32, [N, K], for scales per channel [N] or per group [N, G]."""
    n, k = codes.shape
    groups = scale.reshape(n, -1, 1)
    values = codes.float().view(n, groups.shape[1], -1)
    return (groups * (values if zero is None else values - zero.reshape(n, -1, 1))).view(n, k)


def as_groups(weight: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """[N, K] -> [N, G, K/G] view; one group without a group size.

    Raises:
        ValueError: the group size does not divide K.
    """
    n, k = weight.shape
    size = k if group_size is None else group_size
    if k % size:
        raise ValueError(f"weight group size {size} does not divide the {k} inputs; choose a divisor, or None for none")
    return weight.reshape(n, k // size, size)


def find_grid(
    weight: torch.Tensor,
    bits: int,
    *,
    symmetric: bool = True,
    group_size: int | None = None,
    search: bool = True,
    importance: torch.Tensor | None = None,
) -> Grid:
    """Scales (and zeros) of an fp32 weight [N, K].

    Args:
        weight: fp32 [N, K].
        bits: 2-8.
        symmetric: see the module.
        group_size: inputs that share a scale; None = one scale per output channel.
        search: try clip ratios 1.00, 0.99, ... and keep for every scale the one of least squared error; without it the
            ratio is 1.
        importance: non-negative [K]; weighs the squared error of each input (a Hessian diagonal), uniform when None.

    Channels are searched many at once, in chunks of rows that bound the memory (64 MiB on a GPU, times two).
    """
    groups = as_groups(weight, group_size)
    rows = max(1, _CHUNK_ELEMENTS.get(weight.device.type, 1 << 17) // max(1, weight.shape[1]))
    factors = None if importance is None else importance.reshape(groups.shape[1:])
    parts = [_find(part, bits, symmetric, search, factors) for part in groups.split(rows)]
    scale = torch.cat([part.scale for part in parts])
    zeros = [part.zero for part in parts if part.zero is not None]
    return Grid(scale, torch.cat(zeros) if zeros else None, bits)


def _find(values: torch.Tensor, bits: int, symmetric: bool, search: bool, factors: torch.Tensor | None) -> Grid:
    low, high = values.amin(-1).clamp_max(0), values.amax(-1).clamp_min(0)
    best = _at_ratio(low, high, 1.0, bits, symmetric)
    if not search:
        return best
    work = torch.empty_like(values)
    least = _error(values, best, factors, work)
    for step in range(1, GRID_DEPTH):
        trial = _at_ratio(low, high, 1.0 - step / GRID_STEPS, bits, symmetric)
        error = _error(values, trial, factors, work)
        better = error < least
        least = torch.where(better, error, least)
        zero = None if trial.zero is None or best.zero is None else torch.where(better, trial.zero, best.zero)
        best = Grid(torch.where(better, trial.scale, best.scale), zero, bits)
    return best


def _at_ratio(low: torch.Tensor, high: torch.Tensor, ratio: float, bits: int, symmetric: bool) -> Grid:
    half = 2 ** (bits - 1)
    if symmetric:
        return Grid(torch.maximum(-low, high) * ratio / (half - 1), None, bits)
    scale = (high - low) * ratio / (2 * half - 1)
    zero = (-low * ratio / scale).masked_fill_(scale <= 0, 0.0).round_() - half
    return Grid(scale, zero, bits)


def _error(values: torch.Tensor, grid: Grid, factors: torch.Tensor | None, work: torch.Tensor) -> torch.Tensor:
    """Squared error of each scale, [N, G]; ``work`` is like ``values`` [N, G, K/G], so that nothing is allocated."""
    half = 2 ** (grid.bits - 1)
    scale, zero = grid.scale[..., None], None if grid.zero is None else grid.zero[..., None]
    torch.mul(values, scale.reciprocal().masked_fill_(scale <= 0, 0.0), out=work)
    if zero is None:
        work.round_().clamp_(-half, half - 1)
    else:
        work.round_().add_(zero).clamp_(-half, half - 1).sub_(zero)
    work.mul_(scale).sub_(values).square_()
    return work.sum(-1) if factors is None else work.mul_(factors).sum(-1)
