"""Weight bits under a budget: the knapsack, the measurement it rests on, and models with mixed bits."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import quarot
from quarot.architectures import architecture_of, linear_modules
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear, linear_weight
from quarot.quantization.bit_allocation import allocate, units_of, weight_divergences
from quarot.quantization.quantize_model import quantize_model
from quarot.quantization.rtn import quantize_rtn
from quarot.quantization.selection import selected
from quarot.rotation.rotate import rotate_model

WINDOWS = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(5))
CHOICES = (2, 3, 4, 6, 8)
FIELDS: dict[str, Any] = {"calibration": WINDOWS, "progress": False, "k_bits": 16, "v_bits": 16, "a_bits": 16}


def _random_losses(units: int) -> list[list[float]]:
    return [[s * 4.0**-b for b in CHOICES] for s in torch.rand(units).add(0.01).pow(3).tolist()]


@pytest.mark.parametrize("budget", [2.0, 2.7, 3.5, 4.0, 5.3, 8.0])
def test_no_allocation_of_equal_cost_is_better(budget: float) -> None:
    """Against every allocation of five units that spends no more bits than ours."""
    losses, sizes = _random_losses(5), [1, 2, 2, 5, 3]
    found = allocate(losses, sizes, CHOICES, budget)
    index = [CHOICES.index(b) for b in found]
    spent = sum(b * size for b, size in zip(found, sizes, strict=True))
    assert spent <= budget * sum(sizes)
    ours = sum(losses[u][i] for u, i in enumerate(index))
    every = itertools.product(range(len(CHOICES)), repeat=5)
    within = [c for c in every if sum(CHOICES[i] * s for i, s in zip(c, sizes, strict=True)) <= budget * sum(sizes)]
    best = min(sum(losses[u][i] for u, i in enumerate(c)) for c in within)
    worst = max(sum(losses[u][i] for u, i in enumerate(c)) for c in within)
    assert best <= ours <= best + 0.05 * (worst - best)


def test_more_bits_that_do_not_help_are_not_bought() -> None:
    assert allocate([[1.0, 0.5, 0.5, 0.7, 0.6]], [10], CHOICES, 8.0) == [3]
    assert allocate([[0.3, 0.9, 0.2, 0.2, 0.2], [0.0] * 5], [10, 10], CHOICES, 8.0) == [4, 2]


def test_a_divergence_is_that_of_a_model_with_one_part_rounded(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("granite")
    rotate_model(model, progress=False)
    record, config = architecture_of(model), QuarotConfig()
    configs = selected(model, record, config)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    units = units_of(model, record, config, configs)
    assert [len(unit.names) for unit in units] == [3, 1, 2, 1] * 2
    found = weight_divergences(model, units, configs, (3, 8), WINDOWS, progress=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    with torch.no_grad():
        target = F.log_softmax(model(WINDOWS).logits, -1)
    for row, column in ((0, 0), (5, 1), (7, 0)):
        rounded = copy.deepcopy(model)
        for name in units[row].names:
            weight = linear_weight(rounded.get_submodule(name))
            weight.data = quantize_rtn(weight.data, (3, 8)[column]).dequantize()
        with torch.no_grad():
            own = F.log_softmax(rounded(WINDOWS).logits, -1)
        expected = (target.exp() * (target - own)).sum(-1).mean().item()
        assert found[row, column].item() == pytest.approx(expected, rel=2e-3, abs=1e-7)
    assert (found[:, 0] > found[:, 1]).all()


def _average_bits(model: nn.Module) -> float:
    layers = [m for _, m, role in linear_modules(model) if isinstance(m, QuantLinear)]
    sizes = [m.in_features * m.out_features for m in layers]
    return sum(m.w_bits * size for m, size in zip(layers, sizes, strict=True)) / sum(sizes)


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_budget_is_met_saved_and_loaded(
    family: str, method: str, tiny_model: Callable[..., Any], token_ids: torch.Tensor, tmp_path: Any
) -> None:
    model = tiny_model(family)
    rotate_model(model, progress=False)
    quantize_model(model, w_bits_budget=4.0, w_method=method, **{**FIELDS, "a_bits": 8})
    bits = {m.w_bits for _, m, role in linear_modules(model) if isinstance(m, QuantLinear)}
    assert len(bits) > 1 and bits <= {3, 4, 6, 8}
    assert 3.5 < _average_bits(model) <= 4.0
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for index in range(2):
            layer = [m for n, m in model.named_modules() if re.search(rf"layers\.{index}\..*({'|'.join(names)})$", n)]
            assert len({m.w_bits for m in layers_of(layer)}) <= 1
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)


def layers_of(modules: list[Any]) -> list[QuantLinear]:
    return [m for m in modules if isinstance(m, QuantLinear)]


def test_a_budget_beats_equal_bits(tiny_model: Callable[..., Any]) -> None:
    """One layer's output is made six times as large; the same bits on average then cost less elsewhere."""
    ids = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(9))

    def divergence(seed: int, **fields: Any) -> float:
        model = tiny_model("llama", num_hidden_layers=3, seed=seed)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(6)
            target = F.log_softmax(model(ids).logits, -1)
            rotate_model(model, progress=False)
            quantize_model(model, w_method="rtn", **FIELDS, **fields)
            own = F.log_softmax(model(ids).logits, -1)
        return (target.exp() * (target - own)).sum(-1).mean().item()

    budget, equal = (
        sum(divergence(seed, **fields) for seed in range(3)) for fields in ({"w_bits_budget": 4.0}, {"w_bits": 4})
    )
    assert budget < 0.85 * equal


def test_fixed_bits_stay_and_do_not_count(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    quantize_model(
        model, w_bits_budget=4.0, w_bits_choices=[4, 8], overrides={r".*\.0\.mlp\..*": {"w_bits": 2}}, **FIELDS
    )
    for name, module, role in linear_modules(model):
        if role != "lm_head":
            assert module.w_bits == (2 if ".0.mlp." in name else 4), name


def test_a_resumed_run_allocates_the_same(tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    whole = quantize_model(copy.deepcopy(model), w_bits_budget=4.5, **FIELDS)
    quantize_model(copy.deepcopy(model), w_bits_budget=4.5, resume_dir=tmp_path, **FIELDS)
    assert (tmp_path / "bit_allocation.safetensors").exists()
    (tmp_path / "model.layers.1.safetensors").unlink()
    again = quantize_model(model, w_bits_budget=4.5, resume_dir=tmp_path, **FIELDS)
    assert again.config.quantization_config == whole.config.quantization_config
    for (name, a), (_, b) in zip(whole.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"w_bits_budget": 2.5}, "below the fewest bits on offer"),
        ({"w_bits_budget": 9.0}, "w_bits_budget=9.0"),
        ({"w_bits_budget": 4.0, "w_bits_choices": [1, 4]}, r"w_bits_choices=\[1, 4\]"),
        ({"w_bits_budget": 4.0, "w_bits_choices": []}, "w_bits_choices"),
        ({"w_bits_budget": 4.0, "overrides": {".*": {"w_bits": 4}}}, "no layer is left"),
        ({"w_bits_budget": 4.0, "w_bits": 16}, "no layer is left"),
        (
            {"w_bits_budget": 4.0, "calibration": None, "w_method": "rtn"},
            "calibration text is needed for w_bits_budget",
        ),
    ],
)
def test_what_cannot_be_met_is_refused(fields: dict[str, Any], message: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    with pytest.raises(ValueError, match=message):
        quantize_model(model, **{**FIELDS, **fields})
    assert not any(isinstance(m, quarot.QuantLinear) for m in model.modules())
