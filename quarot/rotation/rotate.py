"""``rotate_model``: turn a model's activations so that they have no outliers, without changing what it computes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from quarot.architectures import Architecture, Geometry, architecture_of, decoder_layers, geometry, has_submodule
from quarot.nn.rotated_linear import RotatedLinear
from quarot.progress import progress_bar
from quarot.rotation.checks import check_model, slots
from quarot.rotation.fold import fold_weight, neutralize_norm, norm_gain, untie_head
from quarot.rotation.orthogonal import HadamardRotation, MatrixRotation, Rotation, random_orthogonal, random_signs
from quarot.rotation.plan import RotationPlan
from quarot.rotation.planning import make_plan
from quarot.rotation.sites import check_sites, rotations_at


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
    architecture, sizes = architecture_of(model), geometry(model)
    plan = make_plan(
        architecture,
        sizes,
        seed=seed,
        r1="given" if isinstance(r1, torch.Tensor) else r1,
        r2=r2,
        o_proj_online=o_proj_online,
        r3=r3,
        r4=r4,
        down_proj_block=down_proj_block,
    )
    if plan.online and not record:
        raise ValueError("record=False would lose the online rotations; switch r3, r4 and o_proj_online off, or record")
    check_sites()
    check_model(model, architecture, sizes)
    rotations = _rotations(plan, sizes, r1 if isinstance(r1, torch.Tensor) else None)

    _untie(model, architecture)
    _rotate_ends(model, architecture, rotations, device)
    layers = list(decoder_layers(model))
    for _, layer in progress_bar(layers, "rotating", progress):
        _rotate_layer(layer, architecture, sizes, rotations, device)
        _insert_online(layer, architecture, plan)
    _record(model, plan, record)
    return plan


def _rotations(plan: RotationPlan, sizes: Geometry, given: torch.Tensor | None) -> dict[str, Rotation]:
    """The maps of a plan by their names in :mod:`quarot.rotation.sites`; those switched off are left out."""
    rotations: dict[str, Rotation] = {}
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


def _named(rotations: dict[str, Rotation], place: str, slot: str) -> list[Rotation]:
    return [rotations[name] for name in rotations_at(place, slot) if name in rotations]


def _rotate_ends(
    model: nn.Module, record: Architecture, rotations: dict[str, Rotation], device: torch.device | str | None
) -> None:
    """The embedding, whose rows are outputs, and the head with the final norm in front of it."""
    embed, head, norm = (model.get_submodule(path) for path in (record.embed, record.lm_head, record.final_norm))
    fold_weight(embed.weight, inputs=_named(rotations, "output", "embed"), device=device)
    gain = norm_gain(norm, record.norm_gain_offset)
    fold_weight(head.weight, gain=gain, inputs=_named(rotations, "input", "lm_head"), device=device)
    neutralize_norm(norm, record.norm_gain_offset)


def _rotate_layer(
    layer: nn.Module,
    record: Architecture,
    sizes: Geometry,
    rotations: dict[str, Rotation],
    device: torch.device | str | None,
) -> None:
    norms = {"attn_in": layer.get_submodule(record.attn_norm), "mlp_in": layer.get_submodule(record.mlp_norm)}
    for slot, projections in slots(record).items():
        gain = norm_gain(norms[slot], record.norm_gain_offset) if slot in norms else None
        for projection in projections:
            if not has_submodule(layer, projection.path):
                continue
            linear = layer.get_submodule(projection.path)
            outputs = [(rotation, slice(None)) for rotation in _named(rotations, "output", slot)]
            if "v" in projection.parts:
                rows = sizes.row_slice(projection, "v")
                outputs += [(rotation, rows) for rotation in _named(rotations, "output", "v")]
            inputs = _named(rotations, "input", slot)
            fold_weight(linear.weight, linear.bias, gain=gain, inputs=inputs, outputs=outputs, device=device)
    for norm in norms.values():
        neutralize_norm(norm, record.norm_gain_offset)


def _insert_online(layer: nn.Module, record: Architecture, plan: RotationPlan) -> None:
    """Replace the layers whose input is rotated at run time."""
    for path, spec in ((record.attn_out.path, plan.attn_out_input), (record.mlp_out.path, plan.mlp_out_input)):
        if spec is not None and has_submodule(layer, path):
            linear = cast(nn.Linear, layer.get_submodule(path))
            layer.set_submodule(path, RotatedLinear.from_linear(linear, spec))


def _record(model: Any, plan: RotationPlan, record: bool) -> None:
    from quarot.config import QuarotConfig
    from quarot.integrations.transformers import attach

    model.quarot_rotation = plan
    attach(model, QuarotConfig(w_bits=16, a_bits=16, k_bits=16, v_bits=16, rotation=plan.to_dict()), record=record)
