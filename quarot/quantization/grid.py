"""The integer grid of a weight: codes, scales, zeros, and the linear search for the scale (paper, section 5).

N outputs, K inputs, G groups of K/G inputs (G = 1: one scale per output channel). Codes are signed and centred:

    symmetric    value = scale * code              code in -2^(b-1) .. 2^(b-1)-1,  scale = ratio * max|w| / (2^(b-1)-1)
    asymmetric   value = scale * (code - zero)     same codes,  scale = ratio * (max - min) / (2^b - 1),  integer zero

Codes are ``rint(w / scale)`` (half to even) in fp32, clamped. Ranges always contain zero, so zero is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quarot.config import QuarotConfig

GRID_STEPS = 100
"""Clip ratios tried are ``1 - i / GRID_STEPS`` for the first ``GRID_DEPTH`` values of i."""
GRID_DEPTH = 80
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Weights times ratios searched at once: what stays in a core's cache, and what keeps a GPU busy."""
_RATIOS_AT_ONCE = 16
"""Clip ratios that one set of kernels tries, at most: small weights cost little but launches."""


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


def grid_options(config: QuarotConfig) -> dict[str, Any]:
    """What a layer's configuration says of its grid, as :func:`find_grid` takes it."""
    return {
        "symmetric": config.w_symmetric,
        "group_size": config.w_group_size,
        "search": config.w_clip,
        "norm": config.w_clip_norm,
    }


def find_grid(
    weight: torch.Tensor,
    bits: int,
    *,
    symmetric: bool = True,
    group_size: int | None = None,
    search: bool = True,
    norm: float = 2.0,
    importance: torch.Tensor | None = None,
) -> Grid:
    """Scales (and zeros) of an fp32 weight [N, K].

    Args:
        weight: fp32 [N, K].
        bits: 2-8.
        symmetric: see the module.
        group_size: inputs that share a scale; None = one scale per output channel.
        search: try clip ratios 1.00, 0.99, ... and keep for every scale the one of least error; without it the ratio
            is 1.
        norm: the error is the sum of ``|error| ** norm``; above 2 clipped weights count more than rounded ones.
        importance: non-negative [K]; weighs the error of each input (a Hessian diagonal), uniform when None.

    Channels are searched many at once, in chunks of rows that bound the memory (64 MiB on a GPU, times two).
    """
    groups = as_groups(weight, group_size)
    depth, most = (GRID_DEPTH if search else 1), _CHUNK_ELEMENTS.get(weight.device.type, 1 << 17)
    at_once = max(1, min(_RATIOS_AT_ONCE, depth, most // max(1, weight.numel())))
    rows = max(1, most // max(1, weight.shape[1] * at_once))
    factors = None if importance is None else importance.reshape(groups.shape[1:])
    ratios = 1.0 - torch.arange(depth, dtype=torch.float64) / GRID_STEPS
    tried = [part.float().to(weight.device)[:, None, None] for part in ratios.split(at_once)]
    parts = [_find(part, bits, symmetric, tried, norm, factors) for part in groups.split(rows)]
    scale = torch.cat([part.scale for part in parts])
    zeros = [part.zero for part in parts if part.zero is not None]
    return Grid(scale, torch.cat(zeros) if zeros else None, bits)


def _find(
    values: torch.Tensor,
    bits: int,
    symmetric: bool,
    ratios: list[torch.Tensor],
    norm: float,
    factors: torch.Tensor | None,
) -> Grid:
    """The best grid of [N, G, K/G] values over ``ratios``, [R, 1, 1] each; of equal errors the first ratio wins."""
    low, high = values.amin(-1).clamp_max(0), values.amax(-1).clamp_min(0)
    if sum(len(some) for some in ratios) == 1:
        return _first(_at_ratios(low, high, ratios[0], bits, symmetric))
    work = values.new_empty(len(ratios[0]), *values.shape)
    best: Grid | None = None
    least = values.new_full(low.shape, torch.inf)
    for some in ratios:
        trials = _at_ratios(low, high, some, bits, symmetric)
        error, index = _errors(values, trials, norm, factors, work[: len(some)]).min(0, keepdim=True)
        zero = None if trials.zero is None else trials.zero.gather(0, index)[0]
        found = Grid(trials.scale.gather(0, index)[0], zero, bits)
        best = found if best is None else _where(error[0] < least, found, best)
        least = torch.minimum(least, error[0])
    assert best is not None
    return best


def _where(better: torch.Tensor, a: Grid, b: Grid) -> Grid:
    zero = None if a.zero is None or b.zero is None else torch.where(better, a.zero, b.zero)
    return Grid(torch.where(better, a.scale, b.scale), zero, a.bits)


def _first(grids: Grid) -> Grid:
    return Grid(grids.scale[0], None if grids.zero is None else grids.zero[0], grids.bits)


def _at_ratios(low: torch.Tensor, high: torch.Tensor, ratios: torch.Tensor, bits: int, symmetric: bool) -> Grid:
    """Grids [R, N, G] of ranges [N, G] at clip ratios [R, 1, 1]."""
    half = 2 ** (bits - 1)
    if symmetric:
        return Grid(torch.maximum(-low, high) * ratios / (half - 1), None, bits)
    scale = (high - low) * ratios / (2 * half - 1)
    zero = (-low * ratios / scale).masked_fill_(scale <= 0, 0.0).round_() - half
    return Grid(scale, zero, bits)


def _errors(
    values: torch.Tensor, grid: Grid, norm: float, factors: torch.Tensor | None, work: torch.Tensor
) -> torch.Tensor:
    """Error of each scale, [R, N, G]; ``work`` is [R, N, G, K/G], so that nothing is allocated."""
    half = 2 ** (grid.bits - 1)
    scale, zero = grid.scale[..., None], None if grid.zero is None else grid.zero[..., None]
    torch.mul(values, scale.reciprocal().masked_fill_(scale <= 0, 0.0), out=work)
    if zero is None:
        work.round_().clamp_(-half, half - 1)
    else:
        work.round_().add_(zero).clamp_(-half, half - 1).sub_(zero)
    work.mul_(scale).sub_(values)
    if norm == 2:
        work.square_()
    else:  # pow, which takes seven times as long on a CPU
        work.abs_().log_().mul_(norm).exp_()
    return work.sum(-1) if factors is None else work.mul_(factors).sum(-1)
