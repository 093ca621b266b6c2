"""An invertible change of basis of a rotated model, as parameters: what :mod:`quarot.rotation.learned` learns.

Row vectors: activations are rows x, a weight acts as ``y = x W^T``. A refinement holds

* R [hidden, hidden], orthogonal, one for the model: the residual stream becomes ``x R``;
* P [kv_heads, head_dim, head_dim], invertible, one per layer: the values of head h become ``v P_h``. P is a rotation
  followed by a scale per channel;
* z [kv_heads, pairs], complex, one per layer: RoPE turns the channel pair (i, i + pairs) of a head as one complex
  number, so multiplying the keys' by z and the queries' by 1 / conj(z) commutes with it and cancels in their product.
  Where a norm sits between projection and RoPE (Qwen3) there are no such pairs;
* s [intermediate], positive, one per layer: the output of ``up`` is multiplied by it (``silu(gate) * up`` is linear in
  it), so that the input of ``down`` can be balanced before its online Hadamard transform mixes it.

With them the clip ratio of every layer's four activation quantisers is learned.

Everything is undone in the weight that reads it, so the model computes the same function and nothing is added at run
time. The identity is where learning starts: the random Hadamard rotation of :func:`quarot.rotate_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quarot.architectures import Geometry, Projection, architecture_of, decoder

SLOTS = ("attn_in", "attn_out", "mlp_in", "mlp_out")
_HALVINGS, _TERMS = 5, 6


class LayerMaps(NamedTuple):
    """The maps of one layer.

    Attributes:
        residual: R [hidden, hidden].
        values: P [kv_heads, head_dim, head_dim].
        outputs: its inverse, transposed, for the weight that reads the values.
        keys, queries: z and 1 / conj(z) as real and imaginary part, [2, kv_heads, pairs].
        up: s [intermediate].
    """

    residual: Tensor
    values: Tensor
    outputs: Tensor
    keys: Tensor
    queries: Tensor
    up: Tensor


class Refinement(nn.Module):
    """Parameters of the maps: generators of rotations, ``exp(A - A^T)``, and logarithms of scales; zero at the start.

    Args:
        sizes: of the model.
        clip: the clip ratio that learning starts from.
        device: of the parameters, fp32.
        pairs: channel pairs of a head that RoPE turns and that nothing but RoPE touches (:func:`rope_pairs`).
    """

    def __init__(self, sizes: Geometry, clip: float, device: torch.device, pairs: int = 0) -> None:
        super().__init__()
        layers, d = sizes.num_layers, sizes.head_dim
        self.residual = nn.Parameter(torch.zeros(sizes.hidden, sizes.hidden, device=device))
        self.values = nn.Parameter(torch.zeros(layers, sizes.kv_heads, d, d, device=device))
        self.value_scales = nn.Parameter(torch.zeros(layers, sizes.kv_heads, d, device=device))
        self.keys = nn.Parameter(torch.zeros(layers, 2, sizes.kv_heads, pairs, device=device))
        self.up = nn.Parameter(torch.zeros(layers, sizes.intermediate, device=device))
        self.clips = nn.Parameter(torch.full((layers, len(SLOTS)), clip, device=device))

    def clip(self, index: int, slot: str) -> float:
        """The learned clip ratio of the input of one slot of decoder layer ``index``."""
        return round(float(self.clips.detach()[index, SLOTS.index(slot)].clamp(0.05, 1.0)), 6)

    def maps(self) -> list[LayerMaps]:
        """The maps of every layer, with gradients."""
        return self._maps(rotation, lambda x: x)

    @torch.no_grad()
    def exact_maps(self) -> list[LayerMaps]:
        """The maps in float64, rotations orthogonal to the last bits."""
        return self._maps(lambda x: orthonormal(rotation(x)), Tensor.double)

    def _maps(self, turn: Callable[[Tensor], Tensor], cast: Callable[[Tensor], Tensor]) -> list[LayerMaps]:
        residual, values = turn(self.residual), turn(self.values)
        scales = cast(self.value_scales).exp()[:, :, None]
        size, angle = cast(self.keys).unbind(1)
        phase = torch.stack([angle.cos(), angle.sin()], dim=1)
        keys, queries = phase * size.exp()[:, None], phase * (-size).exp()[:, None]
        parts = values * scales, values / scales, keys, queries, cast(self.up).exp()
        return [LayerMaps(residual, *layer) for layer in zip(*parts, strict=True)]


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
        turned = maps.outputs.repeat_interleave(sizes.heads // sizes.kv_heads, 0)
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
        elif part in ("q", "k") and maps.keys.shape[-1]:
            block = _turned_pairs(block.unflatten(0, (-1, sizes.head_dim)), maps.keys if part == "k" else maps.queries)
        elif part == "up":
            block = block * maps.up[:, None]
        parts.append(block)
    return torch.cat(parts)


def _turned_pairs(heads: Tensor, factor: Tensor) -> Tensor:
    """Rows [heads, head_dim, K] with every pair times its factor [2, kv_heads, pairs]: [heads * head_dim, K]."""
    pairs = factor.shape[-1]
    real, imaginary = factor.repeat_interleave(len(heads) // factor.shape[1], 1)[..., None]
    a, b, rest = heads.split([pairs, pairs, heads.shape[1] - 2 * pairs], dim=1)
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real, rest], dim=1).flatten(0, 1)


def rope_pairs(model: nn.Module) -> int:
    """How many channel pairs (i, i + pairs) of a head RoPE turns right behind the projection; 0 with norms between.

    RoPE may leave the last channels of a head alone (Phi-3 of some sizes): its frequencies tell.
    """
    if architecture_of(model).head_norms:
        return 0
    return int(decoder(model).rotary_emb.inv_freq.numel())  # type: ignore[union-attr,operator]
