"""Resampled calibration windows come from the model, one token from the prediction at its place."""

from collections.abc import Callable

import torch
from torch import nn

from quarot.calibration.resampling import REPLACED, resampled_windows

WINDOWS = torch.randint(3, 128, (6, 40), generator=torch.Generator().manual_seed(1))


def test_the_windows_come_first_and_every_round_changes_about_half(tiny_model: Callable[..., nn.Module]) -> None:
    found = resampled_windows(tiny_model("llama"), WINDOWS, rounds=2, seed=0, batch_size=4)
    assert found.shape == (18, 40)
    first, second, third = found.split(6)
    assert torch.equal(first, WINDOWS)
    assert torch.equal(second[:, 0], WINDOWS[:, 0])
    for before, after in ((first, second), (second, third)):
        changed = (before != after).float().mean().item()
        assert REPLACED - 0.15 < changed < REPLACED + 0.1


def test_replaced_tokens_are_those_the_model_predicts(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)  # so sure of itself that sampling is the argmax
        predicted = model(WINDOWS).logits.argmax(-1)[:, :-1]
    found = resampled_windows(model, WINDOWS, rounds=1, seed=0)[6:]
    changed = found[:, 1:] != WINDOWS[:, 1:]
    assert changed.any()
    assert torch.equal(found[:, 1:][changed], predicted[changed])


def test_the_seed_decides(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("qwen2")
    once, again = (resampled_windows(model, WINDOWS, rounds=1, seed=4) for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, resampled_windows(model, WINDOWS, rounds=1, seed=5))


def test_no_rounds_no_change(tiny_model: Callable[..., nn.Module]) -> None:
    assert torch.equal(resampled_windows(tiny_model("llama"), WINDOWS, rounds=0, seed=0), WINDOWS)
