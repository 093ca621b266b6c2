"""The package ``fast_hadamard_transform`` as another way to run op ``hadamard`` on a GPU, for who has it installed.

``QUAROT_HADAMARD=fast_hadamard_transform`` selects it for the plain transform along the last dimension (``inner`` 1,
Sylvester factor of 8 to 32768); everything else, the fused quantisers among it, keeps quarot's kernels. Its result is
rounded to the dtype of x between the two factors, where quarot rounds once at the end.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable

import torch

from quarot.precision import tf32
from quarot.rotation.hadamard import hadamard_matrix

NAME = "fast_hadamard_transform"
_BACKENDS = ("auto", NAME)
_POW2 = range(8, 32769)
"""Lengths its kernel takes without padding."""


@functools.cache
def package() -> Callable[..., torch.Tensor] | None:
    """Its ``hadamard_transform(x, scale)``, or None where it is not installed."""
    try:
        return importlib.import_module(NAME).hadamard_transform
    except ImportError:
        return None


@functools.cache
def selected() -> bool:
    """Whether $QUAROT_HADAMARD asks for it; read once.

    Raises:
        ValueError: an unknown name.
        ImportError: it is asked for and not installed.
    """
    value = os.environ.get("QUAROT_HADAMARD", "auto")
    if value not in _BACKENDS:
        raise ValueError(f"QUAROT_HADAMARD={value!r} is not one of {', '.join(_BACKENDS)}")
    if value == NAME and package() is None:
        raise ImportError(
            f"QUAROT_HADAMARD={NAME}, but that package cannot be imported; install it from its repository (the archive"
            " on PyPI lacks its CUDA sources), or unset the variable"
        )
    return value == NAME


def serves(order: int, pow2: int, inner: int) -> bool:
    """Whether it can run this transform."""
    return inner == 1 and pow2 in _POW2


def transform(x: torch.Tensor, order: int, pow2: int) -> torch.Tensor:
    """Op ``hadamard`` with ``inner`` 1: x [..., d] fp16, bf16 or fp32 -> the same shape and dtype."""
    function = package()
    assert function is not None
    rows = x.reshape(-1, order, pow2)
    y = function(rows, (order * pow2) ** -0.5)
    if order > 1:
        with tf32(False):
            y = torch.matmul(_factor(order, x.dtype, x.device), y)
    return y.reshape(x.shape)


@functools.lru_cache(maxsize=64)
def _factor(order: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return hadamard_matrix(order).to(device=device, dtype=dtype)
