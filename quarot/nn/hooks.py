"""``HookWatch``: whether anybody waits for calls of some modules, cheap to ask before every token."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_RECORDER = "transformers.utils.output_capturing"
_ACCELERATE = "_hf_hook"


class HookWatch:
    """Looks into modules only when somebody has registered a hook since the last look, anywhere.

    A mixture of experts has thousands of linear layers, and a look into each of them takes longer than a decode step.
    PyTorch numbers its handles, so one comparison tells whether there is a new one. accelerate leaves an attribute
    instead, which is looked for in all modules, without running Python code for each.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self._clean_at = -1

    def __getstate__(self) -> dict[str, Any]:
        """A copy watches copies, with whatever hooks they came with."""
        return {"modules": self.modules, "_clean_at": -1}

    @functools.cached_property
    def _attributes(self) -> list[dict[str, Any]]:
        return [vars(module) for module in self.modules]

    def find(self) -> nn.Module | None:
        """A module with a hook, or None."""
        if torch.compiler.is_compiling():  # which would take the number of the newest handle for a constant
            return next((m for m in self.modules if _waits(m) or _ACCELERATE in vars(m)), None)
        if any(map(contains, self._attributes, repeat(_ACCELERATE))):
            return next(module for module in self.modules if _ACCELERATE in vars(module))
        newest = RemovableHandle.next_id
        if self._clean_at != newest:
            for module in self.modules:
                if _waits(module):
                    return module
            self._clean_at = newest
        return None


def _waits(module: nn.Module) -> bool:
    """Whether somebody waits for calls of a module.

    transformers leaves its recording hooks behind after the first forward that recorded hidden states or attention
    weights; in any other forward they do nothing.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", "") != _RECORDER for hook in hooks)
