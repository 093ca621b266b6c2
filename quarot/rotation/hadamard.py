"""Hadamard matrices by Sylvester, Paley, Williamson and Kronecker products, and the choice of one for a width.

A Hadamard matrix H of order m has entries +-1 and H H^T = m I; m is 1, 2 or a multiple of 4. The constructions here are
deterministic and part of the checkpoint format: a checkpoint stores the order, and loading rebuilds the same matrix.

* Sylvester: H_2m = H_2 (x) H_m, for powers of two.
* Paley I: q = 3 (mod 4) a prime power, order q + 1: ``I + S``, S skew, the Jacobsthal matrix Q of
  GF(q) with a border.
* Paley II: q = 1 (mod 4) a prime power, order 2(q + 1): with C = Q bordered,
  ``C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]]``.
* Williamson: four symmetric circulant blocks, orders 156 and 172 (:mod:`quarot.rotation.williamson`).
* Kronecker: H_a (x) H_b.
"""

from __future__ import annotations

import functools

import torch

from quarot.rotation.galois import jacobsthal_matrix, prime_power
from quarot.rotation.spec import HadamardSpec
from quarot.rotation.williamson import FIRST_ROWS

MAX_ORDER = 1024
"""Largest dense factor that :func:`hadamard_spec` chooses: more would cost more than 4-bit layers save."""


@functools.cache
def construction(order: int) -> str | None:
    """Name of the construction that gives a Hadamard matrix of this order, None where there is none here.

    ``"sylvester"``, ``"paley1"``, ``"paley2"``, ``"williamson"`` or ``"kronecker"``, the first that applies.
    """
    if order in (1, 2):
        return "sylvester"
    if order < 4 or order % 4:
        return None
    if order & (order - 1) == 0:
        return "sylvester"
    if prime_power(order - 1):
        return "paley1"
    if prime_power(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
        return "paley2"
    if order in FIRST_ROWS:
        return "williamson"
    return "kronecker" if _kronecker_factors(order) else None


def _kronecker_factors(order: int) -> tuple[int, int] | None:
    """``(a, b)`` with ``a * b == order`` and both constructible; the smallest b, so b is 2 if it can be."""
    for b in range(2, int(order**0.5) + 1):
        if order % b == 0 and construction(b) and construction(order // b):
            return order // b, b
    return None


@functools.cache
def hadamard_matrix(order: int) -> torch.Tensor:
    """The Hadamard matrix of this order that quarot uses: int8 [order, order] of +-1, on the CPU. Do not modify it.

    Raises:
        ValueError: no construction here gives this order.
    """
    match construction(order):
        case "sylvester":
            return _sylvester(order)
        case "paley1":
            return _paley1(order - 1)
        case "paley2":
            return _paley2(order // 2 - 1)
        case "williamson":
            return _williamson(FIRST_ROWS[order])
        case "kronecker":
            a, b = _kronecker_factors(order) or (order, 1)
            return torch.kron(hadamard_matrix(a), hadamard_matrix(b))
    raise ValueError(
        f"no Hadamard matrix of order {order} is known here: orders are 1, 2 and those multiples of 4 that Sylvester, "
        f"Paley I and II, Williamson (156, 172) or a Kronecker product of them give; use a block-diagonal transform"
    )


def _sylvester(order: int) -> torch.Tensor:
    """Entry (i, j) is (-1)^popcount(i & j)."""
    bits = torch.arange(order)[:, None] & torch.arange(order)
    parity = torch.zeros_like(bits)
    while bits.any():
        parity ^= bits & 1
        bits >>= 1
    return (1 - 2 * parity).to(torch.int8)


def _bordered(q: int, left: int) -> torch.Tensor:
    """The Jacobsthal matrix of GF(q) with a row of ones above and a column of ``left`` beside it; corner 0."""
    bordered = torch.ones(q + 1, q + 1, dtype=torch.int8)
    bordered[1:, 1:] = jacobsthal_matrix(q)
    bordered[1:, 0] = left
    bordered[0, 0] = 0
    return bordered


def _paley1(q: int) -> torch.Tensor:
    return _bordered(q, -1) + torch.eye(q + 1, dtype=torch.int8)


def _paley2(q: int) -> torch.Tensor:
    sum_difference = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    diagonal = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(_bordered(q, 1), sum_difference) + torch.kron(torch.eye(q + 1, dtype=torch.int8), diagonal)


def _williamson(first_rows: tuple[str, str, str, str]) -> torch.Tensor:
    """``[[A, B, C, D], [-B, A, -D, C], [-C, D, A, -B], [-D, -C, B, A]]`` of circulants given by their first rows."""
    first = [torch.tensor([1 if sign == "+" else -1 for sign in row], dtype=torch.int8) for row in first_rows]
    a, b, c, d = (torch.stack([row.roll(i) for i in range(len(row))]) for row in first)
    return torch.cat([torch.cat(row, 1) for row in ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))])


@functools.cache
def hadamard_spec(size: int, inner: int = 1) -> HadamardSpec | None:
    """The cheapest full-width Hadamard transform ``H_order (x) H_pow2 (x) I_inner`` of a dimension, or None.

    Cheapest is the smallest dense factor: 172 * 64 for 11008 (not 344 * 32), 28 * 512 for 14336, 924 * 32 for 29568.
    None where no order up to :data:`MAX_ORDER` exists, e.g. 13696, or 9, 14, 15 or 25 heads (``size = heads * inner``).

    Raises:
        ValueError: size is not a positive multiple of inner.
    """
    if size < 1 or inner < 1 or size % inner:
        raise ValueError(f"hadamard_spec: size {size} must be a positive multiple of inner {inner}")
    width = size // inner
    largest_pow2 = width & -width
    order = width // largest_pow2
    while order <= min(width, MAX_ORDER):
        if construction(order):
            return HadamardSpec(size, order, width // order, inner)
        order *= 2
    return None


@functools.cache
def block_hadamard_spec(size: int, block: int | None = None) -> HadamardSpec:
    """A block-diagonal transform of a dimension of ``size``: the exact fallback where no full-width one exists.

    Args:
        size: width of the dimension.
        block: width of one diagonal block; None takes the largest divisor of size that has a Hadamard transform
            (13696 = 107 blocks of 128, and 11008 itself: one block of 172 * 64).

    Raises:
        ValueError: block does not divide size, or has no Hadamard transform.
    """
    if block is None:
        block = next(b for b in range(size, 0, -1) if size % b == 0 and hadamard_spec(b))
    if block < 1 or size % block:
        raise ValueError(f"a Hadamard block of {block} does not divide a width of {size}")
    one = hadamard_spec(block)
    if one is None:
        raise ValueError(
            f"a width of {block} has no Hadamard transform; powers of two that divide {size} do, up to {size & -size}"
        )
    return HadamardSpec(size, one.order, one.pow2)
