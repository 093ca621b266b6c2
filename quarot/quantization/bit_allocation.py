"""Different weight bits for different layers under one budget: most bits where the loss asks for them.

A unit is a set of linear layers that keep equal bits: q, k and v, or gate and up, which run as one GEMM; the same
projection of all experts of a layer. For each unit and each width on offer the divergence on calibration windows is
measured with that unit alone rounded to nearest (:mod:`quarot.calibration.sensitivity`). Divergences of units add up
well enough while they are small, so what is left is a knapsack: start with the fewest bits everywhere, then buy the
steps that save most divergence per bit.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quarot.architectures import Architecture, decoder_layers
from quarot.calibration.sensitivity import divergences, rounded_weights
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import linear_weight
from quarot.quantization.progress_store import ProgressStore, kept
from quarot.quantization.stages import expert_stages, stages

logger = logging.getLogger("quarot")


@dataclass(frozen=True)
class Unit:
    """Linear layers of decoder layer ``layer``, by name in the model, that keep equal bits; ``size`` counts weights."""

    layer: int
    names: tuple[str, ...]
    size: int


def with_allocated_bits(
    model: Any,
    record: Architecture,
    config: QuarotConfig,
    configs: dict[str, QuarotConfig],
    windows: torch.Tensor,
    store: ProgressStore | None,
    progress: bool,
) -> QuarotConfig:
    """``config`` with ``w_bits`` overrides that meet its ``w_bits_budget``.

    Args:
        model: rotated, with its weights in place; unchanged afterwards.
        configs: settings of the linear layers to quantise, by name.
        windows: int64 [W, T] calibration tokens.
        store: keeps the measured divergences for a resumed run.

    Raises:
        ValueError: nothing to allocate.
    """
    budget = config.w_bits_budget
    assert budget is not None
    units = units_of(model, record, config, configs)
    if not units:
        raise ValueError(f"w_bits_budget={budget}: no layer is left whose bits could be chosen; drop it, or overrides")

    def measured() -> dict[str, torch.Tensor]:
        return {"divergence": weight_divergences(model, units, configs, config.w_bits_choices, windows, progress)}

    losses = kept(store, "bit_allocation", measured)["divergence"].tolist()
    sizes = [unit.size for unit in units]
    chosen = allocate(losses, sizes, config.w_bits_choices, budget)
    counts = Counter(chosen)
    average = sum(bits * size for bits, size in zip(chosen, sizes, strict=True)) / sum(sizes)
    shown = ", ".join(f"{counts[bits]} x {bits}" for bits in sorted(counts))
    logger.info("w_bits_budget=%g: %s bits for %d units, %.3f on average", budget, shown, len(units), average)
    overrides = dict(config.overrides)
    for unit, bits in zip(units, chosen, strict=True):
        for name in unit.names:
            if bits != configs[name].w_bits:
                overrides[re.escape(name)] = {**overrides.get(re.escape(name), {}), "w_bits": bits}
    return config.replace(overrides=overrides)


def weight_divergences(
    model: Any,
    units: Sequence[Unit],
    configs: dict[str, QuarotConfig],
    choices: Sequence[int],
    windows: torch.Tensor,
    progress: bool,
) -> torch.Tensor:
    """fp32 [units, choices]: what rounding each unit alone costs, whatever the method will be to nearest."""
    trials = [
        (unit.layer, functools.partial(rounded_weights, model, unit.names, configs, bits))
        for unit in units
        for bits in choices
    ]
    return divergences(model, trials, windows, progress).view(len(units), len(choices))


def units_of(
    model: nn.Module, record: Architecture, config: QuarotConfig, configs: dict[str, QuarotConfig]
) -> list[Unit]:
    """The units of a model: of the layers in ``configs`` with rounded weights whose bits no override fixes."""
    units = []
    for index, (prefix, layer) in enumerate(decoder_layers(model)):
        for stage in stages(record, layer) + expert_stages(record, layer):
            names = [f"{prefix}.{path}" for path in stage]
            names = [n for n in names if n in configs and configs[n].w_bits < 16]
            free = tuple(name for name in names if "w_bits" not in config.overridden(name))
            if free:
                size = sum(linear_weight(model.get_submodule(name)).numel() for name in free)
                units.append(Unit(index, free, size))
    return units


def allocate(
    losses: Sequence[Sequence[float]], sizes: Sequence[int], choices: Sequence[int], budget: float
) -> list[int]:
    """Bits of each unit such that the average over weights is at most ``budget``.

    Args:
        losses: of each unit at each choice.
        sizes: weights of each unit.
        choices: bits, rising.
        budget: average bits of a weight, the smallest choice at least.

    Greedy along the lower convex hull of each unit's losses: no other allocation that costs as many bits or fewer has
    a smaller sum, except that a step too large for what is left is passed over (and with it the unit's further ones).
    """
    left = budget * sum(sizes) - choices[0] * sum(sizes)
    steps = []
    for unit, (row, size) in enumerate(zip(losses, sizes, strict=True)):
        hull = _hull(choices, row)
        for a, b in itertools.pairwise(hull):
            cost = (choices[b] - choices[a]) * size
            steps.append(((row[a] - row[b]) / cost, unit, b, cost))
    at = [0] * len(sizes)
    closed: set[int] = set()
    for _, unit, b, cost in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if unit in closed or cost > left + 1e-6:
            closed.add(unit)
            continue
        at[unit], left = b, left - cost
    return [choices[index] for index in at]


def _hull(bits: Sequence[int], losses: Sequence[float]) -> list[int]:
    """Indices of the points on the lower convex hull, as long as the loss falls; the first point is always there."""
    hull = [0]
    for index in range(1, len(bits)):
        while len(hull) > 1 and _slope(bits, losses, hull[-2], hull[-1]) >= _slope(bits, losses, hull[-2], index):
            hull.pop()
        if losses[index] < losses[hull[-1]]:
            hull.append(index)
    return hull


def _slope(bits: Sequence[int], losses: Sequence[float], a: int, b: int) -> float:
    return (losses[b] - losses[a]) / (bits[b] - bits[a])
