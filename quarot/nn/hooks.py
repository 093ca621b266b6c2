"""``HookWatch``: whether anybody waits for calls of some modules, or took them over, cheap to ask for every token."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every
from torch.utils.hooks import RemovableHandle

_HARMLESS = ("transformers.utils.output_capturing", "quarot.integrations.transformers.generation")
"""Modules whose hooks do nothing that a recorded step would miss. The former is left behind by the first forward that
recorded hidden states or attention weights, and sleeps in any other; the latter passes in a cache."""
_ATTRIBUTES = ("_hf_hook", "forward")
"""What accelerate, and whoever gives one module a ``forward`` of its own, leave in it."""


class HookWatch:
    """Looks into modules only when somebody has registered a hook since the last look, anywhere.

    A mixture of experts has thousands of linear layers, and a look into each of them takes longer than a decode step.
    PyTorch numbers its handles, so one comparison tells whether there is a new one. What leaves attributes instead is
    looked for in all modules, without running Python code for each.
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

    def find(self, attributes: bool = True) -> nn.Module | None:
        """A module with a hook or a ``forward`` of its own, or None.

        Args:
            attributes: False looks for PyTorch's own hooks only.
        """
        if torch.compiler.is_compiling():  # which would take the number of the newest handle for a constant
            return next((m for m in self.modules if _waits(m) or _ATTRIBUTES[0] in vars(m)), None)
        if attributes and any(any(map(contains, self._attributes, repeat(name))) for name in _ATTRIBUTES):
            taken = next(filter(_is_taken, self.modules), None)
            if taken is not None:
                return taken
        newest = RemovableHandle.next_id
        if self._clean_at != newest:
            for module in self.modules:
                if _waits(module):
                    return module
            self._clean_at = newest
        return None


def hooking(module: nn.Module) -> str:
    """What :meth:`HookWatch.find` found, in words."""
    return f"{type(module).__name__} has a hook, or a forward of its own"


def _is_taken(module: nn.Module) -> bool:
    """accelerate leaves the class's own method behind when it removes its hook."""
    own = vars(module).get("forward")
    replaced = own is not None and getattr(own, "__func__", None) is not type(module).forward
    return replaced or "_hf_hook" in vars(module)


def _waits(module: nn.Module) -> bool:
    """Whether somebody waits for calls of a module, or of all modules there are."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*every._global_forward_hooks.values(), *every._global_forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", "") not in _HARMLESS for hook in hooks)
