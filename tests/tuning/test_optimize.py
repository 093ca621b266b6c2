"""The training loop keeps the parameters of the least held-out loss, and never trains on what is held out."""

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
