"""quantize_per_token and add_rms_norm_quantize on the GPU against their references: codes and scales bit for bit."""

from __future__ import annotations

import importlib

import pytest
import torch

from quarot.ops import registry

quantize_op = importlib.import_module("quarot.ops.quantize_per_token")
norm_op = importlib.import_module("quarot.ops.add_rms_norm_quantize")
plain_norm_op = importlib.import_module("quarot.ops.add_rms_norm")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None, reason="needs a GPU and the compiled extension"
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One, below and at the padding of 32, odd, one vector a thread, each number of vectors in registers, two passes.
WIDTHS = [1, 7, 31, 32, 100, 512, 576, 4096, 4097, 8192, 11008, 18944, 28672, 40000]
FORMATS = [(4, 0.9, False), (4, 0.9, True), (6, 0.5, False), (8, 1.0, False), (2, 1.0, False)]


def poison(nbytes: int) -> None:
    """Leave garbage in the blocks that the next torch.empty gets."""
    for size in {nbytes, nbytes // 2, 4096}:
        torch.full((max(size, 1),), 0x5A, dtype=torch.uint8, device="cuda")


def rows(m: int, k: int, dtype: torch.dtype, *, offset: int = 0, extra: int = 0) -> torch.Tensor:
    """[m, k] view into a wider tensor: six orders of magnitude between rows, and rows that need the special cases."""
    x = torch.randn(m, k + offset + extra, device="cuda") * torch.logspace(-5, 3, m, device="cuda")[:, None]
    x = x.to(dtype)[:, offset : offset + k]
    if m >= 8:
        x[1] = 0
        x[2, k // 2] = torch.nan
        x[3, k - 1] = -torch.inf
        x[4], x[5] = torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 2
        x[6, 0] = torch.finfo(dtype).max
    return x


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", WIDTHS)
def test_codes_and_scales_are_the_references(k: int, dtype: torch.dtype) -> None:
    for m in (1, 3, 300):
        x = rows(m, k, dtype)
        for bits, clip, packed in FORMATS:
            poison(m * k)
            for actual, expected in zip(
                quantize_op.cuda(x, bits, clip, packed), quantize_op.reference(x, bits, clip, packed), strict=True
            ):
                assert_same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [7, 576, 4096, 40000])
def test_upper_halves(k: int, dtype: torch.dtype) -> None:
    for m in (3, 300):
        x = rows(m, k, dtype)
        for bits in (2, 4):
            arguments = (x, bits, 0.9, False, True)
            for actual, expected in zip(quantize_op.cuda(*arguments), quantize_op.reference(*arguments), strict=True):
                assert_same(actual, expected)
            normed = (x, None, 1e-5, bits, 0.9)
            (low, scale, _), (high, sixteenth, _) = norm_op.cuda(*normed), norm_op.cuda(*normed, False, True)
            assert_same(high, 16 * low)
            assert_same(16 * sixteenth, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "extra"), [(1, 0), (0, 1), (8, 8), (3, 5)], ids=str)
def test_offsets_and_strides(offset: int, extra: int, dtype: torch.dtype) -> None:
    x = rows(33, 4096, dtype, offset=offset, extra=extra)
    for actual, expected in zip(quantize_op.cuda(x, 4, 0.9), quantize_op.reference(x, 4, 0.9), strict=True):
        assert_same(actual, expected)


def test_leading_dimensions_and_columns_apart() -> None:
    x = torch.randn(2, 3, 5, 96, device="cuda", dtype=torch.float16)
    for view in (x, x.transpose(0, 1), x.transpose(-1, -2), x[..., ::2]):
        for actual, expected in zip(quantize_op.cuda(view, 8, 1.0), quantize_op.reference(view, 8, 1.0), strict=True):
            assert_same(actual, expected)


def test_no_rows_and_many_rows() -> None:
    codes, scale = quantize_op.cuda(torch.empty(0, 40, device="cuda"), 4, 0.9)
    assert codes.shape == (0, 64)
    assert scale.shape == (0,)
    x = torch.randn(70000, 64, device="cuda", dtype=torch.bfloat16)  # more rows than a grid has in y
    for actual, expected in zip(quantize_op.cuda(x, 4, 0.9), quantize_op.reference(x, 4, 0.9), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("clip", [1e-3, 0.05, 7.0])
def test_unusual_clips(clip: float) -> None:
    x = rows(16, 200, torch.float32)
    for actual, expected in zip(quantize_op.cuda(x, 4, clip), quantize_op.reference(x, 4, clip), strict=True):
        assert_same(actual, expected)


def check_norm(x: torch.Tensor, residual: torch.Tensor | None, bits: int = 4, packed: bool = False) -> None:
    poison(x.numel())
    codes, scale, total = norm_op.cuda(x, residual, 1e-5, bits, 0.9, packed)
    expected_codes, expected_scale, expected_total = norm_op.reference(x, residual, 1e-5, bits, 0.9, packed)
    assert_same(total, expected_total)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0, equal_nan=True)
    if packed:
        codes, expected_codes = (torch.stack((c & 15, c >> 4), -1).to(torch.int8) for c in (codes, expected_codes))
    difference = (codes.int() - expected_codes.int()).abs()
    # Only the order of the sum of squares differs, which moves values that lie on a rounding edge (in bf16 many columns
    # of a row share one value, and move together).
    assert packed or (difference <= 1).all()
    share = 1e-3 if x.dtype == torch.bfloat16 else 2e-4
    assert difference.count_nonzero() <= max(4, share * difference.numel())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [31, 576, 4096, 8192, 11008, 20000])
def test_add_rms_norm(k: int, dtype: torch.dtype) -> None:
    for m in (1, 3, 300):
        x, residual = (torch.randn(m, k, device="cuda").to(dtype) for _ in range(2))
        if m > 3:
            x[1] = residual[1] = 0
            x[2, 5] = torch.nan
            residual[3] *= 1e-4
            x[3] *= 1e-4
        check_norm(x, residual)
        check_norm(x, None)
        check_norm(x, residual, 8)
        check_norm(x, residual, 4, packed=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_of_views(dtype: torch.dtype) -> None:
    base = torch.randn(40, 2 * 4096 + 8, device="cuda").to(dtype)
    check_norm(base[:, 8 : 8 + 4096], base[:, 4096 + 8 :])
    check_norm(base[:, 1:4097], base[:, 4096 + 8 :])
    check_norm(base.view(5, 8, -1)[:, ::2, :4096], None)
    check_norm(base[:0, :64], None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [31, 576, 4096, 20000])
def test_add_rms_norm_alone(k: int, dtype: torch.dtype) -> None:
    """Values instead of codes: at most one rounding away from the reference."""
    for m in (1, 33):
        x, residual = (torch.randn(m, k, device="cuda").to(dtype) for _ in range(2))
        x[-1, 3] = torch.nan if m > 1 else 0.0
        for other in (residual, None):
            poison(x.numel())
            got, expected = plain_norm_op.cuda(x, other, 1e-5), plain_norm_op.reference(x, other, 1e-5)
            torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
    assert plain_norm_op.cuda(x[:0], residual[:0], 1e-5).shape == (0, k)


@pytest.mark.parametrize("op", ["quantize", "norm"])
def test_side_stream_and_graph(op: str) -> None:
    x, residual = (torch.randn(64, 4096, device="cuda", dtype=torch.float16) for _ in range(2))

    def run() -> tuple[torch.Tensor, ...]:
        return quantize_op.cuda(x, 4, 0.9) if op == "quantize" else norm_op.cuda(x, residual, 1e-5, 4, 0.9)

    expected = run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # the default stream would be early
        x.copy_(x.flip(0))
        flipped = run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    if op == "quantize":
        assert_same(flipped[0], expected[0].flip(0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # back to back, so that launches overlap
            captured = run()
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for actual, wanted in zip(captured, run(), strict=True):
        assert_same(actual, wanted)


def test_the_op_reaches_the_kernel() -> None:
    x = torch.randn(5, 64, device="cuda", dtype=torch.float16)
    kernel = torch.ops.quarot.quantize_per_token(x, 4, 0.9, False)
    with registry.reference_backend():
        reference = torch.ops.quarot.quantize_per_token(x, 4, 0.9, False)
    for actual, expected in zip(kernel, reference, strict=True):
        assert_same(actual, expected)
    assert quantize_op.available(x.double(), 4, 0.9) is not None
