"""Means, second moments and cross moments, in steps and with weights."""

import pytest
import torch

from quarot.calibration.moments import Moments


@pytest.mark.parametrize("weighted", [False, True])
def test_against_the_definition(weighted: bool) -> None:
    x, t = torch.randn(4, 10, 6), torch.randn(4, 10, 3)
    w = torch.rand(4, 10, 1) if weighted else None
    moments = Moments()
    for i in range(4):
        moments.add(x[i : i + 1], None if w is None else w[i : i + 1], t=t[i : i + 1])
    share = (torch.ones(40, 1) if w is None else w.reshape(-1, 1)).double()
    share /= share.sum()
    rows, other = x.reshape(-1, 6).double(), t.reshape(-1, 3).double()
    assert moments.hessian.double() == pytest.approx((rows * share).T @ rows, abs=1e-6)
    assert moments.cross("t").double() == pytest.approx((other * share).T @ rows, abs=1e-6)
    assert moments.mean().double() == pytest.approx((rows * share).sum(0), abs=1e-6)
    assert moments.mean("t").double() == pytest.approx((other * share).sum(0), abs=1e-6)


def test_half_inputs_are_summed_in_fp32() -> None:
    x = torch.full((70000, 1), 1.0, dtype=torch.float16)
    moments = Moments()
    moments.add(x)
    assert moments.hessian.dtype == torch.float32
    assert float(moments.hessian) == 1


def test_no_tokens() -> None:
    with pytest.raises(ValueError, match="no calibration tokens"):
        _ = Moments().hessian
