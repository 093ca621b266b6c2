"""Round to nearest: every weight to the closest point of its grid, no calibration (paper, section 5.4 and table 3)."""

from __future__ import annotations

import torch

from quarot.quantization.grid import Grid, QuantizedWeight, as_groups, find_grid


def quantize_rtn(
    weight: torch.Tensor,
    bits: int,
    *,
    symmetric: bool = True,
    group_size: int | None = None,
    search: bool = True,
    norm: float = 2.0,
) -> QuantizedWeight:
    """Codes and scales of a weight [N, K]; see :func:`quarot.quantization.grid.find_grid` for the arguments."""
    weight = weight.float()
    grid = find_grid(weight, bits, symmetric=symmetric, group_size=group_size, search=search, norm=norm)
    return round_to_grid(weight, grid)


def round_to_grid(weight: torch.Tensor, grid: Grid) -> QuantizedWeight:
    """The codes of fp32 [N, K] on a grid of [N, G] scales."""
    values = as_groups(weight, weight.shape[1] // grid.scale.shape[1])
    wide = Grid(grid.scale[..., None], None if grid.zero is None else grid.zero[..., None], grid.bits)
    return finished(wide.encode(values).reshape(weight.shape), grid)


def positions(weight: torch.Tensor, result: QuantizedWeight) -> torch.Tensor:
    """Where fp32 weights [N, K] lie among the codes of their grid, before rounding: ``w / scale (+ zero)``."""
    scale = result.scale.reshape(weight.shape[0], -1, 1)
    values = weight.view(weight.shape[0], scale.shape[1], -1)
    found = (values / scale).masked_fill_(scale <= 0, 0.0)
    return (found if result.zero is None else found + result.zero.view_as(scale)).view_as(weight)


def finished(codes: torch.Tensor, grid: Grid) -> QuantizedWeight:
    """fp32 codes and their grid as stored: int8 codes, scales [N] when there is one group."""
    scale, zero = grid.scale, grid.zero
    if scale.shape[1] == 1:
        scale, zero = scale.squeeze(1), None if zero is None else zero.squeeze(1)
    return QuantizedWeight(codes.to(torch.int8), scale.contiguous(), zero)
