"""Quantising ``lm_head``, for those who ask for it (the paper keeps it in full precision)."""

from __future__ import annotations

from typing import Any

import torch

from quarot.architectures import Architecture
from quarot.calibration.decoder import LayerInputs
from quarot.calibration.moments import Moments
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear, linear_weight
from quarot.quantization.gptq import check_finite, gptq_options, quantize_gptq
from quarot.quantization.grid import grid_options
from quarot.quantization.rtn import quantize_rtn


def quantize_head(
    model: Any, record: Architecture, config: QuarotConfig, inputs: LayerInputs | None, device: torch.device | None
) -> None:
    """Replace ``lm_head`` by its integers; ``inputs`` are the hidden states behind the last decoder layer."""
    head = model.get_submodule(record.lm_head)
    weight = linear_weight(head).detach()
    check_finite(weight, None, record.lm_head)
    weight = weight.to(device or weight.device)
    parts: Any = (None, None, None)
    if config.w_bits < 16 and config.w_method == "gptq" and inputs is not None:
        moments, norm = Moments(), model.get_submodule(record.final_norm)
        for hidden in inputs.steps:
            with torch.no_grad():
                moments.add(norm(hidden.to(next(norm.parameters()).device)))
        hessian = moments.hessian.to(weight.device)
        parts = quantize_gptq(weight, hessian, config.w_bits, **gptq_options(config), name=record.lm_head)
    elif config.w_bits < 16:
        parts = quantize_rtn(weight, config.w_bits, **grid_options(config))
    model.set_submodule(record.lm_head, QuantLinear.from_linear(head, config, *parts))
