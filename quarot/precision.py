"""Whether float32 matrix products on a GPU may be rounded to TF32 (10 bits of mantissa) on the way in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 inside the block (also a decorator), whatever the user allows elsewhere.

    PyTorch has one switch for the whole process, so blocks of several threads share it: while any of them forbids, none
    rounds, and only the end of the last one brings the user's setting back. Of blocks inside each other the inner one
    counts. What other threads compute outside of blocks sees the switch too: keep blocks short.

    ``torch.compile`` does not look inside one: products of modules go through
    :func:`quarot.ops.float32_matmul.float32_matmul`.
    """
    block = object()
    _switch.begin(block, allowed)
    try:
        yield
    finally:
        _switch.end(block)


class _Switch:
    """PyTorch's switch and the blocks that are open, of all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: dict[object, tuple[int, bool]] = {}  # thread and wish, in the order they began
        self.name, self.users, self.set = "", None, None  # of _NAMES, what the user said, what was said here last

    def begin(self, block: object, allowed: bool) -> None:
        with self.lock:
            if not self.blocks:
                self.name = _name()
                self.users = self.set = _read(self.name)
            self.blocks[block] = threading.get_ident(), allowed
            self.apply()

    def end(self, block: object) -> None:
        with self.lock:
            del self.blocks[block]
            self.apply()

    def apply(self) -> None:
        """Say what the open blocks want; without any, what the user said, unless somebody spoke in between."""
        wishes = dict(self.blocks.values())  # the innermost of every thread
        wanted, found = _NAMES[self.name][all(wishes.values())] if wishes else self.users, _read(self.name)
        if wanted != found and (wishes or found == self.set):
            if self.name == _WHOLE:
                torch.set_float32_matmul_precision(wanted)
            else:
                setattr(torch.backends.cuda.matmul, self.name, wanted)
        self.set = wanted


_WHOLE = "float32_matmul_precision"
_NAMES: dict[str, tuple[Any, Any]] = {
    _WHOLE: ("highest", "high"),
    "allow_tf32": (False, True),
    "fp32_precision": ("ieee", "tf32"),
}
"""``torch.set_float32_matmul_precision``, and attributes of ``torch.backends.cuda.matmul`` that mean it, with their
values for no and yes."""


def _name() -> str:
    """The one to go by. The first also sets what CPUs do, and "medium" does not come back through the others."""
    if _read(_WHOLE) == "medium":
        return _WHOLE
    return "fp32_precision" if _read("allow_tf32") is None else "allow_tf32"


def _read(name: str) -> Any:
    try:
        return torch.get_float32_matmul_precision() if name == _WHOLE else getattr(torch.backends.cuda.matmul, name)
    except RuntimeError:  # set by a newer name (torch 2.9), which does not mix with the older ones
        return None


_switch = _Switch()
