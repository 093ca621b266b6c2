"""Quadratic residues of the finite field GF(q), q a power of an odd prime: what Paley's Hadamard matrices are made of.

GF(p^k) is the polynomials of degree below k over the integers modulo p, reduced by one monic irreducible polynomial of
degree k. Element number ``e`` has the base-p digits of ``e`` as coefficients, lowest degree first.
"""

from __future__ import annotations

import functools
import itertools

import torch


@functools.cache
def prime_power(q: int) -> tuple[int, int] | None:
    """``(p, k)`` with ``q == p**k`` and p prime, or None."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    k, rest = 0, q
    while rest % p == 0:
        k, rest = k + 1, rest // p
    return (p, k) if rest == 1 else None


def _remainder(dividend: list[int], divisor: tuple[int, ...], p: int) -> list[int]:
    """Coefficients of ``dividend mod divisor`` over Z_p; the divisor is monic, lowest degree first."""
    rest, degree = list(dividend), len(divisor) - 1
    for top in range(len(rest) - 1, degree - 1, -1):
        factor = rest[top]
        for i, coefficient in enumerate(divisor):
            rest[top - degree + i] = (rest[top - degree + i] - factor * coefficient) % p
    return rest[:degree]


def _irreducible(p: int, k: int) -> tuple[int, ...]:
    """The first monic irreducible polynomial of degree k over Z_p, in the order of ``itertools.product``."""
    monic = {d: [(*low, 1) for low in itertools.product(range(p), repeat=d)] for d in range(1, k // 2 + 1)}
    for low in itertools.product(range(p), repeat=k):
        candidate = (*low, 1)
        if all(any(_remainder(list(candidate), divisor, p)) for d in monic for divisor in monic[d]):
            return candidate
    raise AssertionError("an irreducible polynomial of every degree exists over every finite field")


@functools.cache
def jacobsthal_matrix(q: int) -> torch.Tensor:
    """``Q[i, j] = chi(i - j)`` over GF(q): int8 [q, q]; chi is 0 at zero, 1 on nonzero squares and -1 elsewhere.

    Raises:
        ValueError: q is not a power of an odd prime.
    """
    factors = prime_power(q)
    if factors is None or factors[0] == 2:
        raise ValueError(f"jacobsthal_matrix: {q} is not a power of an odd prime")
    p, k = factors
    weights = p ** torch.arange(k)
    digits = torch.arange(q)[:, None] // weights % p

    modulus = _irreducible(p, k) if k > 1 else (0, 1)
    chi = torch.full((q,), -1, dtype=torch.int8)
    for element in digits[1:].tolist():
        square = [0] * (2 * k - 1)
        for i, j in itertools.product(range(k), repeat=2):
            square[i + j] = (square[i + j] + element[i] * element[j]) % p
        reduced = _remainder(square, modulus, p) if k > 1 else square
        chi[sum(c * p**i for i, c in enumerate(reduced))] = 1
    chi[0] = 0

    difference = (digits[:, None, :] - digits[None, :, :]) % p
    return chi[(difference * weights).sum(-1)]
