"""GPTQ (Frantar et al., 2022): round one input column after another and let the columns behind it absorb the error.

N outputs, K inputs; H [K, K] = mean over calibration tokens of ``x x^T``, x the layer's input exactly as at run time.
The layer-wise loss ``sum_n (w_n - q_n)^T H (w_n - q_n)`` is minimised greedily. With U the upper factor of the inverse,
``H^-1 = U^T U``, rounding column i with error ``e = (w_i - q_i) / U_ii`` changes the columns behind it by ``-e U_i,j``.

U needs one Cholesky factorisation: with J the reversal of the order, ``J H J = L L^T`` gives ``H = R R^T`` for the
upper triangular ``R = J L J``, hence ``U = R^-1``. (The usual route factorises, inverts and factorises again.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quarot.config import QuarotConfig
from quarot.precision import tf32
from quarot.quantization.gptq_block import rounder
from quarot.quantization.grid import Grid, QuantizedWeight, as_groups, find_grid, grid_options
from quarot.quantization.rtn import finished

logger = logging.getLogger("quarot")

_LARGEST_DAMPING = 1e6
_STACKED_WEIGHTS = 1 << 26
"""Weights times factors that are rounded at once, at most: small layers cost little but launches."""
SCALE_FACTORS = (1.0, 0.95, 1.05, 0.9, 1.1, 0.85, 1.15, 0.8, 1.2, 0.75, 0.7)
"""Factors on the scales of the clip search that GPTQ itself is asked about (``gptq_clip_search``)."""


def gptq_options(config: QuarotConfig) -> dict[str, Any]:
    """What a layer's configuration says of :func:`quantize_gptq`."""
    return {
        **grid_options(config),
        "damping": config.gptq_damping,
        "act_order": config.gptq_act_order,
        "block_size": config.gptq_block_size,
        "weigh_search": config.gptq_weighted_clip,
        "factors": SCALE_FACTORS if config.gptq_clip_search else (1.0,),
    }


@tf32(False)
def quantize_gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    *,
    symmetric: bool = True,
    group_size: int | None = None,
    search: bool = True,
    norm: float = 2.0,
    damping: float = 0.01,
    act_order: bool = False,
    block_size: int = 128,
    weigh_search: bool = False,
    factors: Sequence[float] = (1.0,),
    latent: torch.Tensor | None = None,
    name: str = "weight",
) -> QuantizedWeight:
    """Codes and scales of a weight [N, K] for inputs of second moment ``hessian`` [K, K].

    Rows do not influence each other, so layers that share an input may be stacked along N and quantised in one call.

    Args:
        weight: [N, K], any float dtype; not changed.
        hessian: [K, K], symmetric positive semi-definite; not changed.
        bits, symmetric, group_size, search, norm: the grid, see :func:`quarot.quantization.grid.find_grid`.
        damping: fraction of the mean diagonal that is added to it; grows tenfold until the factorisation succeeds.
        act_order: round the columns in the order of falling diagonal of H. Codes come back in the original order.
        block_size: columns between two updates of everything behind them (speed, not results).
        weigh_search: weigh the clip search by the diagonal of H instead of uniformly.
        factors: on the scales of an output. All are tried, and each output keeps the one with which GPTQ itself ends at
            the least loss (of the damped H), the first of equals.
        latent: fp32 [N, K], filled with the weights as they were when they were rounded, in units of their scale (with
            the zero added): where tuning starts from.
        name: of the layer, for messages.

    Inputs that calibration never saw active (zero diagonal) are rounded to nearest, influence nothing, and do not count
    in the scales of the others. Scales of groups: with ``act_order`` from the original weights (static groups), without
    it from the weights as they are when their first column is reached.

    Raises:
        ValueError: the Hessian or the weight is not finite, or the group size does not divide K.
    """
    weight = weight.float()
    check_finite(weight, hessian, name)
    k = weight.shape[1]
    diagonal = hessian.diagonal().float()
    dead = diagonal <= 0
    size = as_groups(weight, group_size).shape[-1]
    # A group without any live input takes its scale from all of them.
    unseen = dead & ~dead.view(-1, size).all(1).repeat_interleave(size)

    def grid_of(columns: torch.Tensor, start: int) -> Grid:
        part = slice(start, start + columns.shape[1])
        importance = diagonal[part] if weigh_search else None
        seen = columns.masked_fill(unseen[part], 0)
        grid: dict[str, Any] = {"symmetric": symmetric, "group_size": size, "search": search, "norm": norm}
        return find_grid(seen, bits, **grid, importance=importance)

    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
    static = grid_of(weight, 0) if act_order or size == k else None
    if order is not None:
        weight, hessian = weight[:, order], hessian[order][:, order]
    column_group = (torch.arange(k, device=weight.device) if order is None else order) // size
    walk = _Walk(weight, inverse_factor(hessian, damping, name), bits, symmetric, column_group, size, block_size)
    at_once = max(1, _STACKED_WEIGHTS // max(1, weight.numel()))
    runs = (
        walk.run(factors[i : i + at_once], static, grid_of, latent is not None) for i in range(0, len(factors), at_once)
    )
    best = next(runs)
    for other in runs:
        best.keep_better(other)
    back = slice(None) if order is None else torch.argsort(order)
    if latent is not None and best.latent is not None:
        latent.copy_(best.latent[:, back])
    return finished(best.codes[:, back], best.grid)


@dataclass
class _Rounded:
    """Where one walk over the columns ended: fp32 ``codes`` and ``latent`` [N, K], and the loss of each output [N]."""

    codes: torch.Tensor
    grid: Grid
    latent: torch.Tensor | None
    loss: torch.Tensor

    def best_of(self, trials: int) -> _Rounded:
        """Of ``trials`` weights stacked along N the best outputs, the first of equals."""
        if trials == 1:
            return self
        n = len(self.loss) // trials
        index = self.loss.view(trials, n).argmin(0) * n + torch.arange(n, device=self.loss.device)
        zero = None if self.grid.zero is None else self.grid.zero[index]
        latent = None if self.latent is None else self.latent[index]
        return _Rounded(self.codes[index], Grid(self.grid.scale[index], zero, self.grid.bits), latent, self.loss[index])

    def keep_better(self, other: _Rounded) -> None:
        """Take over the outputs that the other walk served better."""
        rows = other.loss < self.loss
        pairs = [(self.codes, other.codes), (self.grid.scale, other.grid.scale), (self.grid.zero, other.grid.zero)]
        for mine, its in (*pairs, (self.latent, other.latent), (self.loss, other.loss)):
            if mine is not None and its is not None:
                mine[rows] = its[rows]


@dataclass(frozen=True)
class _Walk:
    """Rounds the columns of a weight, block by block, in the order in which they stand.

    Attributes:
        weight: fp32 [N, K]; not changed.
        upper: of :func:`inverse_factor`.
        column_group: int64 [K], the group of each column; ``size`` columns share one.
    """

    weight: torch.Tensor
    upper: torch.Tensor
    bits: int
    symmetric: bool
    column_group: torch.Tensor
    size: int
    block_size: int

    def run(
        self,
        factors: Sequence[float],
        static: Grid | None,
        grid_of: Callable[[torch.Tensor, int], Grid],
        keep_latent: bool,
    ) -> _Rounded:
        """One walk over copies of the weight, one for each of ``factors`` on its scales, and the best of each output.

        Args:
            static: the grid of all groups; None: of each group when its first column is reached.
            grid_of: finds the grid of columns as they are now, given the first one's index.
            keep_latent: also return the weights as they were when they were rounded, in units of their scale.
        """
        weight = self.weight.repeat(len(factors), 1)
        n, k = weight.shape
        column = torch.tensor(factors, device=weight.device).repeat_interleave(n // len(factors))[:, None]
        scales = weight.new_zeros(n, k // self.size)
        grid = Grid(scales, None if self.symmetric else scales.clone(), self.bits)
        if static is not None:
            zeros = None if static.zero is None else static.zero.repeat(len(factors), 1)
            _set(grid, slice(None), static.scale.repeat(len(factors), 1) * column, zeros)
        codes, loss = torch.empty_like(weight), weight.new_zeros(n)
        latent = torch.empty_like(weight) if keep_latent else None
        start = 0
        while start < k:
            end = min(start + self.block_size, k)
            if static is None:
                end = min(end, (start // self.size + 1) * self.size)
                if start % self.size == 0:
                    fresh = grid_of(weight[:, start : start + self.size], start)
                    _set(grid, slice(start // self.size, start // self.size + 1), fresh.scale * column, fresh.zero)
            columns = self.column_group[start:end]
            scale, zero = grid.scale[:, columns].T, None if grid.zero is None else grid.zero[:, columns].T
            rounded = rounder(end - start, n, self.bits, self.symmetric, weight.device)
            block, errors, before = rounded(weight[:, start:end].T, self.upper[start:end, start:end], scale, zero)
            codes[:, start:end] = block.T
            loss += errors.square().sum(0)
            if latent is not None:
                exact = before if zero is None else before + zero * scale
                latent[:, start:end] = (exact / scale).masked_fill_(scale <= 0, 0.0).T
            weight[:, end:] -= errors.T @ self.upper[start:end, end:]
            start = end
        return _Rounded(codes, grid, latent, loss).best_of(len(factors))


def _set(grid: Grid, groups: slice, scale: torch.Tensor, zero: torch.Tensor | None) -> None:
    """Write the scales and zeros of some groups."""
    grid.scale[:, groups] = scale
    if grid.zero is not None and zero is not None:
        grid.zero[:, groups] = zero


def inverse_factor(hessian: torch.Tensor, damping: float, name: str = "weight") -> torch.Tensor:
    """Upper triangular fp32 U with ``U^T U = (H + damping * mean(diag) * I)^-1``; factorised in fp64.

    Inputs with a zero diagonal get a one there. The damping grows tenfold, with a warning, until the factor exists.
    """
    diagonal = hessian.diagonal().double()
    dead = diagonal <= 0
    live = (~dead).sum().clamp_min(1)
    mean = diagonal.masked_fill(dead, 0.0).sum() / live
    mean = mean.masked_fill(mean <= 0, 1.0)
    ones = dead.double()
    fraction = damping
    while True:
        damped = hessian.flip(0, 1).double()  # one fp64 matrix at a time: of a 70B's down_proj each is 6.6 GB
        damped.diagonal().add_((ones + fraction * mean).flip(0))
        factor, info = torch.linalg.cholesky_ex(damped)
        del damped
        if int(info) == 0 and bool(factor.diagonal().isfinite().all()):
            break
        fraction *= 10
        if fraction > _LARGEST_DAMPING:
            raise ValueError(
                f"{name}: the GPTQ Hessian cannot be factorised at any damping; check the calibration text"
            )
        logger.warning("%s: the GPTQ Hessian is not positive definite; damping raised to %g", name, fraction)
    factor = factor.flip(0, 1)
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, identity, upper=True).float()


def check_finite(weight: torch.Tensor, hessian: torch.Tensor | None, name: str) -> None:
    """Raise a ValueError that names the layer when its weight or Hessian holds NaN or inf."""
    if not bool(weight.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise ValueError(f"{name}: {bad} of {weight.numel()} weights are NaN or inf; the checkpoint is damaged")
    if hessian is not None and not bool(hessian.isfinite().all()):
        raise ValueError(f"{name}: its calibration inputs hold NaN or inf (fp16 overflow? try bfloat16 or float32)")
