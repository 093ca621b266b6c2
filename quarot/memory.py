"""Running out of memory, in words that help: what was being done, and what to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def out_of_memory(what: str, lower: str) -> Iterator[None]:
    """Add to an out-of-memory error from inside what was being done, and what to lower; nested blocks add a line each.

    Args:
        what: with its sizes: ``"a forward of 64 x 8192 tokens"``.
        lower: ways out: ``"the batch, or prefill_chunk (now 16384)"``.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The same error, not one raised from it, which would keep the frames of the first, and their tensors, alive.
        error.args = (f"{error}\nquarot: out of memory in {what}: lower {lower}",)
        raise
