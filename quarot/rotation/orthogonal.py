"""The orthogonal maps that are folded into weights: randomised Hadamard transforms and dense matrices, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quarot.ops.hadamard import hadamard_reference
from quarot.rotation.spec import HadamardSpec


class Rotation(Protocol):
    """An orthogonal R of some size, applied to the last dimension (to each run of ``size`` in it)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``R x`` for every row x: [..., k * size] to the same shape and dtype."""
        ...


@dataclass(frozen=True)
class HadamardRotation:
    """``R = diag(after) H diag(before)``: H from ``spec``, the signs float64 +-1 [spec.size] or None."""

    spec: HadamardSpec
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._flip(x, self.before)
        x = hadamard_reference(x, self.spec.order, self.spec.pow2, self.spec.inner)
        return self._flip(x, self.after)

    def _flip(self, x: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
        if signs is None:
            return x
        signs = signs.to(device=x.device, dtype=x.dtype)
        return (x.unflatten(-1, (-1, self.spec.size)) * signs).flatten(-2)


@dataclass(frozen=True)
class MatrixRotation:
    """A dense orthogonal matrix, float64 [size, size]."""

    matrix: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix.to(device=x.device, dtype=x.dtype)
        return (x.unflatten(-1, (-1, matrix.shape[0])) @ matrix.T).flatten(-2)


def random_signs(size: int, seed: int) -> torch.Tensor:
    """float64 [size] of +-1, the same on every machine."""
    bits = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    return (2 * bits - 1).to(torch.float64)


def random_orthogonal(size: int, seed: int) -> torch.Tensor:
    """A uniformly random orthogonal float64 matrix: the Q of a gaussian matrix, signs fixed by the diagonal of R."""
    gaussian = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(gaussian)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).contiguous()
