"""``SettingsWatch``: whether linear layers round their inputs as they did when something was made of them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from quarot.nn.quant_linear import SETTINGS, QuantLinear


class SettingsWatch:
    """Looks at its layers again only when ``a_clip`` or the like was set since, of any layer anywhere."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [module for module in modules if isinstance(module, QuantLinear)]
        self._first = self._now()
        self._changes: int | None = QuantLinear.changes
        self._kept = True

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_changes": None}  # another process counts from 0

    def _now(self) -> list[tuple[Any, ...]]:
        return list(map(attrgetter(*SETTINGS), self.layers))

    def are_kept(self) -> bool:
        """Whether every layer has the settings it had."""
        if torch.compiler.is_compiling():  # the numbers are guards of what is compiled
            return True
        if self._changes != QuantLinear.changes:
            self._kept, self._changes = self._now() == self._first, QuantLinear.changes
        return self._kept
