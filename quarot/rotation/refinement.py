"""An invertible change of basis of a rotated model, as parameters: what :mod:`quarot.rotation.learned` learns.

Row vectors: activations are rows x, a weight acts as ``y = x W^T``. A refinement holds

* R [hidden, hidden], orthogonal, one for the model: the residual stream becomes ``x R``;
* P [kv_heads, head_dim, head_dim], orthogonal, one per layer: the values of head h become ``v P_h``;
* s [intermediate], positive, one per layer: the output of ``up`` is multiplied by it (``silu(gate) * up`` is linear in
  it), so that the input of ``down`` can be balanced before its online Hadamard transform mixes it.

With them the clip ratio of every layer's four activation quantisers is learned.

Everything is undone in the weight that reads it, so the model computes the same function and nothing is added at run
time. The identity is where learning starts: the random Hadamard rotation of :func:`quarot.rotate_model`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from quarot.architectures import Geometry, Projection

SLOTS = ("attn_in", "attn_out", "mlp_in", "mlp_out")
_HALVINGS, _TERMS = 5, 6


class LayerMaps(NamedTuple):
    """R [hidden, hidden], P [kv_heads, head_dim, head_dim] and s [intermediate] of one layer."""

    residual: Tensor
    values: Tensor
    up: Tensor


class Refinement(nn.Module):
    """Parameters of the maps: generators of rotations, ``exp(A - A^T)``, and logarithms of scales; zero at the start.

    Args:
        sizes: of the model.
        clip: the clip ratio that learning starts from.
        device: of the parameters, fp32.
    """

    def __init__(self, sizes: Geometry, clip: float, device: torch.device) -> None:
        super().__init__()
        layers, d = sizes.num_layers, sizes.head_dim
        self.residual = nn.Parameter(torch.zeros(sizes.hidden, sizes.hidden, device=device))
        self.values = nn.Parameter(torch.zeros(layers, sizes.kv_heads, d, d, device=device))
        self.up = nn.Parameter(torch.zeros(layers, sizes.intermediate, device=device))
        self.clips = nn.Parameter(torch.full((layers, len(SLOTS)), clip, device=device))

    def clip(self, index: int, slot: str) -> float:
        """The learned clip ratio of the input of one slot of decoder layer ``index``."""
        return round(float(self.clips.detach()[index, SLOTS.index(slot)].clamp(0.05, 1.0)), 6)

    def maps(self) -> list[LayerMaps]:
        """The maps of every layer, with gradients."""
        residual, values = rotation(self.residual), rotation(self.values)
        return [LayerMaps(residual, v, u) for v, u in zip(values, self.up.exp(), strict=True)]

    @torch.no_grad()
    def exact_maps(self) -> list[LayerMaps]:
        """The maps in float64, orthogonal to the last bits."""
        residual, values = orthonormal(rotation(self.residual)), orthonormal(rotation(self.values))
        return [LayerMaps(residual, v, u) for v, u in zip(values, self.up.double().exp(), strict=True)]


def rotation(generator: Tensor) -> Tensor:
    """``exp(A - A^T)`` of [..., n, n], by scaling and squaring: products only, so it records into a CUDA graph."""
    skew = (generator - generator.transpose(-1, -2)) / 2**_HALVINGS
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    power = identity
    for term in range(_TERMS, 0, -1):
        power = identity + skew @ power / term
    for _ in range(_HALVINGS):
        power = power @ power
    return power


def orthonormal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix in float64, [..., n, n]."""
    left, _, right = torch.linalg.svd(matrix.double())
    return left @ right


def refine(
    slot: str, projection: Projection, sizes: Geometry, weight: Tensor, bias: Tensor | None, maps: LayerMaps
) -> tuple[Tensor, Tensor | None]:
    """Weight [N, K] and bias [N] of one projection in the new basis; its online transform is not part of ``weight``.

    Args:
        slot: ``attn_in``, ``attn_out``, ``mlp_in`` or ``mlp_out``.
    """
    if slot in ("attn_in", "mlp_in"):
        weight = _refined_rows(projection, sizes, weight @ maps.residual, maps)
        bias = None if bias is None else _refined_rows(projection, sizes, bias[:, None], maps)[:, 0]
        return weight, bias
    if slot == "attn_out":
        heads = weight.unflatten(1, (sizes.heads, sizes.head_dim))
        turned = maps.values.repeat_interleave(sizes.heads // sizes.kv_heads, 0)
        weight = torch.einsum("nhd,hde->nhe", heads, turned).flatten(1)
    else:
        weight = weight / maps.up
    return maps.residual.T @ weight, None if bias is None else bias @ maps.residual


def _refined_rows(projection: Projection, sizes: Geometry, rows: Tensor, maps: LayerMaps) -> Tensor:
    """The output side of a projection that reads the residual stream: rows [N, K]."""
    parts = []
    for part in projection.parts:
        block = rows[sizes.row_slice(projection, part)]
        if part == "v":
            heads = block.unflatten(0, (sizes.kv_heads, sizes.head_dim))
            block = (maps.values.transpose(1, 2) @ heads).flatten(0, 1)
        elif part == "up":
            block = block * maps.up[:, None]
        parts.append(block)
    return torch.cat(parts)
