"""Rotation with the model, or only the arithmetic, on a GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from quarot.rotation.rotate import rotate_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_model_on_the_gpu(
    family: str, tiny_model: Callable[..., Any], exact_logits: Callable[..., torch.Tensor], token_ids: torch.Tensor
) -> None:
    model, ids = tiny_model(family, dtype=torch.float64).cuda(), token_ids.cuda()
    before = exact_logits(copy.deepcopy(model), ids)
    rotate_model(model, progress=False)
    assert (exact_logits(model, ids) - before).norm() < 1e-10 * before.norm()


def test_model_on_the_cpu_and_arithmetic_on_the_gpu(family: str, tiny_model: Callable[..., Any]) -> None:
    here, there = tiny_model(family, dtype=torch.float64), tiny_model(family, dtype=torch.float64)
    rotate_model(here, progress=False)
    rotate_model(there, device="cuda", progress=False)
    state = here.state_dict()
    for name, tensor in there.state_dict().items():
        assert tensor.device.type == "cpu"
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-12)


def test_online_transforms_in_half_precision(tiny_model: Callable[..., Any], token_ids: torch.Tensor) -> None:
    model = tiny_model("llama", dtype=torch.float16).cuda()
    with torch.no_grad():
        before = model(token_ids.cuda()).logits.float()
        rotate_model(model, progress=False)
        after = model(token_ids.cuda()).logits.float()
    assert (after - before).norm() < 2e-2 * before.norm()


def test_time_and_extra_memory_of_7b_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """Less than one layer in float64 beside the model, and (warm) well under a second for a layer."""
    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, vocab_size=32000)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).half()
    model.to_empty(device="cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    layer = 8 * sum(p.numel() for p in model.model.layers[0].parameters())
    offline = {"r3": False, "r4": False, "o_proj_online": "none", "record": False, "progress": False}
    for _ in range(2):
        model.quarot_rotation = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        rotate_model(model, **offline)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        assert torch.cuda.max_memory_allocated() - before < layer
    with capsys.disabled():
        print(f"\nrotating 2 layers and both ends of a 7B model: {elapsed:.2f} s")
    assert elapsed < 3
