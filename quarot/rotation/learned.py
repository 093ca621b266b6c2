"""Learned rotations: turn a rotated model's basis until four-bit activations, keys and values hurt least.

A random Hadamard rotation spreads outliers whatever they are; among the rotations that cost nothing at run time, some
leave quantisers less to lose. SpinQuant (Liu et al., 2024) showed that training R1 and R2 on a little text finds them.
Same aim here, by these means: the divergence of next-token distributions as the loss (no labels), orthogonality by the
exponential of a skew matrix, Adam, and one more free map, a scale per intermediate channel in front of the online
transform of down_proj. Weights stay unquantised meanwhile: GPTQ, or tuning, deals with them afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quarot.architectures import Geometry, Projection, architecture_of, decoder_layers, geometry
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import linear_weight
from quarot.rotation.fold import fold_weight
from quarot.rotation.orthogonal import MatrixRotation
from quarot.rotation.plan import RotationPlan
from quarot.rotation.refinement import LayerMaps, Refinement, refine
from quarot.tuning.attention import quantized_attention
from quarot.tuning.distillation import head_divergence
from quarot.tuning.optimize import optimize
from quarot.tuning.straight_through import quantize_activations
from quarot.tuning.transform import transform, undo_transform

_RATES = {"residual": 1e-3, "values": 3e-3, "up": 1e-2}
"""Peak learning rates of the generators and of the logarithmic scales, for ``learning_rate=1``."""


class RefinedLinear(nn.Module):
    """A linear layer of a rotated model in the basis of a :class:`Refinement` that is being learned.

    Attributes:
        source: the layer that was replaced.
        base: fp32 [N, K], its weight without the online transform.
        maps: of its layer; set before every forward pass.
    """

    maps: LayerMaps

    def __init__(
        self, source: nn.Module, slot: str, projection: Projection, sizes: Geometry, config: QuarotConfig
    ) -> None:
        super().__init__()
        self.source, self.slot, self.projection, self.sizes = source, slot, projection, sizes
        self.bits, self.group = config.a_bits, config.a_group_size
        self.spec = getattr(source, "input_rotation", None)
        weight = linear_weight(source).detach()
        self.register_buffer("base", undo_transform(weight.double(), self.spec).float(), persistent=False)
        self.register_buffer("clip", torch.tensor(config.a_clip, device=weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        bias = None if self.source.bias is None else self.source.bias.float()
        weight, bias = refine(self.slot, self.projection, self.sizes, self.base, bias, self.maps)
        x = quantize_activations(transform(x, self.spec), self.bits, self.clip, self.group)
        return F.linear(x, transform(weight, self.spec).to(x.dtype), None if bias is None else bias.to(x.dtype))

    @torch.no_grad()
    def finish(self, maps: LayerMaps) -> nn.Module:
        """Fold float64 maps into the source, and return it."""
        weight, bias = linear_weight(self.source), self.source.bias
        wide = undo_transform(weight.double(), self.spec)
        wide, wide_bias = refine(
            self.slot, self.projection, self.sizes, wide, None if bias is None else bias.double(), maps
        )
        weight.copy_(transform(wide, self.spec))
        if bias is not None:
            bias.copy_(wide_bias)
        return self.source


def learn_rotation(
    model: Any,
    config: QuarotConfig,
    windows: Tensor,
    targets: Tensor,
    *,
    steps: int = 200,
    learning_rate: float = 1.0,
    batch_size: int = 8,
    progress: bool = True,
) -> list[float]:
    """Refine the rotation of a rotated model in place; it computes the same function as before.

    Args:
        model: after :func:`quarot.rotate_model`, not quantised, all on one device.
        config: bits and clip ratios of activations, keys and values at run time, and the seed.
        windows: int64 [W, T] calibration tokens.
        targets: [W, T, hidden], outputs of the model's final norm for them (:func:`quarot.tuning.tune.final_states`).
        steps, learning_rate, batch_size: of the training; windows a step.
        progress: show a progress bar.

    Returns:
        The loss of every step. With ``steps=0`` the model stays as it is.

    Memory: three fp32 copies of the decoder's weights, and the activations of ``batch_size`` windows.

    Raises:
        NotImplementedError: experts.
        ValueError: not rotated.
    """
    record, sizes = architecture_of(model), geometry(model)
    if record.experts is not None:
        raise NotImplementedError(f"{record.family}: rotations of experts cannot be learned yet")
    plan = getattr(model, "quarot_rotation", None)
    if plan is None or plan.r1 is None:
        raise ValueError("learning refines a rotation of the residual stream: call quarot.rotate_model first")
    config = config.replace(rotation=plan.to_dict())
    embedding, head = model.get_submodule(record.embed), linear_weight(model.get_submodule(record.lm_head)).detach()
    body = model.get_submodule(record.layers.rpartition(".")[0])
    device = embedding.weight.device
    refinement = Refinement(sizes, device)
    fast = torch.bfloat16 if device.type == "cuda" else head.dtype
    scaling = float(getattr(model.config, "logits_scaling", 1.0) or 1.0)
    groups = [{"params": [p], "base": _RATES[name] * learning_rate} for name, p in refinement.named_parameters()]
    modules = _replace(model, config)

    def loss_of(ids: Tensor, wanted: Tensor) -> Tensor:
        maps = refinement.maps()
        for _, index, module in modules:
            module.maps = maps[index]
        residual = maps[0].residual
        with _turned(embedding, residual), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = body(input_ids=ids, use_cache=False).last_hidden_state
        return head_divergence(states.float() @ residual.T, wanted, head.to(fast), scaling)

    frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with quantized_attention(model, config):
            losses = optimize(
                loss_of,
                groups,
                windows,
                targets,
                steps=steps,
                batch_size=batch_size,
                seed=config.seed,
                description="learning rotations",
                progress=progress,
            )
    except BaseException:
        _install(model, modules, None)
        raise
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    _install(model, modules, refinement if losses else None)
    _note(model, plan, len(losses))
    return losses


def _replace(model: nn.Module, config: QuarotConfig) -> list[tuple[str, int, RefinedLinear]]:
    """Put refined layers in place; returns them with their names and the indices of their decoder layers."""
    record, sizes = architecture_of(model), geometry(model)
    found = []
    for index, (name, layer) in enumerate(decoder_layers(model)):
        for slot, projections in record.slots.items():
            for projection in projections:
                full = f"{name}.{projection.path}"
                own = config.for_module(full)
                source = layer.get_submodule(projection.path)
                module = RefinedLinear(source, slot, projection, sizes, own)
                layer.set_submodule(projection.path, module)
                found.append((full, index, module))
    return found


@contextmanager
def _turned(embedding: nn.Module, residual: Tensor) -> Iterator[None]:
    """Let the embedding write into the refined residual basis."""
    handle = embedding.register_forward_hook(lambda _, __, out: out @ residual.to(out.dtype))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _install(model: nn.Module, modules: list[tuple[str, int, RefinedLinear]], refinement: Refinement | None) -> None:
    """Put the layers back, with the maps folded in (None: as they were)."""
    maps = None if refinement is None else refinement.exact_maps()
    for name, index, module in modules:
        model.set_submodule(name, module.source if maps is None else module.finish(maps[index]))
    if maps is None:
        return
    record = architecture_of(model)
    undo = MatrixRotation(maps[0].residual.T)  # a MatrixRotation maps rows x to x M^T
    for path in (record.embed, record.lm_head):
        fold_weight(model.get_submodule(path).weight, inputs=[undo])


def _note(model: Any, plan: RotationPlan, steps: int) -> None:
    """Say so in the plan, which is saved with the model."""
    if not steps:
        return
    from quarot.integrations.transformers import attach

    note = f"R1, R2 and the scales in front of R4 were refined by {steps} training steps"
    model.quarot_rotation = dataclasses.replace(plan, notes=(*plan.notes, note))
    recorded = model.config.quantization_config
    attach(model, recorded.replace(rotation=model.quarot_rotation.to_dict()))
