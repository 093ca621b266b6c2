"""Training one decoder layer at a time brings the quantised model closer to the full-precision one, everywhere."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quarot.quantization.layer import LayerQuantizer
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model
from quarot.tuning import layer
from quarot.tuning.layer import tune_layer

Divergences = Callable[[nn.Module, nn.Module], tuple[float, float]]
TRAINED: dict[str, Any] = {"layer_steps": 60, "tune_learning_rate": 0.01}


@pytest.mark.parametrize(
    "fields",
    [{}, {"w_symmetric": False, "w_group_size": 32, "a_bits": 8}, {"w_method": "rtn"}, {"a_bits": 16, "k_bits": 16}],
    ids=str,
)
def test_training_layers_helps(
    rotated: nn.Module, fields: dict[str, Any], quantize: Callable[..., Any], divergences: Divergences
) -> None:
    plain = quantize(copy.deepcopy(rotated), **fields)
    trained = quantize(copy.deepcopy(rotated), **TRAINED, **fields)
    (seen, unseen), (plain_seen, plain_unseen) = divergences(trained, rotated), divergences(plain, rotated)
    assert seen < 0.9 * plain_seen
    assert unseen < plain_unseen
    sizes = [sum(p.numel() * p.element_size() for p in model.parameters()) for model in (trained, plain)]
    assert sizes[0] == sizes[1]
    assert not any(p.grad is not None for p in trained.parameters())


def test_an_interrupted_run_continues(rotated: nn.Module, tmp_path: Path, quantize: Callable[..., Any]) -> None:
    fields = {**TRAINED, "layer_steps": 4, "resume_dir": tmp_path}
    first = quantize(copy.deepcopy(rotated), **fields)
    last = sorted(tmp_path.glob("*layers.1.safetensors"))
    assert last
    last[0].unlink()
    again = quantize(copy.deepcopy(rotated), **fields)
    for (name, a), (_, b) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert first.config.quantization_config == again.config.quantization_config


def test_layers_with_experts_are_left_alone(tiny_model: Callable[..., nn.Module], quantize: Callable[..., Any]) -> None:
    """Of this model the first layer has experts and the second has none."""
    model = tiny_model("qwen3_moe")
    rotate_model(model, progress=False)
    plain = quantize(copy.deepcopy(model)).state_dict()
    trained = quantize(model, layer_steps=3, tune_learning_rate=0.01).state_dict()
    changed = {name for name in plain if not torch.equal(plain[name], trained[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)


def test_layers_with_experts_are_told_once(
    tiny_model: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture, quantize: Callable[..., Any]
) -> None:
    model = tiny_model("mixtral", num_hidden_layers=3)
    rotate_model(model, progress=False)
    quantize(model, layer_steps=3, w_method="rtn")
    told = [record.getMessage() for record in caplog.records if "experts" in record.getMessage()]
    assert told == ["3 of 3 decoder layers have experts and are not trained (layer_steps=3)"]


@pytest.mark.parametrize("more", [{"tune_steps": 2}, {"rotation_steps": 2}], ids=str)
def test_layers_are_trained_before_the_whole_model_is(
    rotated: nn.Module, more: dict[str, int], monkeypatch: pytest.MonkeyPatch, quantize: Callable[..., Any]
) -> None:
    """Rounding to nearest asks for no hidden states, training the whole model neither: layers do."""
    losses: list[list[float]] = []
    monkeypatch.setattr(layer, "tune_layer", lambda *given: losses.append(tune_layer(*given)))
    quantize(rotated, w_method="rtn", training_samples=8, **TRAINED, **more)
    assert len(losses) == rotated.config.num_hidden_layers
    assert all(found[-1] < 0.9 * found[0] for found in losses)


def test_experts_cost_no_second_model_and_no_weights_before_rounding(
    tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, quantize: Callable[..., Any]
) -> None:
    model = tiny_model("mixtral")
    rotate_model(model, progress=False)
    kept: list[tuple[bool, int]] = []
    advance = LayerQuantizer.advance

    def watched(work: LayerQuantizer) -> None:
        kept.append((work.reference is None, len(work.latents)))
        advance(work)

    monkeypatch.setattr(LayerQuantizer, "advance", watched)
    quantize(model, layer_steps=3, lm_head_bits=8)
    assert kept == [(True, 0)] * model.config.num_hidden_layers


def test_training_is_refused_where_it_cannot_be_asked_for(rotated: nn.Module, quantize: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="layer_steps=-1 must be 0 or more"):
        quantize(rotated, layer_steps=-1)
    with pytest.raises(ValueError, match="calibration text is needed for training layers"):
        quantize_model(rotated, layer_steps=3, w_method="rtn", progress=False)
