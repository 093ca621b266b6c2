"""``RotatedLinear``: a linear layer that rotates its input and whose weight holds the inverse rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quarot.ops.hadamard import hadamard
from quarot.rotation.spec import HadamardSpec


class RotatedLinear(nn.Module):
    """``y = F.linear(hadamard(x), rotated_weight, bias)`` with ``rotated_weight = W H^T``, so that ``y = W x + bias``.

    The weight is not called ``weight``: a checkpoint that is loaded as a plain model misses it loudly.

    Args:
        in_features, out_features: as in ``nn.Linear``.
        bias: whether there is a bias.
        input_rotation: the online transform of the input, of size ``in_features``.
        dtype, device: of the parameters (the device may be ``meta``).

    Attributes:
        rotated_weight: [out_features, in_features], the weight in the basis of the rotated input.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        input_rotation: HadamardSpec,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if input_rotation.size != in_features:
            raise ValueError(f"RotatedLinear: rotation {input_rotation} does not fit {in_features} input features")
        self.in_features = in_features
        self.out_features = out_features
        self.input_rotation = input_rotation
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.rotated_weight = nn.Parameter(weight, requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, input_rotation: HadamardSpec) -> RotatedLinear:
        """Take over the storage of a linear layer whose weight already holds the inverse rotation."""
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            input_rotation=input_rotation,
            dtype=linear.weight.dtype,
            device="meta",
        )
        module.rotated_weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        if linear.bias is not None:
            module.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        return module.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]; the transform accumulates in fp32 (fp64 for fp64 inputs)."""
        spec = self.input_rotation
        return F.linear(hadamard(x, spec.order, spec.pow2, spec.inner), self.rotated_weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"input_rotation={self.input_rotation}"
        )
