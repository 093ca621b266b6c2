"""Mixtures of experts, split into linear layers and back: what is saved is what loading builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import quarot
from quarot.nn.expert_list import ExpertList

QUIET = {"progress": False}
NOTHING = {"w_bits": 16, "a_bits": 16, "k_bits": 16, "v_bits": 16}


def is_split(model: Any) -> bool:
    return any(isinstance(module, ExpertList) for module in model.modules())


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"w_bits": 16, "a_bits": 16},
        {**NOTHING, "overrides": {r".*\.experts\..*": {"w_bits": 8, "w_method": "rtn"}}},
        {**NOTHING, "overrides": {r".*\.o_proj": {"w_bits": 8, "w_method": "rtn"}}},
        {"w_method": "rtn", "ignore": ["re:.*experts.*"]},
        {**NOTHING, "kv_bits_by_layer": [[4, 4], [8, 8]]},
    ],
    ids=["cache", "experts", "others", "not experts", "cache by layer"],
)
def test_whatever_is_quantised_comes_back(rotated, fields, moe_family, tiny_model, logits, token_ids, tmp_path):
    model = tiny_model(moe_family)
    if rotated:
        quarot.rotate_model(model, r4=False, **QUIET)
    quarot.quantize_model(model, **fields, **QUIET)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))


@pytest.mark.parametrize("quantized", [True, False])
def test_a_dequantised_model_loads_without_quarot(quantized, moe_family, tiny_model, logits, token_ids, tmp_path):
    model = tiny_model(moe_family)
    quarot.rotate_model(model, **QUIET)
    if quantized:
        quarot.quantize_model(model, w_bits=8, a_bits=16, k_bits=16, v_bits=16, w_method="rtn", **QUIET)
    expected = logits(model, token_ids)
    model.dequantize()
    assert not is_split(model)
    assert (logits(model, token_ids) - expected).abs().max() < 1e-4 * expected.abs().max()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"w_method": "gptq"}, "calibration text"),
        ({"w_method": "rtn", "overrides": {"nothing": {"w_bits": 8}}}, "matches no linear layer"),
        ({**NOTHING, "overrides": {r".*\.experts\..*": {"w_bits": 8}}}, "calibration text is needed for GPTQ"),
    ],
)
def test_a_refusal_leaves_the_experts_as_they_were(fields, message, moe_family, tiny_model):
    model = tiny_model(moe_family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        quarot.quantize_model(model, **fields, **QUIET)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
