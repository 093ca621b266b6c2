"""Quantised models have no gradient, and say so, instead of the one that happens to flow through their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quarot import quantize_model, rotate_model
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.rtn import quantize_rtn

NOTHING: dict[str, Any] = {"w_bits": 16, "a_bits": 16, "k_bits": 16, "v_bits": 16}


@pytest.mark.parametrize("fields", [{}, {"a_group_size": 32}, {"a_bits": 8, "w_bits": 8}])
def test_a_quantised_layer_refuses_backward(fields: dict[str, Any]) -> None:
    config = QuarotConfig(**fields)
    linear = nn.Linear(64, 32)
    layer = QuantLinear.from_linear(linear, config, *quantize_rtn(linear.weight.detach(), config.w_bits))
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer(x.detach()))
    with pytest.raises(RuntimeError, match="QuantLinear has no gradient: quantised models are for inference"):
        y.sum().backward()


def test_unquantised_activations_have_a_gradient() -> None:
    linear = nn.Linear(64, 32)
    layer = QuantLinear.from_linear(linear, QuarotConfig(a_bits=16), *quantize_rtn(linear.weight.detach(), 4))
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(3, -1))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("fields", [{}, {**NOTHING, "k_bits": 4, "v_bits": 4}, {"k_bits": 16, "v_bits": 16}])
def test_a_quantised_model_refuses_backward(
    family: str, use_cache: bool, fields: dict[str, Any], tiny_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    model = tiny_model(family)
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False, **fields)
    model.train()
    out = model(token_ids, labels=token_ids, use_cache=use_cache)
    with torch.no_grad():
        assert torch.equal(model(token_ids, use_cache=use_cache).logits, out.logits)
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.loss.backward()
