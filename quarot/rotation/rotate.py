"""``rotate_model``: turn a model's activations so that they have no outliers, without changing what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quarot.architectures import (
    Architecture,
    Geometry,
    architecture_of,
    decoder_layers,
    expert_intermediate,
    geometry,
)
from quarot.progress import progress_bar
from quarot.rotation.apply import Rotations, insert_online, rotate_ends, rotate_layer
from quarot.rotation.checks import check_device, check_structure, check_values
from quarot.rotation.fold import untie_head
from quarot.rotation.orthogonal import HadamardRotation, MatrixRotation, random_orthogonal, random_signs
from quarot.rotation.plan import RotationPlan
from quarot.rotation.planning import make_plan
from quarot.rotation.sites import check_sites


def rotate_model(
    model: nn.Module,
    *,
    seed: int = 0,
    r1: str | torch.Tensor | None = "hadamard",
    r2: bool = True,
    o_proj_online: str = "heads",
    r3: bool = True,
    r4: bool = True,
    down_proj_block: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    record: bool = True,
) -> RotationPlan:
    """Rotate a Hugging Face causal-LM model in place (paper, section 4); its logits stay the same.

    Norm gains are folded into the layers that follow (and set to 1), a tied head gets its own weight, and each rotation
    of :mod:`quarot.rotation.sites` is folded in float64 and cast back once. Every check is made before the first weight
    changes. Needs no more than the float64 copy of one weight beside the model (and the weight of an untied head).

    Args:
        model: a model of one of :data:`quarot.architectures.ARCHITECTURES`, in any floating dtype, on any device.
        seed: draws R1 and, where it has them, the signs of R2.
        r1: rotation of the residual stream: ``"hadamard"`` (randomised), ``"orthogonal"`` (uniformly random, the
            paper's ablation), an orthogonal matrix [hidden, hidden], or None.
        r2: rotate the values of each head by a Hadamard matrix, offline.
        o_proj_online: rotate the input of o_proj at run time: ``"heads"`` across heads (the paper; ``"full"`` where the
            number of heads has no Hadamard matrix), ``"full"`` over the whole width, or ``"none"``.
        r3: rotate queries and keys after RoPE at run time, so that keys can be cached in few bits.
        r4: rotate the input of down_proj at run time.
        down_proj_block: block-diagonal R4 of this block width (for layouts that other runtimes can execute).
        device: where to compute, e.g. ``"cuda"`` for a model that stays on the CPU; None is where each weight is.
        progress: show a progress bar.
        record: keep the plan in the model's config, so that it is saved. Only a model without online rotations may go
            without: it is then a plain model of its family.

    Returns:
        What was done; ``print(plan.describe())`` lists it with every fallback.

    Raises:
        NotImplementedError: a family that cannot be rotated, with the reason.
        ValueError: already rotated or quantised, NaN or infinite weights, weights not in memory, bad switches.
    """
    rotator = Rotator(
        model,
        seed=seed,
        r1=r1,
        r2=r2,
        o_proj_online=o_proj_online,
        r3=r3,
        r4=r4,
        down_proj_block=down_proj_block,
        device=device,
    )
    if rotator.plan.online and not record:
        raise ValueError("record=False would lose the online rotations; switch r3, r4 and o_proj_online off, or record")
    check_values(model)
    # First of all, so that an interrupted rotation is never taken for the original, nor for a finished one.
    model.quarot_rotation, model.quarot_unfinished = rotator.plan, True  # type: ignore[assignment]
    rotator.rotate_ends()
    for _, layer in progress_bar(list(decoder_layers(model)), "rotating", progress):
        rotator.rotate_layer(layer)
    _record(model, rotator.plan, record)
    del model.quarot_unfinished
    return rotator.plan


class Rotator:
    """Rotates a model piece by piece: its ends, and one decoder layer after the other, each once and in any order.

    Making one checks the model's structure and changes nothing, so weights may still be on the meta device; whoever
    hands over a piece has checked its values (:func:`quarot.rotation.checks.check_values`).

    Args:
        model: as for :func:`rotate_model`.
        device: where to compute; None is where each weight is.
        switches: those of :func:`rotate_model`.

    Attributes:
        plan: what is being done.

    Raises:
        As :func:`rotate_model`, but for values.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        r1: str | torch.Tensor | None = "hadamard",
        device: torch.device | str | None = None,
        **switches: Any,
    ) -> None:
        self.model, self.device = model, device
        self.architecture, self.sizes = architecture_of(model), geometry(model)
        matrix = r1 if isinstance(r1, torch.Tensor) else None
        self.plan = make_plan(
            self.architecture,
            self.sizes,
            r1="given" if isinstance(r1, torch.Tensor) else r1,
            expert_intermediate=expert_intermediate(model),
            **switches,
        )
        check_sites()
        check_device(device)
        check_structure(model, self.architecture, self.sizes)
        self._rotations = _rotations(self.plan, self.sizes, matrix)

    def rotate_ends(self) -> None:
        """The embedding, the final norm, and the head, which gets a weight of its own where it was tied."""
        _untie(self.model, self.architecture)
        rotate_ends(self.model, self.architecture, self._rotations, self.device)

    def rotate_layer(self, layer: nn.Module) -> None:
        """One decoder layer, online parts included."""
        rotate_layer(layer, self.architecture, self.sizes, self._rotations, self.device)
        insert_online(layer, self.architecture, self.plan)


def _rotations(plan: RotationPlan, sizes: Geometry, given: torch.Tensor | None) -> Rotations:
    """The maps of a plan; those switched off are left out."""
    rotations: Rotations = {}
    if plan.r1_hadamard is not None:
        rotations["r1"] = HadamardRotation(plan.r1_hadamard, before=random_signs(sizes.hidden, plan.seed))
    elif plan.r1 == "given":
        rotations["r1"] = MatrixRotation(_checked(given, sizes.hidden))
    elif plan.r1 == "orthogonal":
        rotations["r1"] = MatrixRotation(random_orthogonal(sizes.hidden, plan.seed))
    if plan.r2 is not None:
        # The signs are on the side of the online transform: H S H does not collapse as H H would.
        signs = random_signs(sizes.head_dim, plan.seed + 1) if plan.r2_signs else None
        rotations["r2"] = HadamardRotation(plan.r2, after=signs)
    if plan.attn_out_input is not None:
        rotations["head"] = HadamardRotation(plan.attn_out_input)
    if plan.mlp_out_input is not None:
        rotations["r4"] = HadamardRotation(plan.mlp_out_input)
    if plan.expert_out_input is not None:
        rotations["r4_expert"] = HadamardRotation(plan.expert_out_input)
    return rotations


def _checked(matrix: torch.Tensor | None, size: int) -> torch.Tensor:
    if matrix is None or matrix.shape != (size, size):
        raise ValueError(f"r1 must be [{size}, {size}], got {None if matrix is None else tuple(matrix.shape)}")
    wide = matrix.detach().to(torch.float64)
    error = (wide @ wide.T - torch.eye(size, dtype=wide.dtype, device=wide.device)).abs().max().item()
    if not error < 1e-6:
        raise ValueError(f"r1 is not orthogonal: R R^T differs from the identity by {error:.1e}; orthonormalise it")
    return wide


def _untie(model: Any, record: Architecture) -> None:
    untie_head(model.get_submodule(record.embed), model.get_submodule(record.lm_head))
    model.config.tie_word_embeddings = False
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied:
        tied.pop(f"{record.lm_head}.weight", None)


def _record(model: Any, plan: RotationPlan, record: bool) -> None:
    from quarot.config import QuarotConfig
    from quarot.integrations.transformers import attach

    attach(model, QuarotConfig(w_bits=16, a_bits=16, k_bits=16, v_bits=16, rotation=plan.to_dict()), record=record)
