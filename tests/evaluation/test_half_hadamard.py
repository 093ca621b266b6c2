"""Online transforms through fp16: what they compute, where they are put, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quarot.evaluation.half_hadamard import half_hadamard, half_hadamard_transform
from quarot.ops.hadamard import hadamard_transform
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model
from quarot.rotation.spec import HadamardSpec


def test_every_step_is_rounded_to_half() -> None:
    x, spec = torch.randn(7, 192), HadamardSpec(192, 12, 16)
    exact, found = hadamard_transform(x, spec), half_hadamard_transform(x, spec)
    assert found.dtype == x.dtype
    assert torch.equal(found, found.half().float())
    assert 1e-4 < ((found - exact).norm() / exact.norm()).item() < 1e-3


def test_every_online_transform_changes_and_comes_back(tiny_model: Callable[..., Any], token_ids: torch.Tensor) -> None:
    """Rotated only, cache only and fully quantised; the change is that of fp16, not that of a missing transform."""
    for bits in ({}, {"w_bits": 16, "a_bits": 16}, {"w_method": "rtn"}):
        model = tiny_model("llama")
        rotate_model(model, progress=False)
        if bits:
            quantize_model(model, progress=False, **bits)
        with torch.no_grad():
            before = model(token_ids, use_cache=False).logits
            with half_hadamard(model):
                inside = model(token_ids, use_cache=False).logits
            assert torch.equal(model(token_ids, use_cache=False).logits, before)
        change = ((inside - before).norm() / before.norm()).item()
        # Codes at a rounding boundary flip, so the change in a quantised model is larger than fp16's own error.
        assert 1e-5 < change < (0.2 if bits else 5e-3)


def test_keys_and_queries_are_among_them(tiny_model: Callable[..., Any], token_ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False, o_proj_online="none", r4=False)
    quantize_model(model, w_bits=16, a_bits=16, progress=False)
    with torch.no_grad():
        before = model(token_ids, use_cache=False).logits
        with half_hadamard(model):
            assert not torch.equal(model(token_ids, use_cache=False).logits, before)
        assert torch.equal(model(token_ids, use_cache=False).logits, before)
