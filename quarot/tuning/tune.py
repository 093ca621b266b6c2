"""Learning the codes: the quantised model is distilled from its full-precision self on the calibration windows.

GPTQ minimises the error of one layer's output at a time. Here all layers move together, against what counts: the
divergence of the model's next-token distribution from that of the full-precision model, with every quantiser of the
run-time path in place (weights, activations, keys and values). What is learned is what is stored anyway (codes, scales,
one clip ratio per layer input), so nothing changes at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quarot.architectures import architecture_of, decoder, decoder_layers
from quarot.config import QuarotConfig
from quarot.current_device import current
from quarot.integrations.transformers.plain_attention import fused_float32_attention
from quarot.precision import tf32
from quarot.tuning.attention import quantized_attention
from quarot.tuning.distillation import divergence_of
from quarot.tuning.material import Material
from quarot.tuning.optimize import frozen, optimize
from quarot.tuning.trainable_linear import TrainableLinear, make_trainable


@torch.no_grad()
def final_states(model: Any, windows: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Outputs of the final norm for windows [W, T]: [W, T, hidden]; on a GPU bfloat16, of TF32 products."""
    device = model.get_input_embeddings().weight.device
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tf32(True), fused_float32_attention(model):
        return torch.cat([_states(model, ids.to(device)).to(kind) for ids in windows.split(batch_size)])


def tune(
    model: Any,
    config: QuarotConfig,
    material: Material,
    latents: dict[str, torch.Tensor] | None = None,
    progress: bool = True,
) -> dict[str, float]:
    """Train a quantised model towards what the full-precision one said, in place.

    Args:
        model: with ``QuantLinear`` modules, all on one device.
        config: bits of the cache, and the ``tune_*`` fields.
        material: windows and :func:`final_states` of the full-precision model for them.
        latents: by module name, weights in units of their scale before they were rounded; codes where absent.
        progress: show a progress bar.

    Returns:
        The activation clip ratio of every tuned module, by name.

    Memory: 16 bytes a weight (latent, gradient, Adam's moments) beyond the model, and the activations of
    ``tune_batch_size`` windows through all layers. On a GPU matmuls run in bfloat16; quantisers always in float32.

    Raises:
        FloatingPointError: the loss or its gradient is not finite; the model is worthless then.
    """
    device = model.get_input_embeddings().weight.device
    divergence = divergence_of(model)

    def loss_of(ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = _states(model, ids)
        return divergence(states, wanted)

    with current(device), frozen(model), _trainable(model, latents or {}) as layers, quantized_attention(model, config):
        optimize(
            loss_of,
            parameter_groups(list(layers.values()), config.tune_learning_rate),
            material,
            steps=config.tune_steps,
            batch_size=config.tune_batch_size,
            seed=config.seed,
            description="tuning",
            progress=progress,
            seconds=config.tune_seconds,
        )
    return {name: layer.source.a_clip for name, layer in layers.items() if layer.source.a_bits < 16}


def _states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return decoder(model)(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


@contextmanager
def _trainable(model: nn.Module, latents: dict[str, torch.Tensor]) -> Iterator[dict[str, TrainableLinear]]:
    """Trainable layers in place of integer ones (:func:`make_trainable`), by their names in the model.

    Behind the block the integer layers are back, with what was learned.
    """
    record = architecture_of(model)
    layers: dict[str, TrainableLinear] = {}
    for name, layer in decoder_layers(model):
        prefix = name + "."
        own = {full[len(prefix) :]: latent for full, latent in latents.items() if full.startswith(prefix)}
        layers |= {prefix + path: trained for path, trained in make_trainable(record, layer, own).items()}
    try:
        yield layers
    finally:
        for name, trained in layers.items():
            model.set_submodule(name, trained.finish())


def parameter_groups(layers: list[TrainableLinear], rate: float) -> list[dict[str, Any]]:
    """Peak learning rates: latents in steps of their grid, scales relative, clip ratios absolute."""
    latents = [layer.latent for layer in layers if layer.latent is not None]
    scales = [layer.log_step for layer in layers if layer.latent is not None]
    clips = list({id(p): p for p in (layer.clip for layer in layers if layer.source.a_bits < 16)}.values())
    rates = ((latents, rate), (scales, rate / 2), (clips, rate / 2))
    return [{"params": parameters, "base": base} for parameters, base in rates if parameters]
