"""Training on a GPU: the Triton quantiser equals PyTorch's operations, and steps are recorded as CUDA graphs."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model
from quarot.tuning import straight_through
from quarot.tuning.distillation import head_divergence
from quarot.tuning.straight_through import quantize_activations, quantize_cache, round_latents

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WINDOWS = torch.randint(3, 128, (16, 64), generator=torch.Generator().manual_seed(5))
FIELDS: dict[str, Any] = {"calibration": WINDOWS, "progress": False, "w_method": "rtn", "kv_group_size": 32}


def rounded(x: torch.Tensor, bits: int, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, clip = x.clone().requires_grad_(True), torch.tensor(0.85, device="cuda", requires_grad=True)
    y = quantize_activations(x, bits, clip, None)
    y.backward(grad)
    assert x.grad is not None
    assert clip.grad is not None
    return y.detach(), x.grad, clip.grad


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 63, 576, 14336], ids=["one", "odd", "smollm", "llama"])
def test_triton_quantises_as_pytorch_does(
    bits: int, dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(37, 2, columns, device="cuda", generator=generator).to(dtype) for _ in range(2))
    x[3, 1] = 0
    fast = rounded(x, bits, grad)
    monkeypatch.setattr(straight_through, "_kernels", lambda _: None)
    slow = rounded(x, bits, grad)
    # x / s is rounded differently by the two: a code in the middle between two values may fall either way.
    differs = (fast[0] != slow[0]).float().mean()
    assert differs < 2e-3
    assert (fast[1] - slow[1]).float().norm() < 2e-2 * slow[1].float().norm()
    # The clip's gradient is a sum of terms of either sign, about a step times the given gradient each.
    typical = float(grad.float().norm() * x.float().abs().max()) / (2 ** (bits - 1) - 1)
    assert float(fast[2]) == pytest.approx(float(slow[2]), rel=2e-2, abs=0.03 * typical)


def both_ways(monkeypatch: pytest.MonkeyPatch, run: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    pytest.importorskip("triton")
    fast = run()
    monkeypatch.setattr(straight_through, "_kernels", lambda _: None)
    for ours, theirs in zip(fast, run(), strict=True):
        assert ours.dtype == theirs.dtype
        # A value in the middle between two codes may fall either way.
        assert (ours - theirs).float().norm() < 1e-2 * theirs.float().norm()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_triton_rounds_weights_as_pytorch_does(symmetric: bool, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (65, groups, 576 // groups)
    latent, grad = (torch.randn(shape, device="cuda", generator=generator) * 5 for _ in range(2))
    zero = None if symmetric else torch.randint(-8, 8, shape[:2], device="cuda", generator=generator).float()

    def run() -> tuple[torch.Tensor, ...]:
        own = latent.clone().requires_grad_(True)
        y = round_latents(own, zero, 4)
        return y.detach(), *torch.autograd.grad(y, own, grad)

    both_ways(monkeypatch, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (2, 32), (8, 128), (4, 48)])
def test_triton_rounds_the_cache_as_pytorch_does(
    bits: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(2, 3, 50, 2 * group, device="cuda", generator=generator).to(dtype) for _ in range(2))
    x[0, 0, 0] = 1.5

    def run() -> tuple[torch.Tensor, ...]:
        k = x.clone().requires_grad_(True)
        y = quantize_cache(k, bits, 0.95, group)
        return y.detach(), *torch.autograd.grad(y, k, grad)

    both_ways(monkeypatch, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [100, 4096, 49152, 128256])
def test_the_fused_divergence_is_that_of_pytorch(vocabulary: int, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("quarot.tuning.triton_divergence")
    generator = torch.Generator("cuda").manual_seed(0)
    own, target = (torch.randn(9, vocabulary, device="cuda", generator=generator).mul(3).to(dtype) for _ in range(2))
    student, teacher = (torch.log_softmax(x.double() / 1.5, -1) for x in (own, target))
    losses = kernels.divergence_(own, target, 1.5)
    torch.testing.assert_close(losses.double(), (teacher.exp() * (teacher - student)).sum(-1), rtol=1e-4, atol=0)
    slope = student.exp() - teacher.exp()
    assert (own.double() - slope).abs().max() < (1e-2 if dtype == torch.bfloat16 else 1e-4) * slope.abs().max()


def test_small_vocabularies_are_served_without_it() -> None:
    # A lane of the kernel without a logit of its own once made the loss NaN.
    generator = torch.Generator().manual_seed(0)
    student, teacher, head = (torch.randn(n, 16, generator=generator) for n in (9, 9, 100))
    found = head_divergence(*(x.cuda().bfloat16() for x in (student, teacher, head)))
    assert float(found) == pytest.approx(float(head_divergence(student, teacher, head)), rel=0.05)


def test_a_strided_input_is_read_as_it_is() -> None:
    x = torch.randn(64, 5, device="cuda").T
    grad = torch.ones(64, 5, device="cuda").T
    assert torch.allclose(rounded(x, 4, grad)[0], rounded(x.contiguous(), 4, grad.contiguous())[0])


@pytest.mark.parametrize(
    ("home", "dtype"), [("cuda", torch.float32), ("cpu", torch.float32), ("cuda", torch.float16)], ids=str
)
@pytest.mark.parametrize("steps", [{"rotation_steps": 40, "tune_steps": 60}, {"layer_steps": 60}], ids=str)
def test_steps_are_recorded_and_help(
    tiny_model: Callable[..., nn.Module],
    caplog: pytest.LogCaptureFixture,
    steps: dict[str, int],
    home: str,
    dtype: torch.dtype,
) -> None:
    model = tiny_model("llama", dtype=dtype).to(home)
    rotate_model(model, progress=False)
    ids = WINDOWS.cuda()

    def divergence(other: nn.Module) -> float:
        with torch.no_grad():
            wanted, own = (m.cuda()(ids, use_cache=False).logits.float().log_softmax(-1) for m in (model, other))
        return float((wanted.exp() * (wanted - own)).sum(-1).mean())

    plain = quantize_model(copy.deepcopy(model), **FIELDS)
    with caplog.at_level(logging.WARNING, logger="quarot"):
        trained = quantize_model(
            copy.deepcopy(model),
            device="cuda",
            tune_learning_rate=0.01,
            **steps,
            **FIELDS,
        )
    assert not [record for record in caplog.records if "recorded" in record.message]
    assert divergence(trained) < 0.8 * divergence(plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("steps", [{"rotation_steps": 40, "tune_steps": 60}, {"layer_steps": 60}], ids=str)
def test_training_happens_on_a_gpu_that_is_not_the_current_one(
    tiny_model: Callable[..., nn.Module], steps: dict[str, int]
) -> None:
    """Triton's kernels and recorded steps would go to the current one."""
    model = tiny_model("llama").to("cuda:1")
    rotate_model(model, progress=False)
    ids = WINDOWS.to("cuda:1")
    plain = quantize_model(copy.deepcopy(model), **FIELDS)
    trained = quantize_model(copy.deepcopy(model), tune_learning_rate=0.01, **steps, **FIELDS)
    with torch.no_grad():
        wanted, before, after = (torch.log_softmax(m(ids, use_cache=False).logits, -1) for m in (model, plain, trained))
    lost = [float((wanted.exp() * (wanted - own)).sum(-1).mean()) for own in (before, after)]
    assert lost[1] < 0.8 * lost[0]
