"""What an orthogonal Hadamard transform of one dimension looks like, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HadamardSpec:
    """``I_blocks (x) H_order (x) H_pow2 (x) I_inner`` on a dimension of ``size``, scaled to be orthonormal.

    Attributes:
        size: width of the dimension, ``blocks * order * pow2 * inner``.
        order: order of the dense +-1 factor (:func:`quarot.rotation.hadamard.hadamard_matrix`), 1 for none.
        pow2: order of the Sylvester factor, a power of two, 1 for none.
        inner: width of the identity on the inside; the cross-head transform of the paper (section 4, "Hadamard heads")
            is ``inner = head_dim``.

    ``blocks > 1`` is a block-diagonal transform, the exact fallback where no Hadamard matrix of the full size is known.
    """

    size: int
    order: int
    pow2: int
    inner: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "order", "pow2", "inner"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"HadamardSpec: {name} must be a positive integer, got {value!r}")
        if self.pow2 & (self.pow2 - 1):
            raise ValueError(f"HadamardSpec: pow2 must be a power of two, got {self.pow2}")
        if self.order > 2 and self.order % 4:
            raise ValueError(f"HadamardSpec: a Hadamard matrix has order 1, 2 or a multiple of 4, got {self.order}")
        if self.size % (self.order * self.pow2 * self.inner):
            raise ValueError(
                f"HadamardSpec: size {self.size} is not a multiple of order {self.order} * pow2 {self.pow2} "
                f"* inner {self.inner}"
            )

    @property
    def blocks(self) -> int:
        """Number of independent diagonal blocks."""
        return self.size // (self.order * self.pow2 * self.inner)

    def __str__(self) -> str:
        text = f"H{self.order}*{self.pow2}" if self.order > 1 else f"H{self.pow2}"
        text = f"{text}(x)I{self.inner}" if self.inner > 1 else text
        return f"{self.blocks} blocks of {text}" if self.blocks > 1 else text

    def to_dict(self) -> dict[str, int]:
        """JSON form, stored in ``config.json``."""
        return {"size": self.size, "order": self.order, "pow2": self.pow2, "inner": self.inner}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HadamardSpec:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: fields are missing or unknown, or do not hold together.
        """
        if not isinstance(data, dict) or not {"size", "order", "pow2"} <= set(data) <= {
            "size",
            "order",
            "pow2",
            "inner",
        }:
            raise ValueError(f"HadamardSpec: {data!r} must hold size, order, pow2 and inner")
        return cls(**data)
