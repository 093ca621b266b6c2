"""``Gains``: whether the gains of some norms are 1, as the fused ops take them to be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class Gains:
    """Looks at the gains again only when one of them was replaced, moved or written to: a look waits for the device.

    A norm without a weight has no gain. One on ``meta``, offloaded, is not known to be 1.
    """

    def __init__(self, norms: Iterable[nn.Module]) -> None:
        self.norms = list(norms)
        self._seen: list[tuple[int, int]] | None = None
        self._ones = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_seen": None}

    def are_ones(self) -> bool:
        """Whether every gain is exactly 1."""
        weights = [weight for norm in self.norms if (weight := norm._parameters.get("weight")) is not None]
        seen = [(weight.data_ptr(), _writes(weight)) for weight in weights]
        if seen != self._seen:
            self._ones = not any(weight.is_meta or bool((weight != 1).any()) for weight in weights)
            self._seen = seen
        return self._ones


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
