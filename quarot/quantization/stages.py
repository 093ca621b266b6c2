"""The order in which a decoder layer is quantised: linear layers that share an input go together, front to back."""

from __future__ import annotations

from torch import nn

from quarot.architectures import Architecture, has_submodule
from quarot.config import QuarotConfig
from quarot.nn.expert_list import ExpertList

Stage = tuple[str, ...]
"""Paths, inside a decoder layer, of linear layers with one common input."""


def stages(record: Architecture, layer: nn.Module) -> list[Stage]:
    """``(q, k, v), (o,), (gate, up), (down,)`` of one layer, or their fused forms; those of an expert one by one."""
    paths = [tuple(p.path for p in group if has_submodule(layer, p.path)) for group in record.slots.values()]
    if record.experts is not None and has_submodule(layer, record.experts.module):
        experts = layer.get_submodule(record.experts.module)
        if isinstance(experts, ExpertList):
            paths += [(f"{record.experts.module}.{path}",) for path, _, _ in experts.linears()]
    return [stage for stage in paths if stage]


def same_grid(stage: Stage, configs: dict[str, QuarotConfig]) -> list[Stage]:
    """Parts of a stage that one call can quantise stacked along their outputs: equal weight settings."""
    parts: dict[tuple[object, ...], list[str]] = {}
    for path in stage:
        c = configs[path]
        parts.setdefault((c.w_bits, c.w_method, c.w_symmetric, c.w_group_size, c.w_clip), []).append(path)
    return [tuple(paths) for paths in parts.values()]
