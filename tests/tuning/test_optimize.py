"""The training loop keeps the parameters of the least held-out loss, and never trains on what is held out."""

from typing import Any

import pytest
import torch

from quarot.tuning.material import Material
from quarot.tuning.optimize import optimize


def trained(held: int, goals: list[float], steps: int = 64) -> tuple[float, list[int]]:
    """Fit one number to the goal of each window, first the training ones; returns it and the windows seen."""
    value = torch.nn.Parameter(torch.zeros(()))
    windows = torch.arange(len(goals))[:, None]
    targets = torch.tensor(goals)[:, None, None]
    seen = []

    def loss_of(ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.extend(ids.flatten().tolist())
        return (value - wanted).square().mean()

    group = {"params": [value], "base": 0.1}
    optimize(
        loss_of,
        [group],
        Material(windows, targets, held),
        steps=steps,
        batch_size=2,
        seed=0,
        description="t",
        progress=False,
    )
    return float(value.detach()), seen


def test_without_held_windows_the_last_step_counts() -> None:
    value, seen = trained(0, [1.0] * 8)
    assert abs(value - 1.0) < 0.05
    assert set(seen) == set(range(8))


def test_the_best_step_on_the_held_windows_is_kept() -> None:
    # The held-out goal lies on the way: going on past it must be undone.
    last, seen = trained(0, [3.0] * 6)
    kept, trained_on = trained(2, [3.0] * 6 + [2.4] * 2)
    assert last > 2.5
    assert abs(kept - 2.4) < abs(last - 2.4) / 2
    assert set(trained_on) == set(seen) == set(range(6))


class _PoisonedBackward(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("nan")


@pytest.mark.parametrize("poisoned", [2, 3], ids=["a step before the last", "the last step"])
def test_a_gradient_that_is_nan_is_told(poisoned: int) -> None:
    """Behind the last step no loss is computed that would show it."""
    value, steps = torch.nn.Parameter(torch.zeros(())), iter(range(4))

    def loss_of(ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        own = _PoisonedBackward.apply(value) if next(steps) == poisoned else value
        return (own - wanted).square().mean()

    group = {"params": [value], "base": 0.1}
    material = Material(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1, 1))
    with pytest.raises(FloatingPointError, match="fitting: the loss or its gradient is not finite"):
        optimize(loss_of, [group], material, steps=4, batch_size=2, seed=0, description="fitting", progress=False)
