"""The trained quantisers are the run-time ones forward, and have the gradients they claim."""

import pytest
import torch

from quarot.calibration.fake_quantize import fake_quantize
from quarot.nn.kv_format import KVFormat
from quarot.quantization.grid import dequantize
from quarot.tuning.distillation import head_divergence
from quarot.tuning.straight_through import quantize_activations, quantize_cache, round_latents


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
@pytest.mark.parametrize("group_size", [None, 32])
def test_activations_are_those_of_run_time(bits: int, group_size: int | None) -> None:
    x = torch.randn(3, 5, 96)
    x[0, 0] = 0
    trained = quantize_activations(x, bits, torch.tensor(0.9), group_size)
    assert trained == pytest.approx(fake_quantize(x, bits, 0.9, group_size), abs=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_cache_is_that_of_run_time(bits: int) -> None:
    key, value = torch.randn(2, 2, 7, 64), torch.randn(2, 2, 7, 64)
    kv_format = KVFormat(key_bits=bits, value_bits=bits, group=32, key_clip=0.95, value_clip=0.8)
    stored = kv_format.simulate(key, value)
    close = {"rel": 1e-3, "abs": 1e-3} if bits == 16 else {"abs": 1e-6}  # 16 bits: stored as a half
    for x, clip, expected in zip((key, value), kv_format.clips, stored, strict=True):
        assert quantize_cache(x, bits, clip, 32) == pytest.approx(expected, **close)


def test_gradient_passes_inside_the_range_only() -> None:
    x = torch.tensor([[1.0, 0.3, -0.97, 0.5]], requires_grad=True)
    clip = torch.tensor(0.8, requires_grad=True)
    quantize_activations(x, 4, clip, None)[0, 1:].sum().backward()
    assert x.grad is not None
    assert clip.grad is not None
    assert x.grad[0, 1] == x.grad[0, 3] == 1
    scale = 0.8 / 7
    codes = torch.tensor([round(0.3 / scale), -8, round(0.5 / scale)])
    values = torch.tensor([0.3 / scale, -8, 0.5 / scale])
    assert float(clip.grad) == pytest.approx(float(((codes - torch.where(codes == -8, 0, values)) / 7).sum()), abs=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_latents_are_rounded_to_the_stored_codes(groups: int, symmetric: bool) -> None:
    zero = None if symmetric else torch.randint(-8, 8, (6, groups)).float()
    latent = (torch.randn(6, groups, 64 // groups) * 6).requires_grad_(True)
    shifted = latent.detach() if zero is None else latent.detach().round() + zero[..., None]
    codes = shifted.round().clamp(-8, 7).to(torch.int8).flatten(1)
    found = round_latents(latent, zero, 4)
    assert torch.equal(found.detach().flatten(1), dequantize(codes, torch.ones(6, groups), zero))

    weight = torch.randn_like(latent)
    (found * weight).sum().backward()
    assert latent.grad is not None
    assert torch.equal(latent.grad, torch.where((shifted >= -8.5) & (shifted <= 7.5), weight, 0))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_activation_gets_the_gradient_of_the_scale(bits: int) -> None:
    x = torch.randn(1, 48, dtype=torch.double).float()
    x[0, 7] = -5
    x.requires_grad_(True)
    weight, clip, qmax = torch.randn(1, 48), torch.tensor(0.7), 2 ** (bits - 1) - 1
    (quantize_activations(x, bits, clip, None) * weight).sum().backward()
    position = (x / (5 * clip / qmax)).detach()
    outside = (position < -qmax - 1) | (position > qmax)
    codes = position.round().clamp(-qmax - 1, qmax)
    of_scale = (weight * torch.where(outside, codes, codes - position)).sum()
    expected = torch.where(outside, 0, weight)
    expected[0, 7] -= of_scale * clip / qmax
    assert x.grad == pytest.approx(expected, abs=1e-4)


def test_the_ends_of_a_cache_group_get_the_gradient_of_its_range() -> None:
    x = torch.rand(1, 32, dtype=torch.float32) * 2 - 1
    x[0, 3], x[0, 9] = 4.0, -3.5  # scale and offset are exact in fp16
    x.requires_grad_(True)
    weight, clip, top = torch.randn(1, 32), 0.5, 15
    (quantize_cache(x, 4, clip, 32) * weight).sum().backward()
    wide = x.detach().double().requires_grad_(True)  # the same through PyTorch's operations, rounding the identity
    low = wide.amin() * clip
    scale = (wide.amax() * clip - low) / top
    position = ((wide - low) / scale).clamp(0, top)
    (((position + (position.round() - position).detach()) * scale + low) * weight).sum().backward()
    assert wide.grad is not None
    assert x.grad == pytest.approx(wide.grad.float(), abs=1e-4)


def test_divergence_and_its_gradient() -> None:
    student, teacher = torch.randn(5, 16, dtype=torch.double, requires_grad=True), torch.randn(5, 16).double()
    head = torch.randn(40, 16)
    own = torch.log_softmax(student.float() @ head.T / 2, -1)
    wanted = torch.log_softmax(teacher.float() @ head.T / 2, -1)
    expected = (wanted.exp() * (wanted - own)).sum(-1).mean()
    (reference,) = torch.autograd.grad(expected, student)
    loss = head_divergence(student, teacher, head, 2.0)
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert student.grad == pytest.approx(reference, abs=1e-6)
    assert float(head_divergence(teacher, teacher, head)) == pytest.approx(0, abs=1e-6)
