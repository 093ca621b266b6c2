"""Float32 models with grouped queries attend through a fused kernel, and compute what they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import quarot
from quarot.integrations.transformers.plain_attention import fused_float32_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _kernels(run: Callable[[], Any]) -> str:
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profiler.key_averages())


def test_no_scores_are_formed_and_logits_are_equal(tiny_model: Callable[..., Any]) -> None:
    model, ids = tiny_model("qwen2").cuda(), torch.randint(3, 128, (2, 200), device="cuda")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert "softmax" in _kernels(lambda: model.model(ids, use_cache=False))
        with fused_float32_attention(model):
            assert model.config._attn_implementation == "quarot"
            found = model(ids, use_cache=False).logits
            assert "softmax" not in _kernels(lambda: model.model(ids, use_cache=False))
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_perplexity_is_that_of_the_cpu(tiny_model: Callable[..., Any]) -> None:
    model, ids = tiny_model("qwen2"), torch.randint(3, 128, (600,))
    expected = quarot.perplexity(model, ids, window=200, progress=False).ppl
    assert quarot.perplexity(model.cuda(), ids, window=200, progress=False).ppl == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_left_alone(dtype: torch.dtype, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen2", dtype=dtype).cuda()
    with fused_float32_attention(model):
        assert model.config._attn_implementation == "sdpa"
