"""Moments of a layer's inputs, the statistics that GPTQ works from."""

from __future__ import annotations

import torch

from quarot.precision import tf32


class Moments:
    """Weighted means over tokens of ``x`` and ``x x^T`` (the Hessian) and, given targets t, of ``t`` and ``t x^T``.

    x [..., K] is the input of the layer that is being quantised; t [..., T] is anything of the same tokens. fp32 sums.

    Attributes:
        tokens: how many were counted.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._weight: torch.Tensor | float = 0.0
        self._means: dict[str, torch.Tensor] = {}
        self._products: dict[str, torch.Tensor] = {}

    def add(self, x: torch.Tensor, weight: torch.Tensor | None = None, **targets: torch.Tensor) -> None:
        """Count the tokens of one step, each with its ``weight`` [..., 1] (1 when None)."""
        root = torch.ones(1, 1, device=x.device) if weight is None else weight.reshape(-1, 1).float().sqrt()
        rows = x.reshape(-1, x.shape[-1]).float() * root
        self.tokens += rows.shape[0]
        self._weight = self._weight + root.square().sum() * (rows.shape[0] if weight is None else 1)
        with tf32(False):  # Hessians need their small eigenvalues
            for name, values in {"x": x, **targets}.items():
                other = rows if name == "x" else values.reshape(-1, values.shape[-1]).float() * root
                self._means[name] = self._means.get(name, 0.0) + (other * root).sum(0)
                if name in self._products:
                    self._products[name].addmm_(other.T, rows)
                else:
                    self._products[name] = other.T @ rows

    @property
    def hessian(self) -> torch.Tensor:
        """fp32 [K, K].

        Raises:
            ValueError: no tokens were counted.
        """
        if "x" not in self._products:
            raise ValueError("no calibration tokens reached this layer")
        return self._products["x"] / self._weight

    @property
    def targets(self) -> set[str]:
        """Names of the targets that were given."""
        return set(self._products) - {"x"}

    def cross(self, name: str) -> torch.Tensor:
        """fp32 [T, K] of the target of that name."""
        return self._products[name] / self._weight

    def mean(self, name: str = "x") -> torch.Tensor:
        """fp32 mean of the inputs ([K]) or of the target of that name ([T])."""
        return self._means[name] / self._weight
