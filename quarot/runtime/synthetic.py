"""Models of a given configuration with random weights, made where they will run: for measuring speed and memory.

A quantised one is filled straight into packed codes, so a 70B-shaped model never exists in full precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from quarot.architectures import architecture_of, geometry
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear
from quarot.rotation.planning import make_plan


def random_model(config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A full-precision model with random weights, initialised on ``device``."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_quantized_model(
    config: PretrainedConfig,
    quarot_config: QuarotConfig | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> Any:
    """A model as :func:`quarot.quantize_model` would leave it, with random codes, allocated once in its packed form.

    Args:
        config: of the full-precision model.
        quarot_config: what to quantise; its ``rotation`` is filled in with the default plan of these sizes.
        dtype: of embeddings, head and activations.
        device: where the tensors are made.
        seed: of the random codes.
    """
    from quarot.integrations.transformers import attach, prepare

    quarot_config = quarot_config or QuarotConfig(w_method="rtn")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plan = make_plan(architecture_of(model), geometry(model))
    quarot_config = quarot_config.replace(rotation=plan.to_dict())
    prepare(model, quarot_config, dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        _fill(module, generator)
    _restore_buffers(model, config, device)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    attach(model.eval(), quarot_config)
    return model


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Random codes with a mean of 0, and scales that keep the output of a layer about as large as its input."""
    if isinstance(module, QuantLinear):
        if module.w_bits < 16:
            _draw(module.qweight.data, generator)
            spread = 2.0 ** (module.w_bits - 1) / math.sqrt(3)
            module.weight_scale.data.fill_(1 / (spread * math.sqrt(module.in_features)))
            if module.weight_zero is not None:
                module.weight_zero.data.zero_()
        if module.bias is not None:
            module.bias.data.zero_()
        return
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 1:
            parameter.data.fill_(0.0 if name == "bias" else 1.0)
        else:
            std = 0.02 if isinstance(module, nn.Embedding) else parameter.shape[-1] ** -0.5
            parameter.data.normal_(std=std, generator=generator)


def _draw(codes: torch.Tensor, generator: torch.Generator) -> None:
    """Any byte, or two of any four bits, but for the lowest code, which has no opposite and becomes 0.

    With it the mean would be -1/2, and all outputs of a layer would have a part in common, which grows from layer to
    layer until SiLU and R4 take the slow way of rows out of range.
    """
    if codes.dtype != torch.uint8:
        codes.random_(-127, 128, generator=generator)
        return
    codes.random_(0, 256, generator=generator)
    for nibble, lowest in ((0x0F, 0x08), (0xF0, 0x80)):
        codes.sub_(((codes & nibble) == lowest).to(codes.dtype), alpha=lowest)


def _restore_buffers(model: Any, config: PretrainedConfig, device: torch.device | str) -> None:
    """RoPE frequencies are computed, not stored: build the modules that hold buffers again."""
    for name, module in list(model.named_modules()):
        if any(True for _ in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(config=config).to(device))
