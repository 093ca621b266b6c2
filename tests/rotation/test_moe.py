"""Mixture-of-experts models: router and 3-D expert weights rotate exactly, and the split experts compute the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from quarot.architectures import architecture_of, decoder_layers, linear_modules
from quarot.nn.expert_list import ExpertList
from quarot.nn.rotated_linear import RotatedLinear
from quarot.rotation.rotate import rotate_model
from quarot.rotation.spec import HadamardSpec


@pytest.mark.parametrize(
    ("r1", "r2", "r4"), list(itertools.product(("hadamard", "orthogonal", None), (True, False), (True, False)))
)
def test_rotation_changes_nothing(
    moe_family: str,
    r1: str | None,
    r2: bool,
    r4: bool,
    tiny_model: Callable[..., Any],
    exact_logits: Callable[..., torch.Tensor],
    token_ids: torch.Tensor,
) -> None:
    model = tiny_model(moe_family, dtype=torch.float64)
    before = exact_logits(copy.deepcopy(model), token_ids)
    rotate_model(model, r1=r1, r2=r2, r4=r4, progress=False)
    after = exact_logits(model, token_ids)
    assert (after - before).norm() < 1e-10 * before.norm()


def test_experts_become_linear_layers_only_for_an_online_rotation(
    moe_family: str, tiny_model: Callable[..., Any]
) -> None:
    model, plain = tiny_model(moe_family), tiny_model(moe_family)
    rotate_model(plain, r3=False, r4=False, o_proj_online="none", record=False, progress=False)
    assert set(plain.state_dict()) == set(model.state_dict())
    storage = {p.untyped_storage().data_ptr() for n, p in model.named_parameters() if "experts" in n}
    plan = rotate_model(model, progress=False)
    width = 192 if moe_family == "mixtral" else 96
    assert plan.expert_out_input == HadamardSpec(width, 12, width // 12)
    assert "input of experts' down projections" in plan.describe()
    place = architecture_of(model).experts.module
    lists = [m for n, m in model.named_modules() if n.endswith(place) and isinstance(m, ExpertList)]
    assert len(lists) == (2 if moe_family == "mixtral" else 1)
    assert all(isinstance(down, RotatedLinear) for experts in lists for down in experts.down)
    roles = [role for _, _, role in linear_modules(model)]
    assert roles.count("expert_down") == roles.count("expert_gate_up") == 4 * len(lists)
    assert {p.untyped_storage().data_ptr() for n, p in model.named_parameters() if "experts" in n} == storage


def test_expert_list_is_the_formula_and_skips_experts_without_tokens() -> None:
    gate_up, down = torch.randn(3, 16, 6).double(), torch.randn(3, 6, 8).double()
    experts = ExpertList.from_parameters(gate_up, down, nn.functional.silu)
    x, index = torch.randn(5, 6).double(), torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]])
    share = torch.rand(5, 2).double()
    expected = torch.zeros_like(x)
    for token, k in itertools.product(range(5), range(2)):
        gate, up = (gate_up[index[token, k]] @ x[token]).chunk(2)
        expected[token] += share[token, k] * (down[index[token, k]] @ (nn.functional.silu(gate) * up))
    experts.gate_up[1] = experts.down[1] = None
    torch.testing.assert_close(experts(x, index, share), expected)
    assert experts(x[:0], index[:0], share[:0]).shape == (0, 6)


def test_damaged_expert_is_named(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.down_proj holds NaN"):
        rotate_model(model, progress=False)


def test_dense_layers_of_a_sparse_model_rotate_too(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3_moe")
    plan = rotate_model(model, progress=False)
    dense = [layer for _, layer in decoder_layers(model)][1]
    assert dense.mlp.down_proj.input_rotation == plan.mlp_out_input == HadamardSpec(192, 12, 16)


@pytest.mark.parametrize("r4", [True, False])
def test_saved_and_loaded_is_bit_equal(
    moe_family: str, r4: bool, tiny_model: Callable[..., Any], token_ids: torch.Tensor, tmp_path: Any
) -> None:
    model = tiny_model(moe_family)
    rotate_model(model, r4=r4, progress=False)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)
