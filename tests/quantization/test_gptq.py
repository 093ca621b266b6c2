"""GPTQ: better than rounding, and sane where Hessians are not (FIELD reports: rank one, dead inputs, act order)."""

import logging

import pytest
import torch

from quarot.quantization.gptq import inverse_factor, quantize_gptq
from quarot.quantization.grid import QuantizedWeight
from quarot.quantization.rtn import quantize_rtn

N, K = 48, 96


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1000, K, generator=generator) @ torch.randn(K, K, generator=generator) / K**0.5


def hessian(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / x.shape[0]


def loss(result: QuantizedWeight, weight: torch.Tensor, x: torch.Tensor) -> float:
    return float(((result.dequantize() - weight) @ x.T).square().mean())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 32, 96])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_better_than_round_to_nearest(
    weight: torch.Tensor, inputs: torch.Tensor, bits: int, group_size: int | None, symmetric: bool, act_order: bool
) -> None:
    grid = {"symmetric": symmetric, "group_size": group_size}
    gptq = quantize_gptq(weight, hessian(inputs), bits, act_order=act_order, **grid)  # type: ignore[arg-type]
    assert loss(gptq, weight, inputs) < 0.8 * loss(quantize_rtn(weight, bits, **grid), weight, inputs)  # type: ignore[arg-type]


def test_matches_the_textbook_loop(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    """Column by column with the inverse of the remaining Hessian, in float64 (the OBQ recursion)."""
    h = hessian(inputs).double()
    h += 0.01 * h.diagonal().mean() * torch.eye(K, dtype=torch.double)
    scale = quantize_gptq(weight, hessian(inputs), 4).scale.double()
    w, inverse = weight.double().clone(), torch.linalg.inv(h)
    codes = torch.empty(N, K)
    for i in range(K):
        codes[:, i] = (w[:, i] / scale).round().clamp(-8, 7)
        error = (w[:, i] - codes[:, i] * scale) / inverse[i, i]
        w -= error[:, None] * inverse[i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    same = (quantize_gptq(weight, hessian(inputs), 4).codes == codes).float().mean()
    assert same > 0.995  # the rest are ties decided by fp32 rounding


def test_block_size_changes_speed_not_results(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    results = [quantize_gptq(weight, hessian(inputs), 4, block_size=size).codes for size in (1, 7, 32, 128)]
    for other in results[1:]:
        assert (other != results[0]).float().mean() < 0.005


@pytest.mark.parametrize(
    "fields", [{}, {"symmetric": False}, {"group_size": 32}, {"group_size": 32, "act_order": True}]
)
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_each_output_keeps_the_factor_that_serves_it_best(
    weight: torch.Tensor,
    inputs: torch.Tensor,
    fields: dict[str, object],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a search finds is, output by output, the best of the single factors, with its scales and latents."""
    monkeypatch.setattr("quarot.quantization.gptq._STACKED_WEIGHTS", at_once * N * K)
    h, factors = hessian(inputs), (1.0, 0.8, 1.2)
    latents = [torch.empty_like(weight) for _ in range(4)]
    found = quantize_gptq(weight, h, 3, factors=factors, latent=latents[3], **fields)  # type: ignore[arg-type]
    single = [
        quantize_gptq(weight, h, 3, factors=(factor,), latent=latent, **fields)  # type: ignore[arg-type]
        for factor, latent in zip(factors, latents, strict=False)
    ]
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(K)
    losses = []
    for result in single:
        error = result.dequantize() - weight
        losses.append(((error @ damped) * error).sum(1))
    chosen = torch.stack(losses).argmin(0)
    assert len(chosen.unique()) == 3
    for row, index in enumerate(chosen.tolist()):
        assert torch.equal(found.codes[row], single[index].codes[row])
        assert torch.equal(found.scale[row], single[index].scale[row])
        assert torch.equal(latents[3][row], latents[index][row])


def test_repeats_exactly(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    first, second = (quantize_gptq(weight, hessian(inputs), 4) for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale, second.scale)


def test_stacked_rows_do_not_influence_each_other(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    whole = quantize_gptq(weight, hessian(inputs), 4)
    half = quantize_gptq(weight[: N // 2], hessian(inputs), 4)
    assert (whole.codes[: N // 2] != half.codes).float().mean() < 0.005


def test_act_order_with_one_scale_returns_original_order(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    inputs = inputs * torch.linspace(0.1, 3, K)
    result = quantize_gptq(weight, hessian(inputs), 8, act_order=True)
    assert result.dequantize() == pytest.approx(weight, abs=0.2)


def test_identical_inputs_finish(weight: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(1, K).repeat(50, 1)
    with caplog.at_level(logging.WARNING, "quarot"):
        result = quantize_gptq(weight, hessian(x), 4, damping=1e-18, name="some.layer")
    assert result.dequantize().isfinite().all()
    assert "some.layer" in caplog.text


def test_half_of_the_columns_without_variance(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    inputs[:, ::2] = 0
    assert quantize_gptq(weight, hessian(inputs), 4).dequantize().isfinite().all()
    assert quantize_gptq(weight, torch.zeros(K, K), 4).dequantize().isfinite().all()


def test_a_dead_input_changes_nothing_else(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    weight[:, 5] *= 100  # would spoil every scale
    inputs[:, 5] = 0
    alive = [i for i in range(K) if i != 5]
    with_dead = quantize_gptq(weight, hessian(inputs), 4)
    without = quantize_gptq(weight[:, alive], hessian(inputs[:, alive]), 4)
    assert torch.equal(with_dead.scale, without.scale)
    assert (with_dead.codes[:, alive] != without.codes).float().mean() < 0.005


def test_a_dead_group_keeps_its_weights(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    inputs[:, 32:64] = 0
    for act_order in (False, True):
        result = quantize_gptq(weight, hessian(inputs), 8, group_size=32, act_order=act_order)
        assert result.dequantize()[:, 32:64] == pytest.approx(weight[:, 32:64], abs=0.05)


def test_zero_rows_stay_zero(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    weight[3] = 0
    result = quantize_gptq(weight, hessian(inputs), 4)
    assert not result.codes[3].any()
    assert not result.scale[3]


def test_inverse_factor(inputs: torch.Tensor) -> None:
    h = hessian(inputs)
    upper = inverse_factor(h, 0.01).double()
    assert torch.equal(upper, upper.triu())
    damped = h.double() + 0.01 * h.diagonal().mean() * torch.eye(K)
    assert upper.T @ upper @ damped == pytest.approx(torch.eye(K).double(), abs=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named(weight: torch.Tensor, inputs: torch.Tensor, bad: float) -> None:
    h = hessian(inputs)
    broken = weight.clone()
    broken[0, 0] = bad
    with pytest.raises(ValueError, match=r"layers\.3.q: 1 of 4608 weights"):
        quantize_gptq(broken, h, 4, name="layers.3.q")
    h[0, 0] = bad
    with pytest.raises(ValueError, match=r"layers\.3.q: its calibration inputs"):
        quantize_gptq(weight, h, 4, name="layers.3.q")


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_weighing_the_search_by_the_hessian_helps(weight: torch.Tensor, inputs: torch.Tensor, bits: int) -> None:
    inputs = inputs * torch.logspace(-1, 1, K)
    plain = loss(quantize_gptq(weight, hessian(inputs), bits), weight, inputs)
    assert loss(quantize_gptq(weight, hessian(inputs), bits, weigh_search=True), weight, inputs) < plain * 1.02
