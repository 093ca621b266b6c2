"""The Hadamard kernels on the GPU against the reference in float64.

Plain transforms: at most twice the error of the same sequence of steps in the input's dtype. Codes: equal to the
reference's but for the one fp16 rounding that the tensor-core kernels make between the two factors, which moves 4-bit
codes by one in fewer than 0.2 % of places (8-bit codes, sixteen times finer, in fewer than 3 %).
"""

from __future__ import annotations

import importlib

import pytest
import torch

from quarot.ops import registry
from quarot.rotation.hadamard import hadamard_matrix

hadamard_op = importlib.import_module("quarot.ops.hadamard")
quantize_op = importlib.import_module("quarot.ops.hadamard_quantize")
silu_op = importlib.import_module("quarot.ops.silu_mul_hadamard_quantize")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None, reason="needs a GPU and the compiled extension"
)

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32]
# (order, pow2): the widths of real models; below, what no model has.
SIZES = {
    "4096": (1, 4096),
    "8192": (1, 8192),
    "16384": (1, 16384),
    "2048": (1, 2048),
    "256": (1, 256),
    "3584": (28, 128),
    "5120": (20, 256),
    "11008": (172, 64),
    "13824": (108, 128),
    "14336": (28, 512),
    "28672": (28, 1024),
    "22016": (172, 128),
    "17920": (140, 128),
    "8960": (140, 64),
    "27648": (108, 256),
    "3072": (12, 256),
    "1536": (12, 128),
    "12288": (12, 1024),
    "20480": (20, 1024),
    "6656": (52, 128),
    "5632": (44, 128),
    "1408": (44, 32),
    "4864": (76, 64),
    "9728": (76, 128),
    "17408": (68, 256),
    "18944": (148, 128),
    "25600": (100, 256),
    "3200": (100, 32),
    "23040": (180, 128),
    "8640": (540, 16),
    "29568": (924, 32),
    "10944": (684, 16),
    "576": (36, 16),
    "53248": (52, 1024),
    "65536": (1, 65536),
    "tiny": (1, 2),
    "order_only": (12, 1),
    "order_2": (2, 8),
    "pow2_32": (1, 32),
}
LARGE = ("4096", "11008", "14336", "28672")


def eager(x: torch.Tensor, order: int, pow2: int) -> torch.Tensor:
    """The transform as plain PyTorch would do it in x's dtype, one rounding a step."""
    m, n, y = x.shape[0], order * pow2, x
    radix = min(pow2, 64)
    scale = n**-0.5
    stride = 1
    while stride < pow2:
        step = min(radix, pow2 // stride)
        h = (hadamard_matrix(step).double() * (scale if stride == 1 else 1.0)).to(x)
        y = (h @ y.reshape(-1, step, stride)).reshape(m, n)
        stride *= step
    if order > 1:
        h = (hadamard_matrix(order).double() * (scale if pow2 == 1 else 1.0)).to(x)
        y = (h @ y.reshape(m, order, pow2)).reshape(m, n)
    return y


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def inputs(m: int, n: int, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
    x = torch.randn(m, n + extra, device="cuda")
    x[:, 7::997] *= 30
    return x.to(dtype)[:, :n]


def check_plain(x: torch.Tensor, order: int, pow2: int) -> None:
    exact = hadamard_op.hadamard_reference(x.double(), order, pow2, 1)
    actual = hadamard_op._cuda(x, order, pow2, 1)
    assert actual.dtype == x.dtype
    allowed = 2 * rms(eager(x, order, pow2).double() - exact)
    if x.dtype == torch.float32:  # a matmul may sum in more than fp32; grant four roundings
        allowed = max(allowed, 4 * 2**-24 * rms(exact))
    error = actual.double() - exact
    assert rms(error) <= allowed
    assert error.square().mean(1).sqrt().max() <= 4 * max(allowed, 1e-12)  # and no single row is worse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_plain_transform(size: str, dtype: torch.dtype) -> None:
    order, pow2 = SIZES[size]
    for m in (1, 3, 300):
        check_plain(inputs(m, order * pow2, dtype), order, pow2)


@pytest.mark.parametrize("size", LARGE)
def test_plain_transform_of_many_rows(size: str) -> None:
    """Many rows for each resident block: rings turn over, buffers are reused."""
    order, pow2 = SIZES[size]
    check_plain(inputs(5003, order * pow2, torch.float16), order, pow2)


def assert_codes(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], bits: int, exact: bool
) -> None:
    codes, scale = actual
    expected_codes, expected_scale = expected
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5 if exact else 2e-3, atol=0, equal_nan=True)
    assert torch.equal(scale == 0, expected_scale == 0)
    difference = (codes.int() - expected_codes.int()).abs()
    assert difference.max() <= 1
    share = 2e-4 if exact else 0.002 if bits == 4 else 0.03
    if not exact and difference.shape[1] < 1024:
        share *= 4  # one outlier fills a short row: every code is large, and so is the error in units of the scale
    moved = difference.count_nonzero(1)
    # A few codes on rounding edges are no share of a short row.
    assert moved.sum() <= max(share * difference.numel(), 4)
    assert moved.max() <= max(8 * share * difference.shape[1], 4)  # no single row is off


def gated(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(m, 2 * n, device="cuda")
    x[:, :n] *= 1.5
    x[:, n + 7 :: 997] *= 30
    return x.to(dtype)


def is_tensor_core(n: int, dtype: torch.dtype, order: int) -> bool:
    return dtype != torch.float32 and (order > 1 or n >= 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_codes(size: str, dtype: torch.dtype) -> None:
    order, pow2 = SIZES[size]
    n = order * pow2
    exact = not is_tensor_core(n, dtype, order)
    for m in (1, 3, 300):
        x, pair = inputs(m, n, dtype), gated(m, n, dtype)
        for bits in (4, 8):
            actual, expected = (f(x, order, pow2, 1, bits, 0.9) for f in (quantize_op.cuda, quantize_op.reference))
            assert_codes(actual, expected, bits, exact)
            actual, expected = (f(pair, order, pow2, bits, 0.9) for f in (silu_op.cuda, silu_op.reference))
            assert_codes(actual, expected, bits, exact=False)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", LARGE)
def test_codes_of_many_rows(size: str, dtype: torch.dtype) -> None:
    order, pow2 = SIZES[size]
    pair = gated(5003, order * pow2, dtype)
    x = pair[:, : order * pow2]
    for op, arguments in ((silu_op, (pair, order, pow2, 8, 0.9)), (quantize_op, (x, order, pow2, 1, 8, 0.9))):
        first = op.cuda(*arguments)
        assert_codes(first, op.reference(*arguments), 8, exact=False)
        for _ in range(3):  # the same bits every time
            for a, b in zip(op.cuda(*arguments), first, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("size", ["4096", "11008", "13824", "14336", "25600", "28672", "8640", "order_only"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_codes_do_not_depend_on_the_other_rows(size: str, dtype: torch.dtype) -> None:
    order, pow2 = SIZES[size]
    pair = gated(1000, order * pow2, dtype)
    x = pair[:, : order * pow2]
    codes, scale = silu_op.cuda(pair, order, pow2, 4, 0.9)
    plain = quantize_op.cuda(x, order, pow2, 1, 4, 0.9)
    for i in (0, 131, 199, 999):
        one, its_scale = silu_op.cuda(pair[i : i + 1], order, pow2, 4, 0.9)
        assert torch.equal(one[0], codes[i])
        assert its_scale[0] == scale[i]
        one, its_scale = quantize_op.cuda(x[i : i + 1], order, pow2, 1, 4, 0.9)
        assert torch.equal(one[0], plain[0][i])
        assert its_scale[0] == plain[1][i]


@pytest.mark.parametrize("size", ["4096", "11008", "14336", "28672", "8640", "576"])
@pytest.mark.parametrize("m", [3, 300, 700])
def test_codes_in_upper_halves(size: str, m: int) -> None:
    order, pow2 = SIZES[size]
    pair = gated(m, order * pow2, torch.float16)
    codes, scale = silu_op.cuda(pair, order, pow2, 4, 0.9)
    upper, sixteenth = silu_op.cuda(pair, order, pow2, 4, 0.9, False, True)
    assert torch.equal(upper, 16 * codes)
    assert torch.equal(16 * sixteenth, scale)
    for shape in ((order, pow2, 1), (1, 32, 128)):  # the second across heads
        x = pair[:, : order * pow2 if shape[2] == 1 else 4096].contiguous()
        if x.shape[1] % (shape[0] * shape[1] * shape[2]):
            continue
        codes, scale = quantize_op.cuda(x, *shape, 4, 0.9)
        upper, sixteenth = quantize_op.cuda(x, *shape, 4, 0.9, False, True)
        assert torch.equal(upper, 16 * codes)
        assert torch.equal(16 * sixteenth, scale)


@pytest.mark.parametrize("size", ["4096", "11008", "14336", "28672", "8640", "576"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hostile_rows(size: str, dtype: torch.dtype) -> None:
    """Zeros, NaN and infinity, products beyond fp16, values far below it, one value alone: each in its own row only."""
    order, pow2 = SIZES[size]
    n = order * pow2
    pair = gated(700, n, dtype).float()  # more than the kernel for many rows needs
    pair[0] = 0
    pair[1, 3] = torch.nan
    pair[2, 9] = torch.inf
    pair[3] *= 2e3
    pair[4] *= 1e-3
    pair[5] = 1e-7
    pair[6] = 0
    pair[6, 11] = pair[6, n + 11] = 1
    pair[7, :n] = -20
    pair[8, n:] = 6e4
    if dtype != torch.float16:
        pair[9] *= 1e12
        pair[10] *= 1e-13
    pair = pair.to(dtype)
    for bits in (4, 8):
        actual, expected = (f(pair, order, pow2, bits, 0.9) for f in (silu_op.cuda, silu_op.reference))
        assert_codes(actual, expected, bits, exact=False)
        x = pair[:, :n]
        actual, expected = (f(x, order, pow2, 1, bits, 0.9) for f in (quantize_op.cuda, quantize_op.reference))
        assert_codes(actual, expected, bits, exact=False)
    plain = hadamard_op._cuda(pair[:, n:], order, pow2, 1)
    finite = plain.isfinite().all(1)
    assert finite[[0, 4, 5, 6, 7]].all()
    assert (plain[0] == 0).all()


@pytest.mark.parametrize("size", ["4096", "8192", "11008", "13824", "14336", "28672"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_that_tower_above_the_row(size: str, dtype: torch.dtype) -> None:
    """Gates that shut off large values: rows are begun anew, whatever power of two their largest value asks for."""
    order, pow2 = SIZES[size]
    n, m = order * pow2, 700
    pair = torch.empty(m, 2 * n, device="cuda").normal_()
    pair[:, :n], pair[:, n:] = -30, 2000 * pair[:, n:].sign()
    largest = torch.logspace(-3, 12, m, 2, device="cuda")[:, None]
    spikes = torch.randperm(n, device="cuda")[:128]
    pair[:, spikes], pair[:, n + spikes] = 8, largest / 8 * torch.empty(m, 128, device="cuda").uniform_(-1, 1)
    pair = pair.to(dtype)
    for rows in (pair, pair[:300]):  # the kernel for many rows, and the other one
        for bits in (4, 8):
            actual, expected = (f(rows, order, pow2, bits, 0.9) for f in (silu_op.cuda, silu_op.reference))
            assert_codes(actual, expected, bits, exact=False)


@pytest.mark.parametrize("heads", [(1, 32), (1, 64), (1, 8), (20, 2), (12, 2), (28, 1), (12, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transform_across_heads(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    order, pow2 = heads
    n = order * pow2 * head_dim
    fits = order * pow2 <= 64 and head_dim % 32 == 0
    for m in (1, 3, 300):
        x = inputs(m, n, dtype, extra=8)
        if m > 3:
            x[1] = 0
            x[2, 5] = torch.nan
        for bits in (4, 8):
            actual, expected = (
                f(x, order, pow2, head_dim, bits, 0.9) for f in (quantize_op.cuda, quantize_op.reference)
            )
            assert_codes(actual, expected, bits, exact=fits or order == 1 or dtype == torch.float32)
    y = hadamard_op._cuda(x, order, pow2, head_dim)
    expected = hadamard_op.hadamard_reference(x.double(), order, pow2, head_dim)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-6}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=20 * tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "order", "pow2", "inner"),
    [(13696, 1, 128, 1), (9 * 64, 1, 64, 1), (240, 12, 1, 4), (1024, 1, 16, 4)],
    ids=str,
)
def test_blocks(width: int, order: int, pow2: int, inner: int, dtype: torch.dtype) -> None:
    x = inputs(70, width, dtype, extra=3)
    for rows in (x, x.contiguous()):
        expected = hadamard_op.hadamard_reference(rows.double(), order, pow2, inner)
        error = rms(hadamard_op._cuda(rows, order, pow2, inner).double() - expected)
        assert error <= {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}[dtype] * rms(expected)
        actual, wanted = (f(rows, order, pow2, inner, 4, 0.9) for f in (quantize_op.cuda, quantize_op.reference))
        assert_codes(actual, wanted, 4, exact=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "extra"), [(0, 8), (8, 0), (1, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("size", ["4096", "11008", "576", "8640"])
def test_offsets_and_strides(size: str, offset: int, extra: int, dtype: torch.dtype) -> None:
    order, pow2 = SIZES[size]
    n = order * pow2
    base = gated(700, n + offset + extra, dtype)  # more than the kernel for many rows needs
    pair = base[:, offset : offset + 2 * n]
    for rows in (pair, pair[:300], pair[::2], pair[3].expand(700, -1)):
        actual, expected = (f(rows, order, pow2, 4, 0.9) for f in (silu_op.cuda, silu_op.reference))
        assert_codes(actual, expected, 4, exact=False)
    check_plain(pair[:300, n:], order, pow2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["4096", "11008", "28672", "576", "order_2"])
def test_packed_codes(size: str, dtype: torch.dtype) -> None:
    order, pow2 = SIZES[size]
    pair = gated(37, order * pow2, dtype)
    packed, scale = silu_op.cuda(pair, order, pow2, 4, 0.9, True)
    expected, expected_scale = silu_op.reference(pair, order, pow2, 4, 0.9, False)
    codes = torch.stack(((packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4), -1).flatten(1)
    assert_codes((codes, scale), (expected, expected_scale), 4, exact=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [96, 11008, 28672])
def test_silu_without_hadamard(n: int, dtype: torch.dtype) -> None:
    pair = gated(300, n, dtype)
    actual, expected = (f(pair, 1, 1, 4, 0.9) for f in (silu_op.cuda, silu_op.reference))
    assert_codes(actual, expected, 4, exact=False)


def test_no_rows() -> None:
    x = torch.empty(0, 22016, device="cuda", dtype=torch.float16)
    codes, scale = silu_op.cuda(x, 172, 64, 4, 0.9)
    assert codes.shape == (0, 11008)
    assert scale.shape == (0,)
    assert hadamard_op._cuda(x, 172, 128, 1).shape == (0, 22016)
    for op, arguments in ((quantize_op, (1, 64, 1)), (silu_op, (1, 64))):  # rows of nothing
        codes, scale = op.cuda(torch.empty(3, 0, device="cuda", dtype=torch.float16), *arguments, 4, 0.9)
        assert codes.shape == (3, 0)
        assert (scale == 0).all()


@pytest.mark.parametrize("size", ["4096", "11008", "28672", "10944"])
def test_side_stream_and_graph(size: str) -> None:
    order, pow2 = SIZES[size]
    pair = gated(300, order * pow2, torch.float16)
    expected = silu_op.cuda(pair, order, pow2, 4, 0.9)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # the default stream would be early
        pair.copy_(pair.flip(0))
        flipped = silu_op.cuda(pair, order, pow2, 4, 0.9)
    torch.cuda.synchronize()
    assert torch.equal(flipped[0], expected[0].flip(0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):  # back to back, so that launches overlap
            captured = silu_op.cuda(pair, order, pow2, 4, 0.9)
            transformed = hadamard_op._cuda(pair, order, pow2, 1)
    pair.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for actual, wanted in zip(captured, silu_op.cuda(pair, order, pow2, 4, 0.9), strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(transformed, hadamard_op._cuda(pair, order, pow2, 1))


def test_the_ops_reach_the_kernels() -> None:
    assert quantize_op.available(torch.empty(2, 64, device="cuda", dtype=torch.float64), 1, 64, 1, 4, 0.9) is not None
    x = torch.randn(3, 4096, device="cuda", dtype=torch.float16)
    assert torch.equal(torch.ops.quarot.hadamard(x, 1, 4096, 1), hadamard_op._cuda(x, 1, 4096, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("order", "pow2", "inner"), [(1, 4096, 1), (172, 64, 1), (12, 2, 64)])
def test_the_transform_has_its_gradient(order, pow2, inner, dtype):
    shape, arguments = (6, order * pow2 * inner), (order, pow2, inner)
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    direction = torch.randn(shape, device="cuda", dtype=dtype)
    hadamard_op.hadamard(x, *arguments).backward(direction)
    exact = hadamard_op.transposed_hadamard(direction.double(), *arguments)
    assert (x.grad.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_what_rounds_refuses_backward():
    x = torch.randn(6, 4096, device="cuda", dtype=torch.float16, requires_grad=True)
    codes, scale = torch.ops.quarot.hadamard_quantize(x, 1, 4096, 1, 4, 0.9)
    assert torch.equal(codes, torch.ops.quarot.hadamard_quantize(x.detach(), 1, 4096, 1, 4, 0.9)[0])
    with pytest.raises(RuntimeError, match="quarot::hadamard_quantize has no gradient"):
        scale.sum().backward()
