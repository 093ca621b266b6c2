"""Applies the rotations of a plan to the ends of a model and to one decoder layer, as the table of sites says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from quarot.architectures import Architecture, Geometry, has_submodule
from quarot.nn.rotated_linear import RotatedLinear
from quarot.nn.split_experts import split_layer_experts
from quarot.rotation.fold import fold_weight, neutralize_norm, norm_gain
from quarot.rotation.orthogonal import Rotation
from quarot.rotation.plan import RotationPlan
from quarot.rotation.sites import rotations_at

Rotations = dict[str, Rotation]
"""By name in :data:`quarot.rotation.sites.SITES`; a rotation that is switched off is not there."""


def _named(rotations: Rotations, place: str, slot: str) -> list[Rotation]:
    return [rotations[name] for name in rotations_at(place, slot) if name in rotations]


def rotate_ends(
    model: nn.Module, record: Architecture, rotations: Rotations, device: torch.device | str | None = None
) -> None:
    """The embedding, whose rows are outputs, and the head with the final norm in front of it."""
    embed, head, norm = (model.get_submodule(path) for path in (record.embed, record.lm_head, record.final_norm))
    fold_weight(embed.weight, inputs=_named(rotations, "output", "embed"), device=device)
    gain = norm_gain(norm, record.norm_gain_offset)
    fold_weight(head.weight, gain=gain, inputs=_named(rotations, "input", "lm_head"), device=device)
    neutralize_norm(norm, record.norm_gain_offset)


def rotate_layer(
    layer: nn.Module,
    record: Architecture,
    sizes: Geometry,
    rotations: Rotations,
    device: torch.device | str | None = None,
) -> None:
    """Fold both norms and every rotation into the weights of one decoder layer."""
    offset = record.norm_gain_offset
    attn_norm, mlp_norm = layer.get_submodule(record.attn_norm), layer.get_submodule(record.mlp_norm)
    gains = {"attn_in": norm_gain(attn_norm, offset)}
    gains |= dict.fromkeys(("mlp_in", "router", "expert_in"), norm_gain(mlp_norm, offset))
    for slot, values, weight, bias in _weights(layer, record, sizes):
        outputs = [(rotation, slice(None)) for rotation in _named(rotations, "output", slot)]
        if values is not None:
            outputs += [(rotation, values) for rotation in _named(rotations, "output", "v")]
        inputs = _named(rotations, "input", slot)
        fold_weight(weight, bias, gain=gains.get(slot), inputs=inputs, outputs=outputs, device=device)
    neutralize_norm(attn_norm, offset)
    neutralize_norm(mlp_norm, offset)


def _weights(
    layer: nn.Module, record: Architecture, sizes: Geometry
) -> Iterator[tuple[str, slice | None, torch.Tensor, torch.Tensor | None]]:
    """Slot, rows that hold values, weight [rows, columns] and bias of everything in a layer that is multiplied with."""
    for slot, projections in record.slots.items():
        for projection in projections:
            if has_submodule(layer, projection.path):
                linear = cast(nn.Linear, layer.get_submodule(projection.path))
                values = sizes.row_slice(projection, "v") if "v" in projection.parts else None
                yield slot, values, linear.weight, linear.bias
    if record.experts is not None and has_submodule(layer, record.experts.module):
        yield "router", None, layer.get_submodule(record.experts.router).weight, None
        experts = layer.get_submodule(record.experts.module)
        for name, slot in ((record.experts.gate_up, "expert_in"), (record.experts.down, "expert_out")):
            for weight in experts.get_parameter(name).detach():
                yield slot, None, weight, None


def insert_online(layer: nn.Module, record: Architecture, plan: RotationPlan) -> None:
    """Replace the modules whose input is rotated at run time."""
    for path, spec in ((record.attn_out.path, plan.attn_out_input), (record.mlp_out.path, plan.mlp_out_input)):
        if spec is not None and has_submodule(layer, path):
            linear = cast(nn.Linear, layer.get_submodule(path))
            layer.set_submodule(path, RotatedLinear.from_linear(linear, spec))
    if plan.expert_out_input is not None:
        split_layer_experts(layer, record, plan.expert_out_input)
