"""``QuantLinear`` against float64 arithmetic on the same integers, and as a module: cast, copied, saved, compiled."""

import copy

import pytest
import torch
from torch import nn

from quarot.calibration.fake_quantize import fake_quantize
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear
from quarot.nn.rotated_linear import RotatedLinear
from quarot.ops.hadamard import hadamard
from quarot.ops.integer_matmul import integer_matmul
from quarot.quantization.rtn import quantize_rtn
from quarot.rotation.spec import HadamardSpec

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def quantised(linear: nn.Module, **fields: object) -> QuantLinear:
    config = QuarotConfig(**fields)  # type: ignore[arg-type]
    if config.w_bits == 16:
        return QuantLinear.from_linear(linear, config, None, None)
    weight = linear.rotated_weight if isinstance(linear, RotatedLinear) else linear.weight
    grid = {"symmetric": config.w_symmetric, "group_size": config.w_group_size, "search": False}
    return QuantLinear.from_linear(linear, config, *quantize_rtn(weight.detach(), config.w_bits, **grid))  # type: ignore[arg-type]


def expected(layer: QuantLinear, x: torch.Tensor) -> torch.Tensor:
    """The same integers in float64."""
    wide = x.float()
    if layer.input_rotation is not None:
        r = layer.input_rotation
        wide = hadamard(wide, r.order, r.pow2, r.inner)
    wide = fake_quantize(wide, layer.a_bits, layer.a_clip, layer.a_group_size).double()
    out = wide @ layer.dequantize().double().T
    return out if layer.bias is None else out + layer.bias.double()


def relative(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("a_bits", [4, 6, 8, 16])
@pytest.mark.parametrize("w_bits", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_widths_and_dtypes(w_bits: int, a_bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    layer = quantised(nn.Linear(96, 20, dtype=dtype), w_bits=w_bits, a_bits=a_bits, w_symmetric=symmetric)
    x = torch.randn(2, 5, 96).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert relative(y, expected(layer, x)) < TOLERANCE[dtype]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("a_group", [None, 64, 128])
@pytest.mark.parametrize("w_group", [None, 32, 64])
@pytest.mark.parametrize("w_bits", [3, 4, 8])
def test_groups(w_bits: int, w_group: int | None, a_group: int | None, symmetric: bool) -> None:
    fields = {"w_bits": w_bits, "w_group_size": w_group, "a_group_size": a_group, "w_symmetric": symmetric}
    layer = quantised(nn.Linear(256, 20), **fields)
    x = torch.randn(7, 256)
    assert relative(layer(x), expected(layer, x)) < 1e-6


@pytest.mark.parametrize("k", [32, 64, 96, 160, 137, 126, 63])
@pytest.mark.parametrize("n", [4, 8, 12, 20, 33, 1])
def test_odd_sizes_and_offsets(k: int, n: int) -> None:
    layer = quantised(nn.Linear(k, n))
    x = torch.randn(3 * k + 1)[1:].view(3, k)  # storage offset of one element
    assert relative(layer(x), expected(layer, x)) < 1e-6


@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96), (96,), (1, 1, 1, 96)])
@pytest.mark.parametrize("a_group", [None, 32])
def test_empty_and_other_shapes(shape: tuple[int, ...], a_group: int | None) -> None:
    layer = quantised(nn.Linear(96, 20), a_group_size=a_group)
    assert layer(torch.randn(shape)).shape == (*shape[:-1], 20)


def test_rotated_input() -> None:
    spec = HadamardSpec(192, 12, 16)
    linear = RotatedLinear.from_linear(nn.Linear(192, 33), spec)
    x = torch.randn(5, 192)
    for bits in (4, 16):
        layer = quantised(linear, a_bits=bits)
        assert layer.input_rotation == spec
        assert relative(layer(x), expected(layer, x)) < 1e-5


def test_zero_rows_among_others() -> None:
    layer = quantised(nn.Linear(64, 20, bias=False))
    x = torch.randn(4, 64)
    x[2] = 0
    assert not layer(x)[2].any()
    weight = nn.Linear(64, 20, bias=False)
    with torch.no_grad():
        weight.weight[7] = 0
    assert not quantised(weight)(x)[:, 7].any()


def test_nan_stays_in_its_row() -> None:
    layer = quantised(nn.Linear(64, 20))
    x = torch.randn(4, 64)
    clean = layer(x)
    x[1, 3] = float("nan")
    y = layer(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


def test_large_fp16_activations_do_not_overflow() -> None:
    linear = nn.Linear(64, 20, dtype=torch.float16)
    with torch.no_grad():
        linear.weight *= 0.01
    layer = quantised(linear)
    x = torch.full((2, 64), 6e4, dtype=torch.float16)
    x[:, ::2] *= -1
    assert layer(x).isfinite().all()


def test_all_sevens_beyond_half() -> None:
    """7 * 7 * 11008 = 539392 does not fit a half, the scaled result does."""
    k = 11008
    codes = torch.full((16, k), 7, dtype=torch.int8)
    layer = QuantLinear.from_linear(nn.Linear(k, 16, bias=False), QuarotConfig(), codes, torch.full((16,), 1e-3))
    y = layer.half()(torch.ones(2, k, dtype=torch.float16))
    assert y.dtype == torch.float16
    assert y.float() == pytest.approx(0.9 * k * 7e-3, rel=2e-3)


def test_integer_matmul_is_exact_beyond_fp32() -> None:
    a = torch.full((3, 40000), -128, dtype=torch.int8)
    w = torch.randint(-128, 128, (5, 40000), dtype=torch.int8)
    w[0] = -128
    assert torch.equal(integer_matmul(a, w).double(), a.double() @ w.double().T)


@pytest.mark.parametrize(
    "fields", [{}, {"w_bits": 3, "w_symmetric": False}, {"w_bits": 8}, {"w_group_size": 32}], ids=str
)
def test_casts_copies_and_state(fields: dict[str, object]) -> None:
    layer = quantised(nn.Linear(96, 20), **fields)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.bias.dtype == torch.bfloat16
    for name in ("qweight", "weight_scale", "weight_zero"):
        before, after = getattr(layer, name), getattr(half, name)
        assert before is None or (after.dtype == before.dtype and torch.equal(before, after))
    skeleton = QuantLinear(96, 20, True, device="meta", **{"w_bits": 4, **fields})  # type: ignore[arg-type]
    skeleton.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(3, 96)
    assert torch.equal(skeleton(x), layer(x))
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not any(name.endswith("weight") and name != "qweight" for name, _ in layer.named_parameters())


def test_in_place_change_of_the_codes_is_seen() -> None:
    """The CPU reference keeps unpacked codes; it must not serve stale ones."""
    first, second = quantised(nn.Linear(64, 32)), quantised(nn.Linear(64, 32))
    x = torch.randn(3, 64)
    first(x)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), second(x))


def test_readable_repr() -> None:
    text = repr(quantised(nn.Linear(96, 20), w_group_size=32, a_bits=8))
    assert "96, 20" in text
    assert "w4 sym groups of 32" in text
    assert "a8 per token clip 1" in text


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="groups of 48 do not divide"):
        QuantLinear(100, 20, w_group_size=48)
    with pytest.raises(ValueError, match="rotation of size 64 does not fit 96"):
        QuantLinear(96, 20, input_rotation=HadamardSpec(64, 1, 64))


def test_compiles_whole_with_any_number_of_tokens() -> None:
    layer = quantised(RotatedLinear.from_linear(nn.Linear(96, 20), HadamardSpec(96, 12, 8)))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for m in (3, 8, 1):
        x = torch.randn(m, 96)
        assert torch.equal(compiled(x), layer(x))
