"""Tuning brings the quantised model closer to the full-precision one, also on tokens it has not seen."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quarot.architectures import linear_modules
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.quantize_model import quantize_model
from quarot.tuning.attention import quantized_attention
from quarot.tuning.tune import _states, _trainable

Divergences = Callable[[nn.Module, nn.Module], tuple[float, float]]


@pytest.mark.parametrize(
    "fields", [{}, {"w_symmetric": False, "w_group_size": 32, "a_bits": 8}, {"w_method": "rtn"}], ids=str
)
def test_tuning_helps(
    rotated: nn.Module, fields: dict[str, Any], quantize: Callable[..., Any], divergences: Divergences
) -> None:
    plain = quantize(copy.deepcopy(rotated), **fields)
    tuned = quantize(copy.deepcopy(rotated), tune_steps=60, tune_learning_rate=0.01, **fields)
    (seen, unseen), (plain_seen, plain_unseen) = divergences(tuned, rotated), divergences(plain, rotated)
    assert seen < 0.85 * plain_seen
    assert unseen < plain_unseen
    assert sum(p.numel() * p.element_size() for p in tuned.parameters()) == sum(
        p.numel() * p.element_size() for p in plain.parameters()
    )
    assert not any(p.grad is not None for p in tuned.parameters())


@pytest.mark.parametrize("fields", [{}, {"kv_bits_by_layer": [[2, 8], [8, 2]]}], ids=["one cache", "cache by layer"])
def test_what_is_trained_is_what_runs(
    rotated: nn.Module, fields: dict[str, Any], quantize: Callable[..., Any], unseen: torch.Tensor
) -> None:
    """The trainable model's hidden states are the integer model's, but for single values on a rounding edge."""
    model = quantize(copy.deepcopy(rotated), **fields)
    with torch.no_grad():
        integer = _states(model, unseen)
        with _trainable(model, {}), quantized_attention(model, model.config.quantization_config):
            trained = _states(model, unseen)
    assert float((trained - integer).norm() / integer.norm()) < 0.02


@pytest.mark.parametrize("fields", [{}, {"w_symmetric": False, "w_group_size": 32}], ids=["symmetric", "groups"])
def test_the_gradient_of_a_scale_is_exact(rotated: nn.Module, fields: dict[str, Any]) -> None:
    """Codes stay what they are when a scale changes; and training cannot shrink a scale without a reason."""
    model = quantize_model(rotated, w_method="rtn", progress=False, **fields)
    with _trainable(model, {}) as layers:
        layer = layers["model.layers.0.mlp.up_proj"]
        assert layer.latent is not None
        layer.latent.data += 0.3 * torch.randn_like(layer.latent)
        weight = layer.weight()
        gradient = torch.randn_like(weight)
        (found,) = torch.autograd.grad(weight, layer.log_step, gradient)
        assert torch.allclose(found, (weight * gradient).unflatten(-1, (found.shape[1], -1)).sum(-1), atol=1e-4)
        before, layer.log_step.data = weight.detach(), layer.log_step.data + 0.5
        assert torch.allclose(layer.weight(), before * torch.tensor(0.5).exp(), rtol=1e-5)
        expected = layer.weight().detach()
    assert torch.allclose(layer.source.dequantize(), expected, rtol=1e-5)


def test_clips_are_recorded_and_shared_by_siblings(rotated: nn.Module, quantize: Callable[..., Any]) -> None:
    model = quantize(rotated, tune_steps=5, tune_learning_rate=0.05)
    config = model.config.quantization_config
    for name, module, role in linear_modules(model):
        if role != "lm_head":
            assert isinstance(module, QuantLinear)
            assert config.for_module(name).a_clip == module.a_clip
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.a_clip == attention.k_proj.a_clip == attention.v_proj.a_clip != 0.9


def test_tuning_resumes_from_finished_layers(rotated: nn.Module, tmp_path: Path, quantize: Callable[..., Any]) -> None:
    fields = {"tune_steps": 4, "resume_dir": tmp_path}
    first = quantize(copy.deepcopy(rotated), **fields)
    again = quantize(copy.deepcopy(rotated), **fields)
    for (name, a), (_, b) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
