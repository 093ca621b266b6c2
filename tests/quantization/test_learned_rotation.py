"""``quantize_model`` with a learned rotation: recorded, resumable, worth it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quarot.rotation.learned
from quarot.architectures import linear_modules
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

WINDOWS = torch.randint(3, 128, (24, 48), generator=torch.Generator().manual_seed(5))
FIELDS: dict[str, Any] = {"calibration": WINDOWS, "progress": False, "k_bits": 16, "v_bits": 16}


@pytest.fixture
def rotated(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    return model


def divergence(model: nn.Module, reference: nn.Module) -> float:
    with torch.no_grad():
        own = F.log_softmax(model(WINDOWS, use_cache=False).logits, -1)
        wanted = F.log_softmax(reference(WINDOWS, use_cache=False).logits, -1)
    return float((wanted.exp() * (wanted - own)).sum(-1).mean())


def test_the_learned_rotation_helps_and_is_recorded(rotated: nn.Module) -> None:
    plain = quantize_model(copy.deepcopy(rotated), w_bits=16, **FIELDS)
    learned = quantize_model(copy.deepcopy(rotated), w_bits=16, rotation_steps=60, **FIELDS)
    assert divergence(learned, rotated) < 0.9 * divergence(plain, rotated)
    assert "refined by training" in str(learned.config.quantization_config.rotation["notes"])
    assert "refined" not in str(plain.config.quantization_config.rotation["notes"])


def test_tuning_aims_at_the_refined_basis(rotated: nn.Module) -> None:
    # Targets in the old basis would be as good as random ones.
    learned = quantize_model(copy.deepcopy(rotated), rotation_steps=40, **FIELDS)
    tuned = quantize_model(copy.deepcopy(rotated), rotation_steps=40, tune_steps=40, tune_learning_rate=0.01, **FIELDS)
    assert divergence(tuned, rotated) < divergence(learned, rotated)


def test_an_interrupted_run_keeps_what_it_learned(
    rotated: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quantize_model(copy.deepcopy(rotated), rotation_steps=3, resume_dir=tmp_path, **FIELDS)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the rotation was learned a second time")

    monkeypatch.setattr(quarot.rotation.learned, "learn_refinement", never)
    again = quantize_model(copy.deepcopy(rotated), rotation_steps=3, resume_dir=tmp_path, **FIELDS)
    for (name, ours, _), (_, theirs, _) in zip(linear_modules(first), linear_modules(again), strict=True):
        if isinstance(ours, QuantLinear):
            assert torch.equal(ours.qweight, theirs.qweight), name


def test_an_unrotated_model_is_refused_untouched(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="rotate_model first"):
        quantize_model(model, rotation_steps=3, **FIELDS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_best_preset_is_better_than_the_paper(rotated: nn.Module) -> None:
    paper = quantize_model(copy.deepcopy(rotated), **FIELDS)
    shorter = {"rotation_steps": 40, "tune_steps": 40, "tune_learning_rate": 0.01}
    best = quantize_model(copy.deepcopy(rotated), preset="best", **shorter, **FIELDS)
    assert divergence(best, rotated) < 0.7 * divergence(paper, rotated)
    size = [sum(p.numel() * p.element_size() for p in model.parameters()) for model in (paper, best)]
    assert size[0] == size[1]


def test_nothing_is_learned_where_only_weights_are_rounded(rotated: nn.Module) -> None:
    model = quantize_model(rotated, a_bits=16, rotation_steps=2, w_method="rtn", **FIELDS)
    assert "refined" not in str(model.config.quantization_config.rotation["notes"])


def test_negative_counts_are_refused(rotated: nn.Module) -> None:
    with pytest.raises(ValueError, match="rotation_steps=-1"):
        quantize_model(rotated, rotation_steps=-1, **FIELDS)
