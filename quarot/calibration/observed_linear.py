"""``ObservedLinear``: what stands in for a linear layer while its decoder layer is being calibrated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from quarot.calibration.fake_quantize import fake_quantize
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import linear_weight
from quarot.ops.hadamard import hadamard


class ObservedLinear(nn.Module):
    """The same function as the ``nn.Linear`` or ``RotatedLinear`` it replaces, with its true input open to an observer.

    The observer sees x after the online rotation and, with ``quantized_inputs``, after the quantiser: exactly what the
    integer GEMM will see. (Hessians of un-rotated inputs are the classic error here.)

    Attributes:
        source: the layer that was replaced; gives bias and rotation.
        matrix: weight in use [N, K]; becomes the dequantised one once the layer has been quantised.
        observer: called with x [..., K] before the product, or None.
        config: of this layer.
        quantized_inputs: quantise activations as at run time.
    """

    def __init__(self, source: nn.Module, config: QuarotConfig, quantized_inputs: bool = False) -> None:
        super().__init__()
        self.source = source
        self.config = config
        self.quantized_inputs = quantized_inputs
        self.matrix: torch.Tensor = linear_weight(source).detach()
        self.observer: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        rotation = getattr(self.source, "input_rotation", None)
        if rotation is not None:
            x = hadamard(x, rotation.order, rotation.pow2, rotation.inner)
        if self.quantized_inputs:
            x = fake_quantize(x, self.config.a_bits, self.config.a_clip, self.config.a_group_size)
        if self.observer is not None:
            self.observer(x)
        return F.linear(x, self.matrix, self.source.bias)  # type: ignore[arg-type]
