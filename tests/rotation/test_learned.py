"""Learned rotations: the function stays the same, the divergence falls, and what cannot be done is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from quarot.config import QuarotConfig
from quarot.rotation.learned import apply_refinement, learn_refinement
from quarot.rotation.refinement import rotation
from quarot.rotation.rotate import rotate_model
from quarot.tuning.material import Material
from quarot.tuning.tune import final_states

WINDOWS = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(3))
CONFIG = QuarotConfig(kv_group_size=32)


def learned(model: nn.Module, steps: int, rate: float = 1.0) -> list[float]:
    material = Material(WINDOWS, final_states(model, WINDOWS, 4))
    refinement, losses = learn_refinement(
        model, CONFIG, material, steps=steps, learning_rate=rate, batch_size=4, progress=False
    )
    apply_refinement(model, refinement)
    return losses


def test_the_function_stays_the_same(
    tiny_model: Callable[..., nn.Module],
    exact_logits: Callable[..., torch.Tensor],
    family: str,
    token_ids: torch.Tensor,
) -> None:
    model = tiny_model(family, dtype=torch.float64)
    rotate_model(model, progress=False)
    before = exact_logits(model, token_ids)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    learned(model, steps=3, rate=20.0)
    after = exact_logits(model, token_ids)
    assert (after - before).abs().max() < 1e-9 * before.abs().max()
    # ... though every matrix has changed.
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert (parameter - weights[name]).abs().max() > 1e-4, name


def test_learning_lowers_the_divergence(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    losses = learned(model, steps=40, rate=3.0)
    assert sum(losses[-8:]) < 0.9 * sum(losses[:2]) * 4


def test_learning_leaves_the_model_alone(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("qwen2")
    rotate_model(model, progress=False)
    twin = copy.deepcopy(model)
    material = Material(WINDOWS, final_states(model, WINDOWS, 4))
    learn_refinement(model, CONFIG, material, steps=2, batch_size=4, progress=False)
    for (name, ours), (other, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs), name
        assert ours.requires_grad == theirs.requires_grad, name


def test_residual_rows_are_what_it_says(tiny_model: Callable[..., nn.Module], token_ids: torch.Tensor) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    rotate_model(model, progress=False)
    before = final_states(model, token_ids, 4).double()
    refinement, _ = learn_refinement(
        model,
        CONFIG,
        Material(WINDOWS, final_states(model, WINDOWS, 4)),
        steps=2,
        learning_rate=20.0,
        batch_size=4,
        progress=False,
    )
    residual = apply_refinement(model, refinement)
    after = final_states(model, token_ids, 4).double()
    assert (after - before @ residual).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2


def test_the_plan_says_that_it_was_learned(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    learned(model, steps=1)
    assert "refined by training" in model.quarot_rotation.describe()
    assert model.config.quantization_config.rotation == model.quarot_rotation.to_dict()


def test_an_unrotated_model_is_refused(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="rotate_model first"):
        learned(model, steps=1)


def test_experts_are_refused(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("mixtral")
    rotate_model(model, progress=False)
    with pytest.raises(NotImplementedError, match="experts"):
        learned(model, steps=1)


def test_a_failure_leaves_the_model_as_it_was(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    twin = copy.deepcopy(model)
    wrong = torch.full((8, 32, 128), torch.nan)
    with pytest.raises(FloatingPointError, match="learning rate"):
        learn_refinement(model, CONFIG, Material(WINDOWS, wrong), steps=1, batch_size=4, progress=False)
    for (name, ours), (other, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs), name


def test_rotations_are_orthogonal_and_start_at_the_identity() -> None:
    generator = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0)) / 8
    found = rotation(generator)
    assert torch.allclose(found @ found.transpose(1, 2), torch.eye(16).expand(3, 16, 16), atol=1e-5)
    assert torch.allclose(found, torch.linalg.matrix_exp(generator - generator.transpose(1, 2)), atol=1e-5)
    assert torch.equal(rotation(torch.zeros(4, 4)), torch.eye(4))
