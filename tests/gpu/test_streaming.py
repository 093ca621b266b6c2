"""Quantising a checkpoint on the GPU, layer by layer, and loading it there: the same bits, and little memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import quarot
from quarot.calibration.moments import Moments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WINDOWS = torch.randint(3, 128, (16, 64), generator=torch.Generator().manual_seed(5))
FIELDS: dict[str, Any] = {"calibration": WINDOWS, "progress": False}
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_streamed_equals_in_memory(
    tiny_model: Callable[..., nn.Module], tmp_path: Path, method: str, family: str
) -> None:
    tiny_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    quarot.quantize_checkpoint(tmp_path / "source", tmp_path / "out", device="cuda", w_method=method, **FIELDS)
    streamed = quarot.load(tmp_path / "out", device_map="cuda").state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype="auto", device_map="cuda")
    quarot.rotate_model(model, progress=False)
    whole = quarot.quantize_model(model, w_method=method, **FIELDS).state_dict()
    assert streamed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(streamed[name], tensor), name


def test_one_layer_on_the_device(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    tiny_model("llama", **SIZES, **HEADS).save_pretrained(tmp_path / "source")
    for dtype in (torch.float32, torch.float64):  # the workspace of cuBLAS stays
        torch.ones(64, 64, dtype=dtype, device="cuda").mm(torch.ones(64, 64, dtype=dtype, device="cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    options = {"device": "cuda", "w_method": "rtn", "w_clip": False, "progress": False}
    quarot.quantize_checkpoint(tmp_path / "source", tmp_path / "out", **options)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    layer = 4 * (4 * 512 * 512 + 3 * 512 * 1536)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 5 * layer  # of 8: its weights, one of them in float64, codes


def test_loading_holds_the_packed_weights_alone(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float16, **SIZES, **HEADS)
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", w_clip=False, progress=False).save_pretrained(tmp_path)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loaded = quarot.load(tmp_path, device_map="cuda")
    assert torch.cuda.max_memory_allocated() - before < 1.1 * stored + (1 << 20)
    assert loaded.device.type == "cuda"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hessians_of_half_precision_tokens(dtype: torch.dtype) -> None:
    """Tensor cores truncate their sums; what is left of it is far below the damping of 1e-2."""
    x = torch.randn(20000, 300, device="cuda").to(dtype)
    target = torch.randn(20000, 70, device="cuda").to(dtype)
    moments = Moments()
    for some, other in zip(x.split(9000), target.split(9000), strict=True):
        moments.add(some, t=other)
    exact, cross = x.double().T @ x.double() / len(x), target.double().T @ x.double() / len(x)
    assert (moments.hessian - exact).norm() < 5e-5 * exact.norm()
    assert (moments.cross("t") - cross).norm() < 1e-3 * cross.norm()
    assert (moments.mean() - x.double().mean(0)).abs().max() < 1e-5
