"""Scales, zeros and the clip search."""

import pytest
import torch

from quarot.quantization.grid import as_groups, find_grid
from quarot.quantization.rtn import quantize_rtn


def squared_error(weight: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return (quantize_rtn(weight, 4, **kwargs).dequantize() - weight).square().sum(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 16])
def test_the_search_never_loses(symmetric: bool, group_size: int | None) -> None:
    weight = torch.randn(64, 96) ** 3
    plain = squared_error(weight, symmetric=symmetric, group_size=group_size, search=False)
    searched = squared_error(weight, symmetric=symmetric, group_size=group_size)
    assert (searched <= plain * (1 + 1e-6)).all()
    assert searched.sum() < plain.sum()


def test_the_search_finds_the_best_ratio_of_the_grid() -> None:
    weight = torch.randn(5, 200)
    grid = find_grid(weight, 4)
    top = weight.abs().amax(1)
    for row in range(5):
        errors = []
        for step in range(80):
            scale = top[row] * (1 - step / 100) / 7
            errors.append(((weight[row] / scale).round().clamp(-8, 7) * scale - weight[row]).square().sum())
        best = int(torch.stack(errors).argmin())
        assert grid.scale[row, 0] == pytest.approx(float(top[row] * (1 - best / 100) / 7))


def test_gaussian_weights_prefer_asymmetric_or_searched_symmetric() -> None:
    """A rotated weight has no outliers; a symmetric grid of 15 levels then loses to 16 levels by a little only."""
    weight = torch.randn(256, 512)
    symmetric, asymmetric = squared_error(weight).sum(), squared_error(weight, symmetric=False).sum()
    assert asymmetric < symmetric < 1.15 * asymmetric


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_rows_and_constant_rows(bits: int, symmetric: bool) -> None:
    weight = torch.randn(4, 32)
    weight[1] = 0
    weight[2] = 0.7
    values = quantize_rtn(weight, bits, symmetric=symmetric).dequantize()
    assert values.isfinite().all()
    assert not values[1].any()
    assert values[2] == pytest.approx(0.7, rel=0.34)


def test_codes_reach_both_ends() -> None:
    weight = torch.linspace(-8, 7, 16)[None].repeat(2, 1)
    weight[1] = -weight[1]
    codes = quantize_rtn(weight * 0.1, 4, symmetric=False, search=False).codes
    assert codes.min() == -8
    assert codes.max() == 7


def test_importance_decides_between_errors() -> None:
    weight = torch.randn(8, 64)
    weight[:, 0] *= 8
    importance = torch.full((64,), 1e-4)
    importance[0] = 1.0
    plain = find_grid(weight, 4).scale
    weighed = find_grid(weight, 4, importance=importance).scale
    error = [(quantized - weight[:, 0]).abs().sum() for quantized in (_first(weight, plain), _first(weight, weighed))]
    assert error[1] < error[0]


def _first(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight[:, 0] / scale[:, 0]).round().clamp(-8, 7) * scale[:, 0]


def test_group_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="group size 48 does not divide the 100 inputs"):
        as_groups(torch.zeros(2, 100), 48)
