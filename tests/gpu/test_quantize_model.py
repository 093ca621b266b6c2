"""Quantisation and tuning on a GPU: the results of the CPU, wherever the model is."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quarot.architectures import linear_modules
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.gptq import quantize_gptq
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WINDOWS = torch.randint(3, 128, (16, 64), generator=torch.Generator().manual_seed(5))
FIELDS: dict[str, Any] = {"calibration": WINDOWS, "progress": False}


@pytest.fixture
def rotated(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    return model


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    device = model.get_input_embeddings().weight.device
    with torch.no_grad():
        return model(ids.to(device), use_cache=False).logits.float().cpu()


def codes(model: nn.Module) -> torch.Tensor:
    return torch.cat([m.codes().flatten().cpu() for _, m, role in linear_modules(model) if role != "lm_head"])


@pytest.mark.parametrize(
    "fields",
    [{}, {"symmetric": False, "act_order": True}, {"group_size": 100}, {"group_size": 50, "act_order": True}],
    ids=str,
)
def test_recorded_blocks_round_as_eager_ones(fields: dict[str, Any]) -> None:
    """700 columns are five whole blocks (the first eager, then recorded and replayed) and a shorter one."""
    weight, x = torch.randn(300, 700), torch.randn(3000, 700) @ torch.randn(700, 700)
    hessian = x.T @ x / 3000
    expected = quantize_gptq(weight, hessian, 4, **fields)
    for _ in range(2):
        found = quantize_gptq(weight.cuda(), hessian.cuda(), 4, **fields)
        assert (found.codes.cpu() != expected.codes).float().mean() < 0.01


def test_a_model_on_the_cpu_is_worked_on_elsewhere(rotated: nn.Module) -> None:
    on_cpu = quantize_model(copy.deepcopy(rotated), **FIELDS)
    away = quantize_model(copy.deepcopy(rotated), device="cuda", **FIELDS)
    assert {p.device.type for p in away.parameters()} == {"cpu"}
    assert (codes(on_cpu) != codes(away)).float().mean() < 0.02


def test_layers_on_several_devices(rotated: nn.Module, token_ids: torch.Tensor) -> None:
    reference = quantize_model(copy.deepcopy(rotated), a_bits=8, **FIELDS)
    rotated.model.layers[1].to("cuda")
    quantize_model(rotated, a_bits=8, **FIELDS)
    assert rotated.model.layers[0].mlp.up_proj.qweight.device.type == "cpu"
    assert rotated.model.layers[1].mlp.up_proj.qweight.device.type == "cuda"
    assert (codes(rotated) != codes(reference)).float().mean() < 0.02


@pytest.mark.parametrize("a_bits", [4, 8, 16])
def test_the_same_integers_on_both_devices(
    rotated: nn.Module, share_apart: Callable[[torch.Tensor, torch.Tensor], float], a_bits: int
) -> None:
    model = quantize_model(rotated, w_method="rtn", a_bits=a_bits, progress=False)
    ids = torch.randint(3, 128, (64, 17), generator=torch.Generator().manual_seed(1))
    on_cpu = logits(model, ids)
    on_gpu = logits(model.cuda(), ids)
    assert share_apart(on_gpu, on_cpu) <= 0.5
    with torch.no_grad():  # a fault is seen
        model.model.layers[0].self_attn.v_proj.weight_scale.mul_(1.02)
    assert share_apart(logits(model, ids), on_cpu) == 1


def test_tuning_is_recorded_and_helps(rotated: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    rotated.cuda()
    unseen = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(6))
    reference = torch.log_softmax(logits(rotated, unseen), -1)

    def divergence(model: nn.Module) -> float:
        own = torch.log_softmax(logits(model, unseen), -1)
        return float((reference.exp() * (reference - own)).sum(-1).mean())

    plain = divergence(quantize_model(copy.deepcopy(rotated), **FIELDS))
    with caplog.at_level(logging.WARNING, "quarot"):
        tuned = quantize_model(copy.deepcopy(rotated), tune_steps=60, tune_learning_rate=0.01, **FIELDS)
    assert "cannot be recorded" not in caplog.text
    assert divergence(tuned) < plain
    assert all(isinstance(m, QuantLinear) for _, m, role in linear_modules(tuned) if role != "lm_head")
