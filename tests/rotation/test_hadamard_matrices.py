"""Hadamard matrices, the choice of factorisation, and the transform against its dense definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quarot.ops.hadamard import hadamard, hadamard_transform
from quarot.rotation.galois import jacobsthal_matrix, prime_power
from quarot.rotation.hadamard import block_hadamard_spec, construction, hadamard_matrix, hadamard_spec
from quarot.rotation.spec import HadamardSpec

# Every width that a supported model has, and the factorisation order * pow2 that is part of the checkpoint format.
FACTORS = {
    order * pow2: (order, pow2)
    for order, pow2s in {
        1: (64, 128, 256, 65536), 12: (8, 16, 128, 256, 1024), 20: (4, 128, 256, 1024), 28: (32, 128, 512, 1024),
        36: (16,), 44: (32, 128), 52: (128, 1024), 68: (256,), 76: (64, 128), 100: (32, 128, 256), 108: (128, 256),
        140: (64, 128), 148: (128,), 172: (64, 128), 180: (128,), 540: (16,), 684: (16,), 924: (32,),
    }.items()
    for pow2 in pow2s
}  # fmt: skip
HEADS = dict.fromkeys((3, 5, 6, 7, 9, 14, 15, 25)) | {
    12: (12, 1), 20: (20, 1), 24: (12, 2), 28: (28, 1), 32: (1, 32), 40: (20, 2), 48: (12, 4), 56: (28, 2), 72: (36, 2),
    80: (20, 4), 96: (12, 8),
}  # fmt: skip


def dense(spec: HadamardSpec) -> torch.Tensor:
    """The orthogonal matrix that a spec describes, by its definition."""
    core = (
        torch.kron(hadamard_matrix(spec.order), hadamard_matrix(spec.pow2)).double() / (spec.order * spec.pow2) ** 0.5
    )
    return torch.kron(torch.kron(torch.eye(spec.blocks), core), torch.eye(spec.inner))


def test_every_constructible_order_is_a_hadamard_matrix() -> None:
    orders = [m for m in range(1, 300) if construction(m)] + [344, 540, 684, 924]
    for order in orders:
        h = hadamard_matrix(order)
        assert h.dtype == torch.int8
        assert h.shape == (order, order)
        h = h.float()
        assert torch.equal(h @ h.T, order * torch.eye(order)), order
    assert [m for m in range(4, 260, 4) if m not in orders] == [92, 116, 184, 188, 232, 236]


CONSTRUCTIONS = {
    "sylvester": (1, 2, 64),
    "paley1": (12, 20, 28, 44, 68, 108, 140, 180, 344, 684),
    "paley2": (36, 52, 76, 100, 148, 540, 924),
    "williamson": (156, 172),
    "kronecker": (40, 112),
    None: (-4, 0, 3, 6, 92, 428),
}


@pytest.mark.parametrize(("name", "order"), [(name, order) for name in CONSTRUCTIONS for order in CONSTRUCTIONS[name]])
def test_construction_is_part_of_the_format(order: int, name: str | None) -> None:
    assert construction(order) == name


def test_folding_sylvester_bits_into_the_dense_factor_changes_nothing() -> None:
    assert torch.equal(hadamard_matrix(112), torch.kron(hadamard_matrix(28), hadamard_matrix(4)))
    assert torch.equal(hadamard_matrix(64), torch.kron(hadamard_matrix(4), hadamard_matrix(16)))


@pytest.mark.parametrize("q", [3, 9, 25, 27, 49, 125, 343])
def test_jacobsthal_matrix_of_primes_and_prime_powers(q: int) -> None:
    """Q Q^T = q I - J, Q J = 0; Q is symmetric for q = 1 (mod 4), skew for q = 3 (mod 4)."""
    matrix = jacobsthal_matrix(q).float()
    assert torch.equal(matrix @ matrix.T, q * torch.eye(q) - torch.ones(q, q))
    assert torch.equal(matrix.sum(1), torch.zeros(q))
    assert torch.equal(matrix.T, matrix if q % 4 == 1 else -matrix)


def test_prime_powers() -> None:
    assert [q for q in range(1, 30) if prime_power(q)] == [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29]
    assert prime_power(343) == (7, 3)
    with pytest.raises(ValueError, match="16 is not a power of an odd prime"):
        jacobsthal_matrix(16)


@pytest.mark.parametrize("size", FACTORS)
def test_table_of_widths_is_orthogonal_with_flat_entries(size: int) -> None:
    spec = hadamard_spec(size)
    assert spec is not None
    assert (spec.order, spec.pow2, spec.blocks) == (*FACTORS[size], 1)
    rows = torch.randn(2, size, dtype=torch.float64)
    once = hadamard_transform(rows)
    torch.testing.assert_close(once @ once.T, rows @ rows.T, rtol=1e-12, atol=1e-9)
    impulse = torch.zeros(1, size, dtype=torch.float64)
    impulse[0, size // 3] = 1
    torch.testing.assert_close(
        hadamard_transform(impulse).abs(), torch.full((1, size), size**-0.5, dtype=torch.float64)
    )


@pytest.mark.parametrize("heads", HEADS)
def test_table_of_head_counts(heads: int) -> None:
    spec = hadamard_spec(16 * heads, inner=16)
    assert (spec and (spec.order, spec.pow2)) == HEADS[heads]
    full = hadamard_spec(16 * heads)
    assert full is not None
    assert full.blocks == 1


def test_fallback_is_block_diagonal_and_says_so() -> None:
    assert hadamard_spec(13696) is None
    spec = block_hadamard_spec(13696)
    assert (spec.order, spec.pow2, spec.blocks) == (1, 128, 107)
    assert str(spec) == "107 blocks of H128"
    assert block_hadamard_spec(11008) == hadamard_spec(11008)
    assert block_hadamard_spec(11008, 128) == HadamardSpec(11008, 1, 128)
    rows = torch.randn(2, 13696, dtype=torch.float64)
    turned = hadamard_transform(rows, spec)
    torch.testing.assert_close(turned @ turned.T, rows @ rows.T)
    with pytest.raises(ValueError, match="does not divide a width of 11008"):
        block_hadamard_spec(11008, 100)
    with pytest.raises(ValueError, match="no Hadamard transform; powers of two that divide 11008 do, up to 256"):
        block_hadamard_spec(11008, 43)


SPECS = [
    HadamardSpec(36 * 16, 36, 16),
    HadamardSpec(172 * 2, 172, 2),
    HadamardSpec(256, 1, 256),
    HadamardSpec(3 * 64, 1, 64),
    HadamardSpec(12 * 16, 12, 1, 16),
    HadamardSpec(24 * 8, 12, 2, 8),
    HadamardSpec(8 * 5, 1, 8, 5),
    HadamardSpec(7, 1, 1),
    HadamardSpec(2 * 12 * 2 * 3, 12, 2, 3),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_transform_equals_linear_with_the_dense_matrix(spec: HadamardSpec, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, spec.size, dtype=torch.float64).to(dtype)
    y = hadamard_transform(x, spec)
    exact = F.linear(x.double(), dense(spec))
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.data_ptr() != x.data_ptr()
    # One rounding to the dtype, with fp32 arithmetic before it.
    budget = torch.finfo(dtype).eps * 0.6 * exact.abs() + 2e-6 * (dtype != torch.float64) + 1e-14
    assert ((y.double() - exact).abs() <= budget).all()


def test_odd_shapes_and_strides() -> None:
    spec = HadamardSpec(24, 12, 2)
    base = torch.randn(24, 7, dtype=torch.float64)
    assert torch.equal(hadamard_transform(base.T, spec), hadamard_transform(base.T.contiguous(), spec))
    shifted = torch.randn(2, 25, dtype=torch.float64)[:, 1:]
    assert torch.equal(hadamard_transform(shifted, spec), hadamard_transform(shifted.clone(), spec))
    assert hadamard_transform(torch.empty(2, 0, 24), spec).shape == (2, 0, 24)
    assert hadamard_transform(torch.ones(24), spec).shape == (24,)


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    assert hadamard_transform(x).isnan().all(1).tolist() == [False, True, False]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="scalar tensor"):
        hadamard_transform(torch.tensor(1.0))
    with pytest.raises(ValueError, match="block_hadamard_spec"):
        hadamard_transform(torch.ones(2, 14))
    with pytest.raises(ValueError, match="for a width of 8"):
        hadamard_transform(torch.ones(2, 16), HadamardSpec(8, 1, 8))
    with pytest.raises(ValueError, match="multiple of order 12"):
        hadamard(torch.ones(2, 16), 12, 2, 1)
    with pytest.raises(TypeError, match="floating point"):
        hadamard(torch.ones(2, 16, dtype=torch.int8), 1, 16, 1)
    with pytest.raises(TypeError, match=r"16 bits or more, got torch.float8_e4m3fn"):
        hadamard(torch.ones(2, 16).to(torch.float8_e4m3fn), 1, 16, 1)
    with pytest.raises(ValueError, match="size must be a positive integer, got True"):
        HadamardSpec(True, 1, 1)
    with pytest.raises(ValueError, match="order 92 is known here"):
        hadamard_matrix(92)


def test_opcheck_and_compile() -> None:
    torch.library.opcheck(torch.ops.quarot.hadamard.default, (torch.randn(3, 24), 12, 2, 1))
    x = torch.randn(3, 24)
    spec = HadamardSpec(24, 12, 2)
    compiled = torch.compile(lambda v: hadamard_transform(v, spec) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), hadamard_transform(x) * 2)
