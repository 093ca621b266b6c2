"""``Gains``: whether the gains of some norms are 1, as the fused ops take them to be."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn


class Gains:
    """Looks at the gains again only when one of them was replaced, moved or written to: a look waits for the device.

    Writing through ``.data`` (``weight.data.mul_(2)``) counts nowhere, and is not noticed.

    A norm without a weight has no gain. One on ``meta``, offloaded, is not known to be 1.
    """

    def __init__(self, norms: Iterable[nn.Module]) -> None:
        self.norms = [norm for norm in norms if norm._parameters.get("weight") is not None]
        self._seen: tuple[list[int], list[int]] | None = None
        self._ones = False

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"_seen": None}
        state.pop("_parameters", None)
        return state

    @functools.cached_property
    def _parameters(self) -> list[dict[str, Tensor]]:
        return [norm._parameters for norm in self.norms]  # type: ignore[misc]

    def are_ones(self) -> bool:
        """Whether every gain is exactly 1."""
        weights = list(map(itemgetter("weight"), self._parameters))
        try:
            writes = list(map(attrgetter("_version"), weights))
        except RuntimeError:  # made in inference mode: nobody counts
            writes = []
        seen = list(map(Tensor.data_ptr, weights)), writes
        if seen != self._seen:
            self._ones = not any(weight.is_meta or bool((weight != 1).any()) for weight in weights)
            self._seen = seen
        return self._ones
