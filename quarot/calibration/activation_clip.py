"""The constant clip ratio of a layer's activations, chosen by the error it makes in the layer's output."""

from __future__ import annotations

import torch

from quarot.calibration.fake_quantize import fake_quantize
from quarot.precision import tf32

RATIOS = tuple(1.0 - 0.025 * step for step in range(21))
MOST_TOKENS = 8192


@tf32(False)
def search_activation_clip(x: torch.Tensor, weight: torch.Tensor, bits: int, group_size: int | None) -> float:
    """The ratio in 1.0, 0.975 .. 0.5 of least ``|(x - quantised x) W^T|^2``.

    Args:
        x: [..., K] inputs after the online rotation, not quantised; at most ``MOST_TOKENS`` evenly spaced ones count.
        weight: [N, K].
        bits, group_size: of the activation quantiser.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    rows = rows[:: max(1, rows.shape[0] // MOST_TOKENS)]
    # |e W^T|^2 = e (W^T W) e^T, and W^T W is the smaller factor for stacked projections.
    gram = weight.float().T @ weight.float()
    errors = []
    for ratio in RATIOS:
        e = fake_quantize(rows, bits, ratio, group_size) - rows
        errors.append(((e @ gram) * e).sum())
    return RATIOS[int(torch.stack(errors).argmin())]
