"""GEMMs that make their own codes against the two kernels they stand for: bit for bit."""

from __future__ import annotations

import pytest
import torch

from quarot.ops import add_rms_norm_gemm_w4a4 as norm_gemm
from quarot.ops import add_rms_norm_quantize as norm
from quarot.ops import gemm_w4a4 as gemm
from quarot.ops import hadamard_gemm_w4a4 as heads_gemm
from quarot.ops import hadamard_launch, registry
from quarot.ops import hadamard_quantize as heads
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


def all_three(x: torch.Tensor, gate_up: torch.Tensor, *weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The kernels' outputs for one row of 4096 and one of gate and up; ``weights`` of 4096, 4096 and 11008 columns."""
    outs = [norm_gemm.cuda(x, x, 1e-5, 4, 0.9, *weights[0])[0], heads_gemm.cuda(x, 1, 32, 128, 4, 0.9, *weights[1])]
    if torch.cuda.get_device_capability()[0] == 9:
        outs.append(silu_gemm.cuda(gate_up, 172, 64, 4, 0.9, *weights[2]))
    return outs


def two_kernels(x: torch.Tensor, gate_up: torch.Tensor, *weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What they stand for."""
    outs = [gemm.cuda(*norm.cuda(x, x, 1e-5, 4, 0.9)[:2], *weights[0], x.dtype)]
    outs.append(gemm.cuda(*heads.cuda(x, 1, 32, 128, 4, 0.9), *weights[1], x.dtype))
    if torch.cuda.get_device_capability()[0] == 9:
        outs.append(gemm.cuda(*silu.cuda(gate_up, 172, 64, 4, 0.9), *weights[2], x.dtype))
    return outs


def test_weights_at_odd_places() -> None:
    """Tiles that begin at any byte or lie apart, scales and biases at any element: copied where need be."""
    x, gate_up = (torch.randn(1, k, device="cuda", dtype=torch.float16) for k in (4096, 22016))
    plain = [linear(1000, k) for k in (4096, 4096, 11008)]
    expected = two_kernels(x, gate_up, *plain)

    def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
        place = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device="cuda")[offset:]
        return place.view(tensor.shape).copy_(tensor)

    for offset in (1, 3, 8):
        weights = [[moved(t, offset) for t in weight] for weight in plain]
        for outs in (all_three(x, gate_up, *weights), two_kernels(x, gate_up, *weights)):
            for out, want in zip(outs, expected, strict=True):
                assert_same(out, want)
    apart = [(torch.stack((t, t), 2)[:, :, 1], *rest) for t, *rest in plain]
    for outs in (all_three(x, gate_up, *apart), two_kernels(x, gate_up, *apart)):
        for out, want in zip(outs, expected, strict=True):
            assert_same(out, want)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, 1e30, torch.inf, torch.nan])
def test_weight_scales_of_any_size_stay_in_their_channel(value: float) -> None:
    x, gate_up = (torch.randn(1, k, device="cuda", dtype=torch.bfloat16) for k in (4096, 22016))
    weights = [linear(4097, k) for k in (4096, 4096, 11008)]
    before = all_three(x, gate_up, *weights)
    for channel in (0, 2000, 4096):
        for _, scale, _ in weights:
            scale[channel] = value
    others = torch.ones(4097, dtype=torch.bool, device="cuda")
    others[[0, 2000, 4096]] = False
    outs = all_three(x, gate_up, *weights)
    for out, old, want in zip(outs, before, two_kernels(x, gate_up, *weights), strict=True):
        assert_same(out, want)
        assert_same(out[:, others], old[:, others])


def test_a_busy_gpu_changes_nothing() -> None:
    """Two hundred times each, into poisoned outputs, beside another stream whose kernels take SMs and memory."""
    x, gate_up = (torch.randn(1, k, device="cuda", dtype=torch.float16) for k in (4096, 22016))
    weights = [linear(12288, 4096), linear(4096, 4096), linear(4096, 11008)]
    expected = two_kernels(x, gate_up, *weights)
    noise, side = torch.randn(4096, 4096, device="cuda", dtype=torch.float16), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        with torch.cuda.stream(side):
            noise = (noise @ noise).tanh_()
        for out, want in zip(all_three(x, gate_up, *weights), expected, strict=True):
            wrong += (out != want).sum()
            out.fill_(torch.nan)  # the next one is allocated here
    assert wrong.item() == 0


def test_rows_that_shared_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """99 KB a block, as sm_86 and sm_89 have: the two kernels serve what is too large for one."""
    extension = registry.extension()
    assert extension is not None
    assert [extension.hadamard_gemm_rows(32, 128, kb * 1024) for kb in (99, 163, 227)] == [7, 8, 8]
    assert [extension.hadamard_gemm_rows(64, 64, kb * 1024) for kb in (40, 99)] == [2, 7]
    assert extension.hadamard_gemm_rows(32, 128, 8 * 1024) == 0
    weight = linear(1000, 4096)
    x = torch.randn(8, 4096, device="cuda", dtype=torch.float16)
    expected = heads_gemm.hadamard_gemm_w4a4(x, 1, 32, 128, 4, 0.9, *weight)
    monkeypatch.setattr(hadamard_launch, "_shared_bytes", lambda index: 99 * 1024)
    assert "8 rows are more than the 7" in heads_gemm.available(x, 1, 32, 128, 4, 0.9, *weight)
    assert heads_gemm.available(x[:7], 1, 32, 128, 4, 0.9, *weight) is None
    got = heads_gemm.hadamard_gemm_w4a4(x, 1, 32, 128, 4, 0.9, *weight)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())  # of the reference


def test_the_binding_refuses_an_output_of_another_type() -> None:
    weight, x = linear(1000, 4096), torch.randn(1, 4096, device="cuda", dtype=torch.float16)
    out, sums = torch.empty(1, 1000, device="cuda"), torch.empty_like(x)
    pointers = (weight[0].data_ptr(), weight[1].data_ptr(), 0, out.data_ptr())
    for kind in (1, 2):
        with pytest.raises(RuntimeError, match="invalid argument"):
            registry.extension().add_rms_norm_gemm(
                x.data_ptr(), 4096, 0, 0, 0, 4096, 1e-5, 0.9 / 7, 4, sums.data_ptr(),
                (*pointers, 1, 1000, 4096, kind, 0, 0), registry.stream(x),
            )  # fmt: skip


def test_operands_that_a_kernel_would_misread_are_refused() -> None:
    x, gate_up = (torch.randn(1, k, device="cuda", dtype=torch.float16) for k in (4096, 22016))
    tiles, scale, bias = linear(64, 4096)
    residual = torch.randn(1, 64, device="cuda", dtype=torch.float16)
    good = {"qweight": tiles, "weight_scale": scale, "bias": bias, "residual": residual}
    bad = [
        ("qweight", tiles[..., :128], "256"),
        ("qweight", tiles.view(torch.int8), "int8"),
        ("qweight", tiles[:3], "do not fit"),
        ("qweight", tiles[0], "do not fit"),
        ("qweight", tiles.cpu(), "on cpu"),
        ("weight_scale", scale.half(), "float16"),
        ("weight_scale", scale[:40], "do not fit"),
        ("weight_scale", scale.cpu(), "on cpu"),
        ("bias", bias[:63], "63"),
        ("bias", bias.int(), "int32"),
        ("bias", bias.cpu(), "on cpu"),
        ("residual", residual.bfloat16(), "bfloat16"),
        ("residual", residual[:, :63], "63"),
        ("residual", residual.cpu(), "cpu"),
    ]
    for name, value, told in bad:
        arguments = {**good, name: value}
        with pytest.raises(ValueError, match=told):
            heads_gemm.hadamard_gemm_w4a4(x, 1, 32, 128, 4, 0.9, *arguments.values())
        if name != "residual":
            with pytest.raises(ValueError, match=told):
                norm_gemm.add_rms_norm_gemm_w4a4(x, None, 1e-5, 4, 0.9, *list(arguments.values())[:3])
    with pytest.raises(RuntimeError, match="device"):
        norm_gemm.add_rms_norm_gemm_w4a4(x, x.cpu(), 1e-5, 4, 0.9, tiles, scale, bias)
    with pytest.raises(ValueError, match="do not fit"):
        silu_gemm.silu_mul_hadamard_gemm_w4a4(gate_up, 172, 64, 4, 0.9, tiles, scale, bias)
