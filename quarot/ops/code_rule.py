"""How rows become codes: the arguments that every quantising op ends with, and what follows from them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from quarot.quantization.packing import K_ALIGNMENT, padded

BYTES, NIBBLES, UPPER_HALVES = 0, 1, 2
"""How codes lie in memory, as csrc/device/code_layout.h numbers it."""

Codes = tuple[torch.Tensor, torch.Tensor]
"""Codes int8 [M, Kp] (packed: uint8 [M, Kp/2]) and scale fp32 [M]."""

_ROW_ALIGNMENT, _FEW_ROWS = 128, 16


class CodeRule(NamedTuple):
    """``int bits, float clip, bool packed=False, bool upper=False`` of a schema (:mod:`quarot.ops.quantize_per_token`).

    Attributes:
        bits: of a code, 2 to 8.
        clip: of the largest |x| of a row, the part that the largest code stands for.
        packed: two codes a byte.
        upper: codes in the upper halves of their bytes.
    """

    bits: int
    clip: float
    packed: bool = False
    upper: bool = False

    def check(self) -> CodeRule:
        """The rule itself.

        Raises:
            ValueError: codes that the ops do not have.
        """
        bits, clip, packed, upper = self
        if not 2 <= bits <= 8:
            raise ValueError(f"activation codes have 2 to 8 bits, not {bits}")
        if not 0 < clip < math.inf:
            raise ValueError(f"rows are clipped at a positive part of their largest value, not at {clip}")
        if packed and bits != 4:
            raise ValueError(f"packed activations are 4-bit codes, two a byte; bits={bits} needs packed=False")
        if upper and (packed or bits > 4):
            raise ValueError(
                f"codes of {bits} bits{', packed,' if packed else ''} have no upper half to lie in: upper=False"
            )
        return self

    @property
    def clip_over_qmax(self) -> float:
        """``clip / qmax`` rounded once to fp32, as a Python float."""
        return _clip_over_qmax(self.clip, self.bits)

    @property
    def layout(self) -> int:
        """How the codes lie in memory."""
        return NIBBLES if self.packed else UPPER_HALVES if self.upper else BYTES

    def outputs(self, rows: int | torch.SymInt, k: int, like: torch.Tensor) -> Codes:
        """Uninitialised codes and scale for ``rows`` rows of ``k`` columns, on the device of ``like``."""
        self.check()
        width = padded(k, K_ALIGNMENT)
        codes = (
            like.new_empty((rows, width // 2), dtype=torch.uint8)
            if self.packed
            else like.new_empty((rows, width), dtype=torch.int8)
        )
        return codes, like.new_empty((rows,), dtype=torch.float32)

    def buffers(self, rows: int, k: int, like: torch.Tensor) -> Codes:
        """What a kernel fills: :meth:`outputs`, with memory behind the last row up to a multiple of 128 of them.

        The GEMM reads tokens by tiles. The copy engine fills rows that are not there with zeros, more slowly than it
        copies, so it is given rows of anything (``csrc/gemm/NOTES.md``). Up to 16 tokens are not read by tiles.
        """
        more = -rows % _ROW_ALIGNMENT if rows > _FEW_ROWS else 0
        codes, scale = self.outputs(rows + more, k, like)
        return codes[:rows], scale[:rows]


@functools.lru_cache(maxsize=64)
def _clip_over_qmax(clip: float, bits: int) -> float:
    return torch.tensor(clip / (2 ** (bits - 1) - 1), dtype=torch.float32).item()
