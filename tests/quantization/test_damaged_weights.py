"""Weights that are no numbers are named before anything is rotated or quantised, whatever they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quarot import quantize_model, rotate_model

NAMES = ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"]


@pytest.mark.parametrize("name", [*NAMES, "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_damaged_weights_are_named(name: str, value: float, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = value
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        quantize_model(model, w_method="rtn", progress=False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("act", [rotate_model, lambda model: quantize_model(model, w_method="rtn", progress=False)])
def test_eight_bit_floats_are_refused(
    dtype: torch.dtype, act: Callable[[Any], Any], tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=f"up_proj.weight is {dtype}, codes .* in bfloat16 first"):
        act(model)
