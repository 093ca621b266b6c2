"""What is plainly not meant (a name for a model, a dict for a configuration, integers for activations) is told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import quarot
from quarot.nn.quant_linear import QuantLinear
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.quantization.rtn import quantize_rtn

RTN: dict[str, Any] = {"w_method": "rtn", "progress": False}


@pytest.mark.parametrize("act", [quarot.rotate_model, quarot.quantize_model])
@pytest.mark.parametrize("model", ["meta-llama/Llama-2-7b-hf", None, {}])
def test_what_is_no_model(act: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(TypeError, match=r"a loaded transformers model is wanted, not .*from_pretrained"):
        act(model)


def test_a_model_in_a_wrong_guise_is_told_the_way_out(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with pytest.raises(NotImplementedError, match=r"LlamaModel is not supported: .*AutoModelForCausalLM"):
        quarot.rotate_model(model.model)
    with pytest.raises(NotImplementedError, match=r"LlamaForSequenceClassification is not .*AutoModelForCausalLM"):
        quarot.rotate_model(transformers.LlamaForSequenceClassification(model.config))
    with pytest.raises(NotImplementedError, match="it is compiled; rotate and quantise first"):
        quarot.quantize_model(torch.compile(model), **RTN)
    with pytest.raises(NotImplementedError, match=r"pass its \.module"):
        quarot.quantize_model(nn.DataParallel(model), **RTN)


def test_a_configuration_is_no_dict(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model, config = tiny_model("llama"), {"w_bits": 4}
    with pytest.raises(TypeError, match=r"must be a QuarotConfig, not {'w_bits': 4}; QuarotConfig.from_dict"):
        quarot.quantize_model(model, config)  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(TypeError, match=r"must be a QuarotConfig, not {'w_bits': 4}"):
        quarot.quantize_checkpoint(tmp_path / "model", tmp_path / "out", config)  # type: ignore[arg-type]


def test_a_model_whose_cache_is_quantised_is_not_called_rotated(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    quarot.quantize_model(model, w_bits=16, a_bits=16, **RTN)
    with pytest.raises(ValueError, match="already quantised by quarot"):
        quarot.rotate_model(model)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_activations_are_floats(dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 32)
    layer = QuantLinear.from_linear(linear, quarot.QuarotConfig(), *quantize_rtn(linear.weight.detach(), 4))
    with pytest.raises(TypeError, match=f"can be quantised, not {dtype}"):
        layer(torch.ones(2, 64).to(dtype))


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(47), torch.ones(48, 1), torch.ones(48, dtype=torch.int32)])
def test_a_bias_fits_its_outputs(bias: torch.Tensor) -> None:
    codes, scales = torch.zeros(2, 64, dtype=torch.int8), (torch.ones(2), torch.ones(48))
    tiles, rows = torch.zeros(3, 2, 256, dtype=torch.uint8), torch.zeros(48, 64, dtype=torch.int8)
    for gemm, weight in ((gemm_w4a4, tiles), (gemm_w8a8, rows)):
        with pytest.raises(ValueError, match=r"bias must be \[48\] floats on cpu"):
            gemm(codes, scales[0], weight, scales[1], bias, torch.float16)


def test_a_transform_takes_a_tensor_and_a_spec() -> None:
    for x, spec in ((torch.ones(2, 64), 64), ([1.0, 2.0], None)):
        with pytest.raises(TypeError, match="takes a tensor and a HadamardSpec"):
            quarot.hadamard_transform(x, spec)  # type: ignore[arg-type]
