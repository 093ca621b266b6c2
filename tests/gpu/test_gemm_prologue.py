"""GEMMs that make their own codes against the two kernels they stand for: bit for bit."""

from __future__ import annotations

import pytest
import torch

from quarot.ops import add_rms_norm_gemm_w4a4 as norm_gemm
from quarot.ops import add_rms_norm_quantize as norm
from quarot.ops import gemm_w4a4 as gemm
from quarot.ops import hadamard_gemm_w4a4 as heads_gemm
from quarot.ops import hadamard_quantize as heads
from quarot.ops import registry
from quarot.ops import silu_mul_hadamard_gemm_w4a4 as silu_gemm
from quarot.ops import silu_mul_hadamard_quantize as silu
from quarot.rotation.hadamard import hadamard_spec

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None, reason="needs a GPU and the compiled extension"
)

DTYPES = [torch.float16, torch.bfloat16]
# Llama-2-7B, Llama-3-8B, Llama-2-70B; smaller than a warp's columns, odd parts of 32 and 256, few and odd outputs.
SIZES = [(12288, 4096), (22016, 4096), (6144, 4096), (10240, 8192), (960, 576), (20, 5120), (1, 40), (4096, 2056)]
HEADS = [(32, 128), (32, 64), (12, 64), (28, 128), (36, 32), (64, 64), (20, 32), (40, 64)]


def linear(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tiles = torch.randint(0, 256, (-(-n // 16), -(-k // 32), 256), dtype=torch.uint8, device="cuda")
    return tiles, torch.rand(n, device="cuda"), torch.randn(n, device="cuda", dtype=torch.float16)


def rows(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Six orders of magnitude between rows, and rows that need the special cases."""
    x = torch.randn(m, k, device="cuda") * torch.logspace(-3, 2, m, device="cuda")[:, None]
    x[0, k // 3] = 50.0
    x = x.to(dtype)
    if m >= 5:
        x[1] = 0
        x[2, k // 2] = torch.nan
        x[3, k - 1] = -torch.inf
    return x


def poison(nbytes: int) -> None:
    """Leave garbage in the blocks that the next torch.empty gets."""
    for size in {nbytes, nbytes // 2, 4096}:
        torch.full((max(size, 1),), 0x5A, dtype=torch.uint8, device="cuda")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check_norm(x: torch.Tensor, residual: torch.Tensor | None, bits: int, weight: tuple[torch.Tensor, ...]) -> None:
    arguments = (x, residual, 1e-5, bits, 0.9, *weight)
    assert norm_gemm.available(*arguments) is None
    codes, scale, total = norm.cuda(x, residual, 1e-5, bits, 0.9)
    expected = gemm.cuda(codes, scale, *weight, x.dtype)
    poison(2 * x.shape[0] * weight[1].shape[0])
    got, got_total = norm_gemm.cuda(*arguments)
    assert_same(got_total, total)
    assert_same(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES, ids=str)
def test_norm(n: int, k: int, dtype: torch.dtype) -> None:
    weight = linear(n, k)
    for m in range(1, 9):
        x, residual = rows(m, k, dtype), torch.randn(m, k, device="cuda").to(dtype)
        residual[m - 1] = -x[m - 1]  # a sum of zeros
        check_norm(x, residual, 4, weight)
        check_norm(x, None, 4, weight)
        check_norm(x, residual, 8, (*weight[:2], None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "head_dim"), HEADS, ids=str)
def test_heads(count: int, head_dim: int, dtype: torch.dtype) -> None:
    spec, k = hadamard_spec(count), count * head_dim
    assert spec is not None
    weight = linear(1000, k)
    for m in range(1, 9):
        for bits in (4, 8):
            x = rows(m, k, dtype)
            arguments = (x, spec.order, spec.pow2, head_dim, bits, 0.9, *weight)
            assert heads_gemm.available(*arguments) is None
            expected = gemm.cuda(*heads.cuda(x, spec.order, spec.pow2, head_dim, bits, 0.9), *weight, dtype)
            poison(2 * m * 1000)
            assert_same(heads_gemm.cuda(*arguments), expected)
            residual = rows(m, 1000, dtype)
            assert_same(heads_gemm.cuda(*arguments, residual), expected + residual)


SILU = [(172, 64), (12, 128), (1, 8192), (28, 256), (20, 64)]  # m = 172, 24, 128, 112, 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("order", "pow2"), SILU, ids=str)
def test_silu(order: int, pow2: int, dtype: torch.dtype) -> None:
    k = order * pow2
    weight = linear(1000, k)
    # Plain rows; beyond fp16 between the factors; next to nothing; gates that let nothing through; zero; not finite.
    for gain, gate in ((1.0, 0.0), (200.0, 0.0), (1e-4, 0.0), (1.0, -8.0), (0.0, 0.0), (torch.inf, 0.0)):
        for bits in (4, 8):
            x = (torch.randn(1, 2 * k, device="cuda") * min(gain, 1e4)).to(dtype)
            x[:, :k] += gate
            x[0, k // 3] *= 20
            if gain == torch.inf:
                x[0, k + 5] = torch.nan if bits == 4 else torch.inf
            arguments = (x, order, pow2, bits, 0.9, *weight)
            reason = silu_gemm.available(*arguments)
            if reason is not None:
                assert (order, pow2) != SILU[0] or torch.cuda.get_device_capability()[0] != 9, reason
                pytest.skip(reason)
            expected = gemm.cuda(*silu.cuda(x, order, pow2, bits, 0.9), *weight, dtype)
            poison(2000)
            assert_same(silu_gemm.cuda(*arguments), expected)
            residual = torch.randn(1, 1000, device="cuda").to(dtype)
            assert_same(silu_gemm.cuda(*arguments, residual), expected + residual)


# Few outputs, so that blocks have one strip; many, so that a warp's ring goes round; the last strip with one row; rows
# of the residual that are parts of others, at odd places.
@pytest.mark.parametrize("n", [1, 16, 2112, 4096, 4097, 40000])
def test_sizes_of_the_output(n: int) -> None:
    heads_weight, silu_weight = linear(n, 4096), linear(n, 11008)
    for m in (1, 2, 8):
        x, residual = rows(m, 4096, torch.float16), rows(m, 2 * n + 1, torch.float16)[:, 1 : 1 + n]
        expected = gemm.cuda(*heads.cuda(x, 1, 32, 128, 4, 0.9), *heads_weight, x.dtype) + residual
        assert_same(heads_gemm.cuda(x, 1, 32, 128, 4, 0.9, *heads_weight, residual), expected)
    gate_up = torch.randn(1, 22016, device="cuda", dtype=torch.float16)
    arguments = (gate_up, 172, 64, 4, 0.9, *silu_weight, residual[:1])
    if silu_gemm.available(*arguments) is None:
        expected = gemm.cuda(*silu.cuda(gate_up, 172, 64, 4, 0.9), *silu_weight, gate_up.dtype) + residual[:1]
        assert_same(silu_gemm.cuda(*arguments), expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    weight = linear(4096, 4096)
    x, residual = (torch.randn(8, 4096, device="cuda", dtype=torch.float16) for _ in range(2))
    together, total = norm_gemm.cuda(x, residual, 1e-5, 4, 0.9, *weight)
    rotated = heads_gemm.cuda(x, 1, 32, 128, 4, 0.9, *weight)
    for row in range(8):
        some = slice(row, row + 1)
        alone, alone_total = norm_gemm.cuda(x[some], residual[some], 1e-5, 4, 0.9, *weight)
        assert_same(alone, together[some])
        assert_same(alone_total, total[some])
        assert_same(heads_gemm.cuda(x[some], 1, 32, 128, 4, 0.9, *weight), rotated[some])


def test_views_and_what_has_no_kernel() -> None:
    weight = linear(64, 4096)
    base = torch.randn(5, 3 * 4096 + 8, device="cuda", dtype=torch.float16)
    check_norm(base[:, 8 : 8 + 4096], base[:, 4096 + 8 : 2 * 4096 + 8], 4, weight)
    odd = base[:, 1:4097]
    assert "16 bytes" in norm_gemm.available(odd, None, 1e-5, 4, 0.9, *weight)
    assert "residual" in norm_gemm.available(base[:, :4096], odd, 1e-5, 4, 0.9, *weight)
    assert "9 rows" in norm_gemm.available(base.new_zeros(9, 4096), None, 1e-5, 4, 0.9, *weight)
    assert "not torch.float32" in heads_gemm.available(base[:, :4096].float(), 1, 32, 128, 4, 0.9, *weight)
    assert "groups" in heads_gemm.available(base[:, :4096], 1, 32, 128, 4, 0.9, weight[0], weight[1][:, None], None)
    assert "warps" in heads_gemm.available(base[:, :4096], 1, 16, 256, 4, 0.9, *weight)
    assert "warps" in heads_gemm.available(base[:, :8192], 1, 64, 128, 4, 0.9, *weight)
    assert "rows" in silu_gemm.available(base[:, :8192], 1, 4096, 4, 0.9, *weight)
    # The op serves them all the same.
    out, total = norm_gemm.add_rms_norm_gemm_w4a4(odd, None, 1e-5, 8, 0.9, *weight)
    assert_same(total, odd)
    assert out.shape == (5, 64)


@pytest.mark.parametrize("m", [1, 3])
def test_layers_in_a_graph(m: int) -> None:
    """Norm, GEMM, rotation, GEMM and sum again and again: every kernel starts while the one before it still runs."""
    wide, narrow = linear(4096, 4096), linear(4096, 4096)
    wide[1].mul_(1e-3), narrow[1].mul_(1e-3)
    start = torch.randn(m, 4096, device="cuda", dtype=torch.float16)

    def layers(fused: bool) -> torch.Tensor:
        residual, delta = start, None
        for i in range(40):
            x, other = (residual, None) if delta is None else (delta, residual)
            if fused:
                out, residual = norm_gemm.cuda(x, other, 1e-5, 4, 0.9, *wide)
                delta = heads_gemm.cuda(out, 1, 32, 128, 4, 0.9, *narrow, residual if i % 3 else None)
                residual, delta = (delta, None) if i % 3 else (residual, delta)
            else:
                codes, scale, residual = norm.cuda(x, other, 1e-5, 4, 0.9)
                out = gemm.cuda(codes, scale, *wide, x.dtype)
                delta = gemm.cuda(*heads.cuda(out, 1, 32, 128, 4, 0.9), *narrow, x.dtype)
        return residual if delta is None else residual + delta

    expected = layers(False)
    assert expected.isfinite().all()
    assert_same(layers(True), expected)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = layers(True)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert_same(out, expected)
