"""Whether float32 matrix products on a GPU may be rounded to TF32 (10 bits of mantissa) on the way in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 inside the block (also a decorator), whatever the user allows elsewhere.

    The switch is that of the whole process, so keep blocks short; ``torch.compile`` does not look inside one: products
    of modules go through :func:`quarot.ops.float32_matmul.float32_matmul`.
    """
    matmul = torch.backends.cuda.matmul
    name, wanted = "allow_tf32", allowed
    try:
        before = matmul.allow_tf32
    except RuntimeError:  # set by the newer name (torch 2.9), which does not mix with the older
        name, before, wanted = "fp32_precision", matmul.fp32_precision, "tf32" if allowed else "ieee"  # type: ignore[assignment]
    if before == wanted:
        yield
        return
    setattr(matmul, name, wanted)
    try:
        yield
    finally:
        setattr(matmul, name, before)
