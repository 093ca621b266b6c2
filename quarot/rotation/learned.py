"""Learned rotations: turn a rotated model's basis until four-bit activations, keys and values hurt least.

A random Hadamard rotation spreads outliers whatever they are; among the rotations that cost nothing at run time, some
leave quantisers less to lose. SpinQuant (Liu et al., 2024) showed that training R1 and R2 on a little text finds them.
Same aim here, by these means: the divergence of next-token distributions as the loss (no labels), orthogonality by the
exponential of a skew matrix, Adam, and more maps that are free at run time: scales of the intermediate channels in
front of the online transform of down_proj, scales of the values, rotations and scales of the channel pairs that RoPE
turns. Weights stay unquantised meanwhile: GPTQ, or tuning, deals with them afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quarot.architectures import Geometry, Projection, architecture_of, decoder, decoder_layers, geometry
from quarot.config import QuarotConfig
from quarot.current_device import current
from quarot.nn.quant_linear import linear_weight
from quarot.rotation.fold import fold_weight
from quarot.rotation.orthogonal import MatrixRotation
from quarot.rotation.plan import RotationPlan
from quarot.rotation.refinement import SLOTS, LayerMaps, Refinement, refine, rope_pairs
from quarot.tuning.attention import quantized_attention
from quarot.tuning.distillation import divergence_of
from quarot.tuning.material import Material
from quarot.tuning.optimize import frozen, optimize
from quarot.tuning.shared_input import SharedInput
from quarot.tuning.transform import transform, undo_transform

_RATES = {"residual": 1e-3, "values": 3e-3, "value_scales": 1e-2, "keys": 1e-2, "up": 1e-2, "clips": 2e-3}
"""Peak learning rates of the generators and of the logarithmic scales, for ``learning_rate=1``."""


class RefinedLinear(nn.Module):
    """A linear layer of a rotated model in the basis of a :class:`Refinement` that is being learned.

    Attributes:
        source: the layer that was replaced.
        base: fp32 [N, K], its weight without the online transform.
        shared: quantises the input.
        maps, clip: of its layer; set before every forward pass.
    """

    maps: LayerMaps
    clip: Tensor

    def __init__(
        self, source: nn.Module, slot: str, projection: Projection, sizes: Geometry, shared: SharedInput
    ) -> None:
        super().__init__()
        self.source, self.slot, self.projection, self.sizes, self.shared = source, slot, projection, sizes, shared
        weight = linear_weight(source).detach()
        self.register_buffer("base", undo_transform(weight.double(), shared.rotation).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        bias = None if self.source.bias is None else self.source.bias.float()
        with torch.autocast(x.device.type, enabled=False):  # weights are turned in fp32
            weight, bias = refine(self.slot, self.projection, self.sizes, self.base, bias, self.maps)  # type: ignore[arg-type]
            weight = transform(weight, self.shared.rotation)
        return F.linear(self.shared(x, self.clip), weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def learn_refinement(
    model: Any,
    config: QuarotConfig,
    material: Material,
    *,
    steps: int = 200,
    learning_rate: float = 1.0,
    batch_size: int = 8,
    progress: bool = True,
    seconds: float | None = None,
) -> tuple[Refinement, list[float]]:
    """Learn how to turn the basis of a rotated model; the model itself stays as it is.

    Args:
        model: after :func:`quarot.rotate_model`, not quantised, all on one device.
        config: bits and clip ratios of activations, keys and values at run time, and the seed.
        material: calibration tokens and the outputs of the model's final norm for them.
        steps, learning_rate, batch_size: of the training; windows a step.
        progress: show a progress bar.
        seconds: fewer steps where this time does not suffice for them.

    Returns:
        The refinement, for :func:`apply_refinement`, and the loss of every step.

    Memory: three fp32 copies of the decoder's weights, and the activations of ``batch_size`` windows.

    Raises:
        NotImplementedError: experts.
        ValueError: not rotated.
        FloatingPointError: the loss or its gradient is not finite.
    """
    record, sizes = architecture_of(model), geometry(model)
    if record.experts is not None:
        raise NotImplementedError(f"{record.family}: rotations of experts cannot be learned yet")
    config = config.replace(rotation=_plan(model).to_dict())
    embedding, body, divergence = model.get_submodule(record.embed), decoder(model), divergence_of(model)
    device = embedding.weight.device
    refinement = Refinement(sizes, config.a_clip, device, rope_pairs(model))
    learned = ((name, p) for name, p in refinement.named_parameters() if p.numel())
    groups = [{"params": [p], "base": _RATES[name] * learning_rate} for name, p in learned]

    def loss_of(ids: Tensor, wanted: Tensor) -> Tensor:
        maps = refinement.maps()
        for index, module in modules:
            module.maps, module.clip = maps[index], refinement.clips[index, SLOTS.index(module.slot)]
        residual = maps[0].residual
        with _turned(embedding, residual), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = body(input_ids=ids, use_cache=False).last_hidden_state
        return divergence(states.float() @ residual.T, wanted)

    with current(device), frozen(model), _refined(model, config) as modules, quantized_attention(model, config):
        losses = optimize(
            loss_of,
            groups,
            material,
            steps=steps,
            batch_size=batch_size,
            seed=config.seed,
            description="learning rotations",
            progress=progress,
            seconds=seconds,
        )
    return refinement, losses


@torch.no_grad()
def apply_refinement(model: Any, refinement: Refinement) -> Tensor:
    """Fold a refinement into a rotated model, in float64, and say so in its plan; logits stay the same.

    Returns:
        R, float64 [hidden, hidden]: what was a row x of the residual stream (or of the final norm's output) is ``x R``.
    """
    record, sizes, plan = architecture_of(model), geometry(model), _plan(model)
    maps = refinement.exact_maps()
    for index, (_, layer) in enumerate(decoder_layers(model)):
        for slot, projections in record.slots.items():
            for projection in projections:
                _fold(layer.get_submodule(projection.path), slot, projection, sizes, maps[index])
    residual = maps[0].residual
    undo = MatrixRotation(residual.T)  # takes rows x to x M^T
    for path in (record.embed, record.lm_head):
        fold_weight(model.get_submodule(path).weight, inputs=[undo])
    note = "R1, R2, the basis of keys and the scales in front of R4 were refined by training"
    model.quarot_rotation = dataclasses.replace(plan, notes=(*plan.notes, note))
    from quarot.integrations.transformers import attach

    attach(model, model.config.quantization_config.replace(rotation=model.quarot_rotation.to_dict()))
    return residual


def _plan(model: Any) -> RotationPlan:
    plan = getattr(model, "quarot_rotation", None)
    if plan is None or plan.r1 is None:
        raise ValueError("learning refines a rotation of the residual stream: call quarot.rotate_model first")
    return plan  # type: ignore[no-any-return]


def _fold(linear: nn.Module, slot: str, projection: Projection, sizes: Geometry, maps: LayerMaps) -> None:
    weight, bias, spec = linear_weight(linear), linear.bias, getattr(linear, "input_rotation", None)
    wide = undo_transform(weight.double(), spec)
    wide, wide_bias = refine(slot, projection, sizes, wide, None if bias is None else bias.double(), maps)  # type: ignore[operator]
    weight.copy_(transform(wide, spec))
    if wide_bias is not None:
        bias.copy_(wide_bias)  # type: ignore[operator,union-attr]


@contextmanager
def _refined(model: nn.Module, config: QuarotConfig) -> Iterator[list[tuple[int, RefinedLinear]]]:
    """Refined layers in place of those of the model, with the index of their decoder layer, inside the block."""
    record, sizes = architecture_of(model), geometry(model)
    places = []
    for index, (name, layer) in enumerate(decoder_layers(model)):
        for slot, projections in record.slots.items():
            # Layers of one slot read one input; the settings of the first count.
            first = config.for_module(f"{name}.{projections[0].path}")
            spec = getattr(layer.get_submodule(projections[0].path), "input_rotation", None)
            shared = SharedInput(spec, first.a_bits, first.a_group_size, len(projections))
            for projection in projections:
                source = layer.get_submodule(projection.path)
                module = RefinedLinear(source, slot, projection, sizes, shared)
                places.append((f"{name}.{projection.path}", index, module))
    for full, _, module in places:
        model.set_submodule(full, module)
    try:
        yield [(index, module) for _, index, module in places]
    finally:
        for full, _, module in places:
            model.set_submodule(full, module.source)


@contextmanager
def _turned(embedding: nn.Module, residual: Tensor) -> Iterator[None]:
    """Let the embedding write into the refined residual basis."""
    handle = embedding.register_forward_hook(lambda _, __, out: out @ residual.to(out.dtype))
    try:
        yield
    finally:
        handle.remove()
