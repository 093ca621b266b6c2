"""Second moments of a layer's inputs, the statistics that GPTQ works from."""

from __future__ import annotations

import torch


class Moments:
    """Means over tokens of ``x x^T`` (the Hessian, [K, K]) and, given targets, of ``t x^T`` ([T, K]); fp32 sums.

    x [..., K] is the input of the layer that is being quantised; t [..., T] is anything of the same tokens.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._squares: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self._crossed: dict[str, torch.Tensor] = {}

    def add(self, x: torch.Tensor, **targets: torch.Tensor) -> None:
        """Count the tokens of one step."""
        rows = x.reshape(-1, x.shape[-1]).float()
        with _exact_float32():
            self._squares = _accumulated(self._squares, rows, rows)
            self._sums["x"] = self._sums.get("x", 0) + rows.sum(0)
            for name, target in targets.items():
                other = target.reshape(-1, target.shape[-1]).float()
                self._crossed[name] = _accumulated(self._crossed.get(name), other, rows)
                self._sums[name] = self._sums.get(name, 0) + other.sum(0)
        self.tokens += rows.shape[0]

    @property
    def hessian(self) -> torch.Tensor:
        """fp32 [K, K]."""
        if self._squares is None:
            raise ValueError("no calibration tokens reached this layer")
        return self._squares / self.tokens

    def cross(self, name: str) -> torch.Tensor:
        """fp32 [T, K] of the target of that name."""
        return self._crossed[name] / self.tokens

    def mean(self, name: str = "x") -> torch.Tensor:
        """fp32 mean of the inputs ([K]) or of the target of that name ([T])."""
        return self._sums[name] / self.tokens


def _accumulated(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if total is None:
        return left.T @ right
    return total.addmm_(left.T, right)


class _exact_float32:
    """No TF32 inside: Hessians need their small eigenvalues."""

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._before
