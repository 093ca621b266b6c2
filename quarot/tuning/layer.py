"""Learning the codes of one decoder layer at a time, for models of any size.

GPTQ minimises the error of one linear layer's output. Here the linear layers of a decoder layer move together, with
every quantiser of the run-time path in place (weights, activations, keys and values), towards what the full-precision
model has behind this decoder layer; the hidden states in front of it are those of the layers quantised so far, whose
errors it learns to make up for. As in :mod:`quarot.tuning.tune`, which sees the whole model instead, what is learned is
what is stored anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quarot.config import QuarotConfig
from quarot.quantization.layer import LayerQuantizer
from quarot.tuning.attention import quantized_attention
from quarot.tuning.material import Material
from quarot.tuning.optimize import frozen, optimize
from quarot.tuning.trainable_linear import make_trainable
from quarot.tuning.tune import parameter_groups

_TINY = 1e-12


def tune_layer(model: Any, work: LayerQuantizer, config: QuarotConfig) -> list[float]:
    """Train a decoder layer that has been quantised, and take what it learned into ``work``.

    Args:
        model: that the layer is part of.
        work: after ``quantize()``, with hidden states of the full-precision model as its ``reference``.
        config: bits of the cache, ``layer_steps`` and the ``tune_*`` fields.

    Returns:
        The loss of every step: the squared error behind the layer relative to the squared size of the residual stream
        at each token, as the next norm sees it, in units of the error that the first windows start with.

    Raises:
        FloatingPointError: the loss or its gradient is not finite.
    """
    assert work.inputs is not None and work.reference is not None
    device = next(work.layer.parameters()).device
    work.advance_reference()
    hidden, wanted = work.inputs.hidden, work.reference.hidden
    size = min(config.tune_batch_size, len(hidden))
    args, kwargs = work.inputs.arguments(work.index, size, device)

    def error(states: Tensor, target: Tensor) -> Tensor:
        states = states.float() if states.dtype == torch.float16 else states  # see `frozen`
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = work.layer(states, *args, **kwargs)
        out, target = (out[0] if isinstance(out, tuple) else out).float(), target.float()
        return ((out - target).square().mean(-1) / target.square().mean(-1).clamp_min(_TINY)).mean()

    work.install()
    with frozen(work.layer), quantized_attention(model, config):
        layers = make_trainable(work.record, work.layer, work.latents)
        with torch.no_grad():
            unit = error(hidden[:size].to(device), wanted[:size].to(device)).clamp_min(_TINY)
        losses = optimize(
            lambda states, target: error(states, target) / unit,
            parameter_groups(list(layers.values()), config.tune_learning_rate),
            Material(hidden, wanted),
            steps=config.layer_steps,
            batch_size=size,
            seed=config.seed + work.index,
            description=f"training {work.name}",
            progress=False,
        )
    latents = {path: layer.position() for path, layer in layers.items() if layer.latent is not None}
    work.learn({path: layer.finish() for path, layer in layers.items()}, latents if config.tune_steps else {})
    return losses
