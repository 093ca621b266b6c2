"""Turns a plain model on the meta device into the module tree that a quarot checkpoint was saved from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quarot.architectures import geometry, linear_modules
from quarot.config import QuarotConfig
from quarot.nn.kv_format import check_cache
from quarot.nn.quant_linear import QuantLinear, run_time
from quarot.nn.rotated_linear import RotatedLinear
from quarot.nn.split_experts import split_experts
from quarot.rotation.plan import RotationPlan
from quarot.rotation.spec import HadamardSpec


def plan_of(config: QuarotConfig) -> RotationPlan | None:
    """The rotation plan recorded in a configuration."""
    return None if config.rotation is None else RotationPlan.from_dict(config.rotation)


def input_rotation(plan: RotationPlan | None, role: str) -> HadamardSpec | None:
    """The online transform in front of a linear layer of this role (:class:`quarot.architectures.Projection`)."""
    if plan is None:
        return None
    by_role = {"o": plan.attn_out_input, "down": plan.mlp_out_input, "expert_down": plan.expert_out_input}
    return by_role.get(role)


def prepare(model: nn.Module, config: QuarotConfig, dtype: torch.dtype | None = None) -> None:
    """Replace linear layers by the empty :class:`QuantLinear` or :class:`RotatedLinear` that ``config`` describes.

    Args:
        model: a freshly built model (its values are lost where modules are replaced), usually on ``meta``.
        config: of the checkpoint that will be loaded.
        dtype: of unquantised weights and biases; None keeps that of the layer replaced.

    Raises:
        NotImplementedError: a model family quarot does not know.
        ValueError: ``config`` does not fit the model.
    """
    plan = plan_of(config)
    sizes = geometry(model)
    check_cache(config, sizes.num_layers, sizes.head_dim)
    if config.rounds_linears or (plan is not None and plan.expert_out_input is not None):
        split_experts(model)
    for name, linear, role in list(linear_modules(model)):
        replacement = _replacement(name, linear, config, input_rotation(plan, role), dtype)
        if replacement is not None:
            model.set_submodule(name, replacement.train(linear.training))


def _replacement(
    name: str, linear: nn.Module, config: QuarotConfig, rotation: HadamardSpec | None, dtype: torch.dtype | None
) -> nn.Module | None:
    assert isinstance(linear, nn.Linear)
    own = config.for_module(name)
    bias, device = linear.bias is not None, linear.weight.device
    kind = dtype or linear.weight.dtype
    quantized = not config.ignores(name) and min(own.w_bits, own.a_bits) < 16
    sizes: Any = (linear.in_features, linear.out_features, bias)
    if quantized:
        return QuantLinear(*sizes, **run_time(own), input_rotation=rotation, dtype=kind, device=device)
    return None if rotation is None else RotatedLinear(*sizes, input_rotation=rotation, dtype=kind, device=device)
