"""Folds against the dense formula, and within their memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quarot.nn.rms_norm import RMSNorm
from quarot.nn.rotated_linear import RotatedLinear
from quarot.rotation import fold
from quarot.rotation.fold import fold_weight
from quarot.rotation.orthogonal import HadamardRotation, MatrixRotation, random_orthogonal, random_signs
from quarot.rotation.spec import HadamardSpec


@pytest.mark.parametrize("chunk", [1, 100, 1 << 21])
def test_fold_is_the_formula_whatever_the_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """W' = S (W diag(g)) R^T and b' = S b, where S covers some of the rows."""
    monkeypatch.setattr(fold, "CPU_CHUNK", chunk)
    weight, bias, gain = (
        torch.randn(20, 24, dtype=torch.float64),
        torch.randn(20, dtype=torch.float64),
        torch.rand(24).double(),
    )
    r = HadamardRotation(HadamardSpec(12, 12, 1), before=random_signs(12, 1))
    s = MatrixRotation(random_orthogonal(4, 2))
    dense_r = torch.kron(torch.eye(2, dtype=torch.float64), r(torch.eye(12, dtype=torch.float64)).T.contiguous())
    dense_s = torch.eye(20, dtype=torch.float64)
    dense_s[8:16, 8:16] = torch.kron(torch.eye(2, dtype=torch.float64), s.matrix)
    expected = dense_s @ (weight * gain) @ dense_r.T
    expected_bias = dense_s @ bias
    fold_weight(weight, bias, gain=gain, inputs=[r], outputs=[(s, slice(8, 16))])
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(bias, expected_bias)


def test_random_rotations_are_orthogonal_and_repeatable() -> None:
    matrix = random_orthogonal(37, 4)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(37, dtype=torch.float64))
    assert torch.equal(matrix, random_orthogonal(37, 4))
    signs = random_signs(1000, 4)
    assert torch.equal(signs, random_signs(1000, 4))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert signs.mean().abs() < 0.15


def test_signs_between_keep_full_width_and_per_head_transforms_from_cancelling() -> None:
    """H_full (I (x) H_head) has mostly zero entries; with signs between, the mass is spread over the whole width."""
    head, full = HadamardSpec(64, 1, 64), HadamardSpec(576, 36, 16)
    basis = torch.eye(576, dtype=torch.float64)
    plain = HadamardRotation(full)(HadamardRotation(head)(basis))
    signed = HadamardRotation(full)(HadamardRotation(head, after=random_signs(64, 1))(basis))
    assert plain.abs().amax() > 0.3
    assert signed.abs().amax() < 0.2


@pytest.mark.parametrize("bias", [True, False])
def test_rotated_linear_is_the_linear_it_came_from(bias: bool) -> None:
    linear, spec = nn.Linear(24, 5, bias=bias).double(), HadamardSpec(24, 12, 2)
    x = torch.randn(3, 2, 24, dtype=torch.float64)
    expected = linear(x)
    storage = linear.weight.data_ptr()
    fold_weight(linear.weight, linear.bias, inputs=[HadamardRotation(spec)])
    rotated = RotatedLinear.from_linear(linear, spec)
    torch.testing.assert_close(rotated(x), expected)
    assert rotated.rotated_weight.data_ptr() == storage
    assert "weight" not in dict(rotated.named_parameters())
    assert "input_rotation=H12*2" in repr(rotated)
    with pytest.raises(ValueError, match="does not fit 25 input features"):
        RotatedLinear(25, 5, bias=False, input_rotation=spec)


def test_rms_norm_without_gain_computes_in_the_wider_dtype() -> None:
    x = torch.randn(3, 64, dtype=torch.float64) * 1e3
    expected = F.rms_norm(x, (64,), eps=1e-2)
    torch.testing.assert_close(RMSNorm(1e-2)(x), expected, rtol=1e-13, atol=0)
    half = RMSNorm(1e-2)(x.half())
    assert half.dtype == torch.float16
    assert half.isfinite().all()


_MEASURE = """
import resource, torch, transformers
from quarot.rotation.rotate import rotate_model
torch.set_num_threads(1)
config = transformers.LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_attention_heads=8, num_hidden_layers=2, vocab_size=24000
)
model = transformers.LlamaForCausalLM(config).half()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rotate_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(
    hidden_size=64, intermediate_size=96, num_attention_heads=2, num_hidden_layers=1, vocab_size=64)), progress=False)
before = peak()
rotate_model(model, progress=False)
print(peak() - before, 8 * sum(p.numel() for p in model.model.layers[0].parameters()))
"""


def test_peak_memory_is_below_one_layer_in_float64() -> None:
    """In a process of its own: rotating needs less than the float64 copy of a layer, wide embeddings or not."""
    out = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True).stdout
    extra, layer = map(int, out.split())
    assert extra < layer


def test_progress_can_be_silenced(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    from quarot.progress import progress_bar

    monkeypatch.delenv("QUAROT_PROGRESS", raising=False)
    assert list(progress_bar(range(3), "rotating")) == [0, 1, 2]
    assert "rotating" in capfd.readouterr().err
    list(progress_bar(range(3), "rotating", show=False))
    monkeypatch.setenv("QUAROT_PROGRESS", "0")
    list(progress_bar(range(3), "rotating"))
    assert capfd.readouterr().err == ""
