"""A ``quantize_model`` that fails halfway leaves the model as it was, and the same call then works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quarot.tuning.tune
from quarot.quantization.layer import LayerQuantizer
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

WINDOWS = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(5))
FIELDS: dict[str, Any] = {"calibration": WINDOWS, "progress": False, "k_bits": 16, "v_bits": 16}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def fail_in_second_layer(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    quantize_part = LayerQuantizer._quantize_part

    def failing(self: LayerQuantizer, part: Any, moments: Any) -> None:
        quantize_part(self, part, moments)
        if self.index == 1 and part[0] == "mlp.down_proj":
            raise error

    monkeypatch.setattr(LayerQuantizer, "_quantize_part", failing)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_the_same_call_works_after_a_failure(
    tiny_model: Callable[..., nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resume: bool,
    error: BaseException,
) -> None:
    model = tiny_model("qwen2")  # it has biases, which the correction changes
    rotate_model(model, progress=False)
    before, kinds = state(model), [type(m) for m in model.modules()]
    fields = {**FIELDS, "gptq_bias_correction": True, "resume_dir": tmp_path if resume else None}
    wanted = quantize_model(copy.deepcopy(model), **{**fields, "resume_dir": None})
    with monkeypatch.context() as patch:
        fail_in_second_layer(patch, error)
        with pytest.raises(type(error)):
            quantize_model(model, **fields)
    assert [type(m) for m in model.modules()] == kinds
    assert same(state(model), before)
    assert (tmp_path / "model.layers.0.safetensors").exists() == resume
    assert same(state(quantize_model(model, **fields)), state(wanted))


def test_a_learned_rotation_is_taken_back_too(
    tiny_model: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    before, plan, config = state(model), model.quarot_rotation, model.config.quantization_config
    fields = {**FIELDS, "rotation_steps": 2, "tune_steps": 2, "resume_dir": tmp_path}
    wanted = quantize_model(copy.deepcopy(model), **{**fields, "resume_dir": None})

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the middle of tuning")

    with monkeypatch.context() as patch:
        patch.setattr(quarot.tuning.tune, "tune", failing)
        with pytest.raises(RuntimeError, match="middle of tuning"):
            quantize_model(model, **fields)
    assert same(state(model), before)
    assert (model.quarot_rotation, model.config.quantization_config) == (plan, config)
    assert same(state(quantize_model(model, **fields)), state(wanted))


def test_experts_stay_whole_without_calibration_text(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("mixtral")
    before = state(model)
    with pytest.raises(ValueError, match="calibration text"):
        quantize_model(model)
    assert same(state(model), before)
