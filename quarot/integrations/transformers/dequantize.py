"""From quantised and online-rotated linear layers back to plain ``nn.Linear``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quarot.nn.quant_linear import QuantLinear
from quarot.nn.rotated_linear import RotatedLinear
from quarot.nn.split_experts import merge_experts
from quarot.ops.hadamard import transposed_hadamard
from quarot.rotation.spec import HadamardSpec


def plain_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Every QuantLinear and RotatedLinear becomes the ``nn.Linear`` it computes (activations unquantised).

    Experts become the 3-D parameters that transformers has.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, (QuantLinear, RotatedLinear)):
            weight = module.dequantize() if isinstance(module, QuantLinear) else module.rotated_weight
            if module.input_rotation is not None:
                weight = fold_input_rotation(weight, module.input_rotation)
            model.set_submodule(name, _linear(weight.to(dtype), module.bias, module.training))
    merge_experts(model)


def fold_input_rotation(weight: Tensor, rotation: HadamardSpec) -> Tensor:
    """``W`` with ``F.linear(x, W) = F.linear(hadamard(x), weight)``: weight H, in float64.

    Args:
        weight: [N, K] in the basis of the rotated input.
    """
    return transposed_hadamard(weight.to(torch.float64), rotation.order, rotation.pow2, rotation.inner)


def _linear(weight: Tensor, bias: Tensor | None, training: bool) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    return linear.train(training)
