"""Mixtures of experts on a GPU: integer experts compute what the reference does, calibrate, and meet a bit budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quarot.architectures import linear_modules
from quarot.nn.expert_list import ExpertList
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WINDOWS = torch.randint(3, 24, (16, 64), generator=torch.Generator().manual_seed(7))


def _lists(model: Any) -> list[ExpertList]:
    return [m for m in model.modules() if isinstance(m, ExpertList)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [{}, {"a_bits": 8}, {"w_bits": 8, "a_bits": 8}])
def test_experts_are_those_of_the_cpu(
    moe_family: str, bits: dict[str, Any], dtype: torch.dtype, tiny_model: Callable[..., Any]
) -> None:
    """Of most tokens: a code on a rounding boundary may differ by one after the Hadamard kernel."""
    model = tiny_model(moe_family, dtype=dtype)
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False, **bits)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(37)])
    x, share = torch.randn(37, 128, dtype=dtype), torch.rand(37, 2)
    for experts in _lists(model):
        assert experts.integer
        expected = experts(x, index, share)
        experts.cuda()
        found = experts(x.cuda(), index.cuda(), share.cuda())
        one = slice(5, 6)
        assert torch.equal(experts(x[one].cuda(), index[one].cuda(), share[one].cuda()), found[one])
        error = (found.cpu().float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        assert error.median() < 0.01
        assert error.max() < 0.2


def test_gptq_of_experts_is_that_of_the_cpu(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral", num_local_experts=8, num_experts_per_tok=1)
    rotate_model(model, progress=False)
    away = quantize_model(copy.deepcopy(model), calibration=WINDOWS, device="cuda", progress=False)
    here = quantize_model(model, calibration=WINDOWS, progress=False)
    starved = here.config.quantization_config.starved_experts
    found = away.config.quantization_config.starved_experts
    first = ".layers.0."  # behind it a token at a boundary may take another expert
    assert {n: t for n, t in found.items() if first in n} == {n: t for n, t in starved.items() if first in n}
    pairs = zip(linear_modules(here), linear_modules(away), strict=True)
    for (name, a, role), (_, b, _) in pairs:
        if role.startswith("expert") and first in name:
            assert (a.codes() != b.codes().cpu()).float().mean() < 0.06, name  # errors of one column move to all others


def test_a_budget_is_spent_as_on_the_cpu(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    fields: dict[str, Any] = {"w_bits_budget": 4.5, "w_bits_choices": [4, 8], "w_method": "rtn", "a_bits": 8}
    here = quantize_model(copy.deepcopy(model), calibration=WINDOWS, progress=False, **fields)
    away = quantize_model(model.cuda(), calibration=WINDOWS, progress=False, **fields)
    bits = [[m.w_bits for _, m, _ in linear_modules(x) if isinstance(m, QuantLinear)] for x in (here, away)]
    assert bits[0] == bits[1]
    assert set(bits[0]) == {4, 8}
    with torch.no_grad():
        assert away(WINDOWS[:1].cuda()).logits.isfinite().all()
