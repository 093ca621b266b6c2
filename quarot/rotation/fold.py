"""Folding norm gains and rotations into weights: float64 arithmetic, one cast back, one weight at a time.

Derivation (column vectors, notation of :mod:`quarot.rotation.sites`): a layer that reads ``g * n`` (a norm's output),
with its input rotated by R, and whose own output is to be rotated by S, becomes

    W' = S (W diag(g)) R^T,    b' = S b,

so that ``W' (R n) + b' = S (W (g * n) + b)``. Row w of W therefore turns into ``R (w * g)``: the same map that
rotates an activation rotates a weight's rows, and its columns in the same way by S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quarot.rotation.orthogonal import Rotation

CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 24
"""Elements of a weight that are rotated at a time: 2 MiB of float64 stay in a core's cache (measured: 2^16 to 2^19 are
within 15 %, 2^22 twice as slow); on a GPU 128 MiB keep the number of launches small."""


def _lines(device: torch.device, length: int) -> int:
    """How many lines of ``length`` elements make a chunk."""
    return max(1, (CPU_CHUNK if device.type == "cpu" else GPU_CHUNK) // length)


def _rotate_rows(weight: torch.Tensor, rotation: Rotation) -> None:
    """``W <- W R^T`` in place, float64 [rows, columns]."""
    for rows in weight.split(_lines(weight.device, weight.shape[1])):
        rows.copy_(rotation(rows))


def _rotate_columns(weight: torch.Tensor, rotation: Rotation) -> None:
    """``W <- S W`` in place, float64 [rows, columns]."""
    for columns in weight.split(_lines(weight.device, weight.shape[0]), dim=1):
        columns.copy_(rotation(columns.T.contiguous()).T)


@torch.no_grad()
def fold_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gain: torch.Tensor | None = None,
    inputs: Sequence[Rotation] = (),
    outputs: Sequence[tuple[Rotation, slice]] = (),
    device: torch.device | str | None = None,
) -> None:
    """Fold a gain and rotations into one weight, in place.

    Args:
        weight: [rows, columns] in any floating dtype, on any device.
        bias: [rows], or None.
        gain: float64 [columns], multiplies the columns first.
        inputs: rotations R of what the layer reads, each undone on the input side, in this order.
        outputs: rotations S of what the layer writes, each with the rows that it covers.
        device: where to compute; None is where the weight is.
    """
    # Without an output side every row stands alone, so the float64 copy is a slice of the weight (embeddings, lm_head).
    place = torch.device(device or weight.device)
    step = weight.shape[0] if outputs else _lines(place, weight.shape[1])
    for part in weight.split(step):
        # Widened and narrowed where it is computed, so that what crosses a bus is the weight's own dtype.
        wide = part.to(place).to(torch.float64, copy=True)
        if gain is not None:
            wide *= gain.to(place)
        for rotation in inputs:
            _rotate_rows(wide, rotation)
        for rotation, rows in outputs:
            _rotate_columns(wide[rows], rotation)
        part.copy_(wide.to(part.dtype))
    if bias is not None:
        for rotation, rows in outputs:
            bias[rows] = rotation(bias[rows].to(torch.float64)).to(bias.dtype)


def norm_gain(norm: nn.Module, offset: float) -> torch.Tensor:
    """The gain of an RMSNorm, ``offset + weight``, in float64."""
    return offset + norm.weight.detach().to(torch.float64)


@torch.no_grad()
def neutralize_norm(norm: nn.Module, offset: float) -> None:
    """Set the gain of an RMSNorm to exactly 1."""
    norm.weight.fill_(1.0 - offset)


@torch.no_grad()
def untie_head(embedding: nn.Module, head: nn.Module) -> bool:
    """Give the head its own copy of a weight that it shares with the embedding; returns whether it did."""
    if head.weight is not embedding.weight and head.weight.data_ptr() != embedding.weight.data_ptr():
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
    return True
