"""Turns the 3-D expert parameters of one decoder layer, or of a whole model, into lists of linear layers, and back."""

from __future__ import annotations

import torch
from torch import nn

from quarot.architectures import Architecture, architecture_of, decoder_layers, has_submodule
from quarot.nn.expert_list import ExpertList
from quarot.rotation.spec import HadamardSpec


def split_layer_experts(layer: nn.Module, record: Architecture, down_rotation: HadamardSpec | None = None) -> None:
    """Replace a layer's experts by an :class:`ExpertList` over the same storage; nothing where there are none to split.

    Args:
        layer: a decoder layer, in memory or on ``meta``.
        record: of its family.
        down_rotation: the online rotation that the down projections already hold the inverse of.
    """
    place = record.experts
    if place is None or not has_submodule(layer, place.module):
        return
    experts = layer.get_submodule(place.module)
    if not isinstance(experts, ExpertList):
        gate_up, down = experts.get_parameter(place.gate_up), experts.get_parameter(place.down)
        listed = ExpertList.from_parameters(gate_up, down, experts.act_fn, down_rotation)
        for name, parameter in ((place.gate_up, gate_up), (place.down, down)):
            setattr(experts, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
        listed.origin = (experts,)
        layer.set_submodule(place.module, listed.train(experts.training))


def split_experts(model: nn.Module) -> None:
    """:func:`split_layer_experts` for every decoder layer."""
    record = architecture_of(model)
    for _, layer in decoder_layers(model):
        split_layer_experts(layer, record)


@torch.no_grad()
def merge_experts(model: nn.Module) -> None:
    """Undo :func:`split_experts` where the experts are plain linear layers: only then do they load without quarot."""
    record = architecture_of(model)
    place = record.experts
    for _, layer in decoder_layers(model):
        if place is None or not has_submodule(layer, place.module):
            continue
        listed = layer.get_submodule(place.module)
        if not isinstance(listed, ExpertList) or any(type(m) is not nn.Linear for _, m, _ in listed.linears()):
            continue
        (experts,) = listed.origin
        for name, linears in ((place.gate_up, listed.gate_up), (place.down, listed.down)):
            stacked = torch.stack([linear.weight for linear in linears])  # type: ignore[misc]
            setattr(experts, name, nn.Parameter(stacked, requires_grad=False))
        layer.set_submodule(place.module, experts.train(listed.training))
