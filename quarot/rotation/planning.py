"""From a model's sizes and the switches to a :class:`RotationPlan`, with every fallback in words."""

from __future__ import annotations

from typing import Any

from quarot.architectures import Architecture, Geometry
from quarot.rotation.hadamard import block_hadamard_spec, hadamard_spec
from quarot.rotation.plan import R1_KINDS, RotationPlan
from quarot.rotation.spec import HadamardSpec

O_PROJ_MODES = ("heads", "full", "none")
SWITCHES = ("seed", "r1", "r2", "o_proj_online", "r3", "r4", "down_proj_block")
"""Arguments of :func:`quarot.rotate_model` that say how to rotate."""


def make_plan(
    record: Architecture,
    sizes: Geometry,
    *,
    seed: int = 0,
    r1: str | None = "hadamard",
    r2: bool = True,
    o_proj_online: str = "heads",
    r3: bool = True,
    r4: bool = True,
    down_proj_block: int | None = None,
    expert_intermediate: int | None = None,
) -> RotationPlan:
    """The rotations of a model of these sizes; arguments as in :func:`quarot.rotate_model`.

    Raises:
        ValueError: an unknown switch, or a block that does not fit.
    """
    if r1 not in R1_KINDS:
        raise ValueError(f"r1={r1!r} is not one of {R1_KINDS}")
    for name, value in (("r2", r2), ("r3", r3), ("r4", r4)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")
    if o_proj_online not in O_PROJ_MODES:
        raise ValueError(f"o_proj_online={o_proj_online!r} is not one of {O_PROJ_MODES}")
    if down_proj_block is not None and type(down_proj_block) is not int:
        raise ValueError(f"down_proj_block={down_proj_block!r} must be an int, or None for the full width")
    if down_proj_block is not None and not r4:
        raise ValueError(f"down_proj_block={down_proj_block} is the block of R4, which r4=False switches off")
    notes: list[str] = []
    fields: dict[str, Any] = {}
    fields["r1"], fields["r1_hadamard"] = _residual(r1, sizes.hidden, notes)
    fields["r2"] = _full_or_blocks("R2", "head_dim", sizes.head_dim, notes) if r2 else None
    fields["attn_out_input"] = _attn_out(o_proj_online, sizes, notes)
    fields["r2_signs"] = bool(fields["r2"] and fields["attn_out_input"] and fields["attn_out_input"].inner == 1)
    fields["r3"] = _per_head(sizes.head_dim, notes) if r3 else None
    if r4:
        fields["mlp_out_input"] = _down("R4", sizes.intermediate, down_proj_block, notes)
        if expert_intermediate is not None:
            fields["expert_out_input"] = _down("R4 of experts", expert_intermediate, down_proj_block, notes)
    return RotationPlan(family=record.family, seed=seed, notes=tuple(notes), **fields)


def _residual(kind: str | None, hidden: int, notes: list[str]) -> tuple[str | None, HadamardSpec | None]:
    """R1 costs nothing at run time, so where there is no Hadamard matrix a dense random rotation is as good."""
    if kind != "hadamard":
        return kind, None
    spec = hadamard_spec(hidden)
    if spec is None:
        notes.append(f"R1: no Hadamard matrix of width {hidden} is known; a random orthogonal matrix is used")
        return "orthogonal", None
    return kind, spec


def _full_or_blocks(name: str, what: str, width: int, notes: list[str]) -> HadamardSpec | None:
    """The full-width transform; else, with a note, a block-diagonal one; None where its blocks would be of width 1."""
    spec = hadamard_spec(width) or block_hadamard_spec(width)
    if spec.blocks > 1:
        notes.append(
            f"{name}: no Hadamard matrix of width {width} ({what}) is known; "
            + (f"{spec} are used" if spec.order * spec.pow2 > 1 else "none is used")
        )
    return _unless_trivial(spec)


def _unless_trivial(spec: HadamardSpec) -> HadamardSpec | None:
    return spec if spec.order * spec.pow2 > 1 else None


def _attn_out(mode: str, sizes: Geometry, notes: list[str]) -> HadamardSpec | None:
    width = sizes.heads * sizes.head_dim
    if mode == "none":
        return None
    if mode == "heads":
        spec = hadamard_spec(width, inner=sizes.head_dim)
        if spec is not None:
            return _unless_trivial(spec)
        notes.append(f"o_proj: {sizes.heads} heads have no Hadamard matrix; the online transform is full width instead")
    return _full_or_blocks("o_proj", "its input", width, notes)


def _per_head(head_dim: int, notes: list[str]) -> HadamardSpec | None:
    spec = hadamard_spec(head_dim)
    if spec is None:
        notes.append(f"R3: no Hadamard matrix of width {head_dim} (head_dim) is known; queries and keys stay unrotated")
        return None
    return _unless_trivial(spec)


def _down(name: str, width: int, block: int | None, notes: list[str]) -> HadamardSpec | None:
    if block is None:
        return _full_or_blocks(name, "intermediate size", width, notes)
    spec = block_hadamard_spec(width, block)
    if spec.blocks > 1:
        notes.append(f"{name}: {spec}, as asked for by down_proj_block={block}")
    return _unless_trivial(spec)
