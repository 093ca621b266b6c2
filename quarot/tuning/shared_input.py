"""What linear layers that read the same activations share while they are trained."""

from __future__ import annotations

import torch

from quarot.rotation.spec import HadamardSpec
from quarot.tuning.straight_through import quantize_activations
from quarot.tuning.transform import transform


class SharedInput:
    """The online transform and the quantiser in front of one or more layers, run once a forward pass.

    Args:
        rotation: the online transform, or None.
        bits, group_size: of the quantiser.
        readers: how many layers call this in a forward pass, one after the other, with the same tensor.
    """

    def __init__(self, rotation: HadamardSpec | None, bits: int, group_size: int | None, readers: int) -> None:
        self.rotation, self.bits, self.group_size, self.readers = rotation, bits, group_size, readers
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._reads = 0

    def __call__(self, x: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        """[..., K] as the integer product sees it; computed for the first reader, forgotten after the last."""
        if self._last is None or self._last[0] is not x:
            self._last = x, quantize_activations(transform(x, self.rotation), self.bits, clip, self.group_size)
            self._reads = 0
        result = self._last[1]
        self._reads += 1
        if self._reads == self.readers:
            self._last = None
        return result
