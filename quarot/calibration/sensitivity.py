"""What rounding one part of a model to some bits does to its next-token distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quarot.architectures import architecture_of, decoder_layers, logits_scaling
from quarot.calibration.decoder import LayerInputs
from quarot.config import QuarotConfig
from quarot.integrations.transformers.plain_attention import fused_float32_attention
from quarot.nn.kv_format import KVFormat
from quarot.nn.quant_linear import linear_weight
from quarot.progress import progress_bar
from quarot.quantization.rtn import quantize_rtn

TOKENS = 4096
"""Calibration tokens that sensitivities are measured on: the first windows, one at least."""

Trial = tuple[int, Callable[[], AbstractContextManager[None]]]
"""A decoder layer, and what to do to it while the divergence is measured."""


@torch.no_grad()
def divergences(model: Any, trials: Sequence[Trial], windows: torch.Tensor, progress: bool = True) -> torch.Tensor:
    """Mean KL divergence from the untouched model, in nats a token, of each trial alone.

    Args:
        model: with float weights.
        trials: in any order.
        windows: int64 [W, T].
        progress: show a progress bar.

    Returns:
        fp32 [trials] on the CPU.

    Each trial runs the layers from its own to the last, and the head. Activations stay unquantised. Memory: the hidden
    states and the fp32 log-probabilities of ``TOKENS`` tokens (2 GB for 128k words).
    """
    with fused_float32_attention(model):
        return _divergences(model, trials, windows[: max(1, TOKENS // windows.shape[1])], progress)


def _divergences(model: Any, trials: Sequence[Trial], windows: torch.Tensor, progress: bool) -> torch.Tensor:
    layers = [layer for _, layer in decoder_layers(model)]
    inputs = LayerInputs(model, windows, None)
    wanted = [_log_probabilities(model, states) for states in _final_states(model, layers, inputs, 0)]
    found: list[torch.Tensor | None] = [None] * len(trials)
    for index, layer in enumerate(progress_bar(layers, "measuring bits", progress)):
        for row, (place, trial) in enumerate(trials):
            if place != index:
                continue
            total = torch.zeros((), device=wanted[0].device)
            with trial():
                for target, states in zip(wanted, _final_states(model, layers, inputs, index), strict=True):
                    total += F.kl_div(_log_probabilities(model, states), target, log_target=True, reduction="sum")
            found[row] = total / sum(len(target) for target in wanted)
        inputs.advance(index, layer)
    return torch.stack([one for one in found if one is not None]).cpu()


def _log_probabilities(model: Any, states: torch.Tensor) -> torch.Tensor:
    """fp32 [tokens, vocabulary] from outputs of the final norm."""
    head = linear_weight(model.get_submodule(architecture_of(model).lm_head))
    logits = F.linear(states.flatten(0, 1).to(head), head).float()
    return F.log_softmax(logits / logits_scaling(model), -1)


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
def rounded_weights(
    model: nn.Module, names: Sequence[str], configs: dict[str, QuarotConfig], bits: int
) -> Iterator[None]:
    """Weights of the linear layers ``names`` rounded to nearest on ``bits``, on the grids of ``configs``."""
    weights = [linear_weight(model.get_submodule(name)) for name in names]
    kept = [weight.data for weight in weights]
    try:
        for name, weight in zip(names, weights, strict=True):
            c = configs[name]
            grid: dict[str, Any] = {"symmetric": c.w_symmetric, "group_size": c.w_group_size}
            grid |= {"search": c.w_clip, "norm": c.w_clip_norm}
            weight.data = quantize_rtn(weight.data, bits, **grid).dequantize().to(weight.dtype)
        yield
    finally:
        for weight, data in zip(weights, kept, strict=True):
            weight.data = data


@contextmanager
def rounded_cache(attention: Any, kv_format: KVFormat) -> Iterator[None]:
    """Keys and values of one attention module as a cache of that format gives them back."""
    before = getattr(attention, "quarot_kv_format", None)
    attention.quarot_kv_format = kv_format
    try:
        yield
    finally:
        attention.quarot_kv_format = before
