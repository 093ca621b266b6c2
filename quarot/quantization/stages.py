"""The order in which a decoder layer is quantised: linear layers that share an input go together, front to back."""

from __future__ import annotations

from torch import nn

from quarot.architectures import Architecture, has_submodule
from quarot.config import QuarotConfig
from quarot.nn.expert_list import ExpertList

Stage = tuple[str, ...]
"""Paths, inside a decoder layer, of linear layers with one common input."""


def stages(record: Architecture, layer: nn.Module) -> list[Stage]:
    """``(q, k, v), (o,), (gate, up), (down,)`` of one layer, or their fused forms; experts are not among them."""
    paths = [tuple(p.path for p in group if has_submodule(layer, p.path)) for group in record.slots.values()]
    return [stage for stage in paths if stage]


def expert_stages(record: Architecture, layer: nn.Module) -> list[Stage]:
    """All experts' gate-up projections, then all down projections: each path has an input of its own."""
    if record.experts is None or not has_submodule(layer, record.experts.module):
        return []
    experts = layer.get_submodule(record.experts.module)
    if not isinstance(experts, ExpertList):
        return []
    named = [(f"{record.experts.module}.{path}", role) for path, _, role in experts.linears()]
    return [tuple(path for path, role in named if role == wanted) for wanted in ("expert_gate_up", "expert_down")]


def has_experts(record: Architecture, layer: nn.Module) -> bool:
    """Whether a decoder layer is a mixture of experts, split into linear layers yet or not."""
    return record.experts is not None and has_submodule(layer, record.experts.module)


def same_grid(stage: Stage, configs: dict[str, QuarotConfig]) -> list[Stage]:
    """Parts of a stage that one call can quantise stacked along their outputs: equal weight settings."""
    parts: dict[tuple[object, ...], list[str]] = {}
    for path in stage:
        c = configs[path]
        parts.setdefault((c.w_bits, c.w_method, c.w_symmetric, c.w_group_size, c.w_clip, c.w_clip_norm), []).append(
            path
        )
    return [tuple(paths) for paths in parts.values()]
