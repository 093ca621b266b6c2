"""The only code that knows the hooks of transformers: loading, saving, attention, masks and generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# First of all: reading this module registers quarot's quantizer, which would be half read if it were what asked for it.
import transformers.quantizers.auto  # noqa: F401

if TYPE_CHECKING:
    from quarot.integrations.transformers.attachment import attach, detach
    from quarot.integrations.transformers.loading import load
    from quarot.integrations.transformers.skeleton import prepare

_PLACES = {"attach": "attachment", "detach": "attachment", "load": "loading", "prepare": "skeleton"}

__all__ = ["attach", "detach", "load", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
