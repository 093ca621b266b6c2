"""One decoder layer on fused ops: nothing elementwise is left between the integer GEMMs.

    residual + delta -> RMSNorm -> codes -> qkv -> RoPE (-> R3 -> cache) -> attention -> (heads Hadamard ->) codes -> o
    residual + delta -> RMSNorm -> codes -> gate_up -> SiLU * up (-> R4) -> codes -> down

A sum is left to the norm behind it, also the one that ends a layer, which takes and returns ``(residual, delta)``; for
a few rows o and down add it themselves, and delta is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quarot.architectures import Architecture, has_submodule
from quarot.nn.expert_stack import ExpertStack
from quarot.ops.rope import rope
from quarot.runtime.fused_experts import FusedExperts
from quarot.runtime.fused_mlp import FusedMlp
from quarot.runtime.linear_group import LinearGroup

MLP_TOKENS = 16384
"""Tokens that go through an MLP at once: gate and up of a 7B are 700 MB for so many. Tokens do not influence each
other there, and results do not depend on their number, so a longer prompt gives the same bits."""

Attend = Callable[["FusedLayer", Tensor], Tensor]
"""Stores the keys and values in qkv [M, (Hq + 2 Hkv) D] and returns the attention output [M, Hq * D]."""


class FusedLayer:
    """The parts of a decoder layer that the fused path needs, resolved once.

    Raises:
        NotImplementedError: the layer has a part the fused ops do not know; the message says which.
    """

    def __init__(self, layer: nn.Module, architecture: Architecture, config: Any, num_heads: tuple[int, int]) -> None:
        self.attention = layer.get_submodule(architecture.attention)
        self.attn_norm = layer.get_submodule(architecture.attn_norm)
        self.mlp_norm = layer.get_submodule(architecture.mlp_norm)
        self.qkv = _group(layer, [p.path for p in architecture.attn_in])
        self.o = _group(layer, [architecture.attn_out.path])
        self.mlp = _mlp(layer, architecture)
        self.heads, self.kv_heads = num_heads
        self.head_dim = self.o.first.in_features // self.heads
        self.scaling = float(self.attention.scaling)  # type: ignore[arg-type]
        window = getattr(self.attention, "sliding_window", getattr(config, "sliding_window", None))
        if not hasattr(self.attention, "sliding_window") and getattr(config, "use_sliding_window", True) is False:
            window = None
        self.window: int = window or 0  # type: ignore[assignment]
        self.uses_rope = bool(getattr(self.attention, "use_rope", True))
        self.head_norms = [self.attention.get_submodule(path.rpartition(".")[2]) for path in architecture.head_norms]
        self.index = int(self.attention.layer_idx)  # type: ignore[arg-type]
        for norm in (self.attn_norm, self.mlp_norm):
            if norm.weight.is_meta:  # type: ignore[union-attr]
                raise NotImplementedError("weights are offloaded")
            if bool((norm.weight != 1).any()):  # type: ignore[operator]
                raise NotImplementedError("an RMSNorm gain is not folded; call rotate_model before quantize_model")

    def groups(self) -> tuple[LinearGroup | ExpertStack, ...]:
        """All joined linear layers."""
        return self.qkv, self.o, *self.mlp.groups()

    def forward(self, residual: Tensor, delta: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """[M, hidden] residual stream, and what is still to be added to it, through the layer."""
        residual, qkv = self._norm_project(residual, delta, self.attn_norm, self.qkv)
        residual, delta = self.o.after_rotation(attend(self, qkv), residual)
        if residual.shape[0] <= MLP_TOKENS:
            return self._mlp(residual, delta)
        assert delta is not None  # so many rows are not a few
        total = torch.empty_like(residual)
        pieces = -(-residual.shape[0] // MLP_TOKENS)  # of nearly equal size: none has few rows
        for rows in zip(*(t.tensor_split(pieces) for t in (residual, delta, total)), strict=True):
            some, change, place = rows
            summed, out = self._mlp(some, change)
            place.copy_(summed)
            assert out is not None
            change.copy_(out)  # nobody else has what o_proj returned
        return total, delta

    def _mlp(self, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x, other = (residual, None) if delta is None else (delta, residual)
        return self.mlp.after_norm(x, other, norm_eps(self.mlp_norm))

    def rotate_positions(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """RoPE (after the head norms, where the family has them) on the queries and keys in qkv, in place."""
        if self.uses_rope or self.head_norms:
            gains, eps = self.norm_arguments()
            rope(qkv, *self.positions(cos, sin), self.heads, self.kv_heads, self.head_dim, *gains, eps)

    def positions(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The tables of this layer: one row that rotates nothing where the layer has no RoPE (SmolLM3)."""
        return (cos, sin) if self.uses_rope else (torch.ones_like(cos[:1]), torch.zeros_like(sin[:1]))

    def norm_arguments(self) -> tuple[tuple[Tensor | None, Tensor | None], float]:
        """Gains of the query and key norms, and their epsilon."""
        if not self.head_norms:
            return (None, None), 0.0
        q_norm, k_norm = self.head_norms
        return (q_norm.weight.data, k_norm.weight.data), norm_eps(q_norm)  # type: ignore[return-value]

    def split(self, qkv: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views q [B, Hq, T, D], k and v [B, Hkv, T, D] of qkv [B * T, ..]."""
        heads = qkv.view(batch, -1, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def _norm_project(
        self, residual: Tensor, delta: Tensor | None, norm: nn.Module, linear: LinearGroup
    ) -> tuple[Tensor, Tensor]:
        x, other = (residual, None) if delta is None else (delta, residual)
        out, total = linear.after_norm(x, other, norm_eps(norm))
        return total, out


def _mlp(layer: nn.Module, architecture: Architecture) -> FusedMlp | FusedExperts:
    if architecture.experts is not None and has_submodule(layer, architecture.experts.module):
        return FusedExperts(layer, architecture.experts)
    down = _group(layer, [architecture.mlp_out.path])
    return FusedMlp(_group(layer, [p.path for p in architecture.mlp_in]), down)


def _group(layer: nn.Module, paths: list[str]) -> LinearGroup:
    if not all(has_submodule(layer, path) for path in paths):
        raise NotImplementedError(f"{type(layer).__name__} has no {', '.join(paths)}")
    members = [layer.get_submodule(path) for path in paths]
    reason = LinearGroup.reason(members)
    if reason is not None:
        raise NotImplementedError(f"{', '.join(paths)}: {reason}")
    return LinearGroup(members)  # type: ignore[arg-type]


def norm_eps(norm: nn.Module) -> float:
    """Epsilon of an RMSNorm of any family."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
