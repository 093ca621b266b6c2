"""Mixtures of experts: each expert's projections are quantised, packed, saved, loaded and run as linear layers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from quarot.architectures import linear_modules
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

GPTQ = {"calibration_samples": 2, "calibration_length": 16}


def _error(model: Any, before: torch.Tensor, ids: torch.Tensor) -> float:
    """Of the median token: a router of random weights sends some tokens elsewhere at the slightest change."""
    with torch.no_grad():
        return ((model(ids).logits - before).norm(dim=-1) / before.norm(dim=-1)).median().item()


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_experts_are_packed_saved_and_loaded(
    moe_family: str, method: str, rotate: bool, tiny_model: Callable[..., Any], token_ids: torch.Tensor, tmp_path: Any
) -> None:
    model = tiny_model(moe_family)
    with torch.no_grad():
        before = model(token_ids).logits
    if rotate:
        rotate_model(model, progress=False)
    calibration = torch.randint(3, 128, (1, 400)) if method == "gptq" else None
    bits = {"w_bits": 8, "a_bits": 16, "k_bits": 16, "v_bits": 16}
    quantize_model(model, calibration=calibration, w_method=method, progress=False, **bits, **GPTQ)
    kinds = {role: type(module) for _, module, role in linear_modules(model) if role != "lm_head"}
    assert set(kinds.values()) == {QuantLinear}
    assert {"expert_gate_up", "expert_down"} <= set(kinds)
    assert _error(model, before, token_ids) < 0.1
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)


def test_a_checkpoint_that_lacks_an_expert_is_refused(tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_model("mixtral")
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("experts.down.2.qweight"))
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts.down.2.qweight"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_four_bit_experts_generate(moe_family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(moe_family)
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False)
    tokens = model.generate(torch.tensor([[5, 9, 11]]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert tokens.shape == (1, 8)


def test_few_tokens_and_one_expert_each(
    tiny_model: Callable[..., Any], token_ids: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Most experts see none of four calibration tokens; the rest of the model is still quantised by GPTQ."""
    model = tiny_model("mixtral", num_local_experts=8, num_experts_per_tok=1)
    rotate_model(model, progress=False)
    calibration = {"calibration": torch.randint(3, 128, (1, 8)), "calibration_samples": 1, "calibration_length": 4}
    quantize_model(model, progress=False, **calibration)
    assert "experts are rounded to nearest" in caplog.text
    with torch.no_grad():
        assert model(token_ids).logits.isfinite().all()


def test_tuning_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral")
    with pytest.raises(NotImplementedError, match="a mixture of experts cannot be tuned; set tune_steps=0"):
        quantize_model(model, calibration=torch.randint(3, 128, (1, 400)), tune_steps=3, progress=False, **GPTQ)
