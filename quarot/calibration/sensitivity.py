"""What rounding one part of a model to some bits does to its next-token distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quarot.architectures import architecture_of, decoder_layers
from quarot.calibration.decoder import LayerInputs
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import linear_weight
from quarot.progress import progress_bar
from quarot.quantization.rtn import quantize_rtn
from quarot.tuning.distillation import head_divergence

TOKENS = 16384
"""Calibration tokens that sensitivities are measured on: the first windows, one at least."""


@torch.no_grad()
def divergences(
    model: Any,
    units: Sequence[tuple[int, Sequence[str]]],
    configs: dict[str, QuarotConfig],
    choices: Sequence[int],
    windows: torch.Tensor,
    progress: bool = True,
) -> torch.Tensor:
    """Mean KL divergence from the unrounded model, in nats a token, with one unit rounded at a time.

    Args:
        model: with float weights, which are back in place afterwards.
        units: decoder layer and names of linear layers in it; in the order of the layers.
        configs: grids of the linear layers, by name; their ``w_bits`` do not count.
        choices: bits to try.
        windows: int64 [W, T].
        progress: show a progress bar.

    Returns:
        fp32 [units, choices] on the CPU.

    Rounding is to nearest, whatever the method will be; activations and the cache stay unquantised. Each measurement
    runs the layers from the rounded one to the last, and the head.
    """
    layers = [layer for _, layer in decoder_layers(model)]
    inputs = LayerInputs(model, windows[: max(1, TOKENS // windows.shape[1])], None)
    wanted = _final_states(model, layers, inputs, 0)
    record = architecture_of(model)
    head = linear_weight(model.get_submodule(record.lm_head)).detach()
    scaling = float(getattr(model.config, "logits_scaling", None) or 1.0)
    found = torch.zeros(len(units), len(choices))
    for index, layer in enumerate(progress_bar(layers, "measuring bits", progress)):
        for row, (place, names) in enumerate(units):
            if place != index:
                continue
            for column, bits in enumerate(choices):
                with _rounded(model, names, configs, bits):
                    states = _final_states(model, layers, inputs, index)
                parts = [head_divergence(s, w, head, scaling) * s.shape[0] for s, w in zip(states, wanted, strict=True)]
                found[row, column] = (torch.stack(parts).sum() / sum(s.shape[0] for s in states)).cpu()
        inputs.advance(index, layer)
    return found


def _final_states(model: Any, layers: list[nn.Module], inputs: LayerInputs, start: int) -> list[torch.Tensor]:
    """Outputs of the final norm, step by step, of the hidden states in front of layer ``start``."""
    norm = model.get_submodule(architecture_of(model).final_norm)
    states = []
    for hidden in inputs.steps:
        for index in range(start, len(layers)):
            hidden = inputs.run(index, layers[index], hidden)
        states.append(norm(hidden.to(next(norm.parameters()).device)))
    return states


@contextmanager
def _rounded(model: nn.Module, names: Sequence[str], configs: dict[str, QuarotConfig], bits: int) -> Iterator[None]:
    """Rounded weights in place of the linear layers' own."""
    weights = [linear_weight(model.get_submodule(name)) for name in names]
    kept = [weight.data for weight in weights]
    try:
        for name, weight in zip(names, weights, strict=True):
            c = configs[name]
            grid: dict[str, Any] = {"symmetric": c.w_symmetric, "group_size": c.w_group_size, "search": c.w_clip}
            weight.data = quantize_rtn(weight.data, bits, **grid).dequantize().to(weight.dtype)
        yield
    finally:
        for weight, data in zip(weights, kept, strict=True):
            weight.data = data
