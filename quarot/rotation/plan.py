"""``RotationPlan``: which rotations a model has, as data; saved in ``config.json`` and replayed when it is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quarot.field_types import check_seed, check_types
from quarot.rotation.spec import HadamardSpec

R1_KINDS = ("hadamard", "orthogonal", "given", None)
"""What R1 can be; see :class:`RotationPlan`."""


@dataclass(frozen=True)
class RotationPlan:
    """What :func:`quarot.rotate_model` did. A rotation that was switched off, or does not exist, is None.

    Attributes:
        family: name of the architecture record.
        seed: draws the random signs of R1 and R2, or the random orthogonal R1.
        r1: residual stream, offline: ``"hadamard"``, ``"orthogonal"`` or ``"given"`` (a matrix from the caller).
        r1_hadamard: the Hadamard transform of R1, where it is one.
        r2: values, per head, offline; size head_dim.
        r2_signs: whether the output of R2 has random signs (so that it does not cancel against a full-width
            ``attn_out_input``, which ends in the same Hadamard matrix).
        attn_out_input: online transform in front of o_proj; across heads (``inner`` = head_dim) or full width.
        r3: online transform of each query and key head after RoPE; size head_dim.
        mlp_out_input: online transform in front of down_proj (R4).
        expert_out_input: the same for each expert of a mixture of experts.
        notes: every fallback and every rotation that does not exist for this model, in words.
    """

    family: str
    seed: int = 0
    r1: str | None = None
    r1_hadamard: HadamardSpec | None = None
    r2: HadamardSpec | None = None
    r2_signs: bool = False
    attn_out_input: HadamardSpec | None = None
    r3: HadamardSpec | None = None
    mlp_out_input: HadamardSpec | None = None
    expert_out_input: HadamardSpec | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        check_seed("seed", self.seed)
        if self.r1 not in R1_KINDS:
            raise ValueError(f"r1={self.r1!r} is not one of {R1_KINDS}")

    @property
    def online(self) -> bool:
        """Whether anything happens at run time; if not, the rotated model is a plain model of its family."""
        return any((self.attn_out_input, self.r3, self.mlp_out_input, self.expert_out_input))

    def describe(self) -> str:
        """One line a rotation, then one line for every fallback."""
        r1 = {
            None: "none",
            "hadamard": f"random {self.r1_hadamard}, seed {self.seed}",
            "orthogonal": f"random orthogonal matrix, seed {self.seed}",
            "given": "matrix given by the caller",
        }[self.r1]
        lines = [
            f"rotation of a {self.family} model",
            f"  R1    residual stream     offline  {r1}",
            f"  R2    values, per head    offline  {_text(self.r2)}{', random signs' if self.r2_signs else ''}",
            f"  heads input of o_proj     online   {_text(self.attn_out_input)}",
            f"  R3    queries and keys    online   {_text(self.r3)}",
            f"  R4    input of down_proj  online   {_text(self.mlp_out_input)}",
        ]
        if self.expert_out_input is not None:
            lines.append(f"  R4    input of experts' down projections  online  {_text(self.expert_out_input)}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """JSON form; the ``rotation`` field of :class:`~quarot.config.QuarotConfig`."""
        data = dataclasses.asdict(self)
        data["notes"] = list(self.notes)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RotationPlan:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: an unknown field (written by a newer quarot), one that is missing or of a wrong type, or a spec
                that does not hold together.
        """
        if not isinstance(data, dict) or "family" not in data:
            raise ValueError(f"RotationPlan: {data!r} is not a rotation plan, which names its family")
        unknown = sorted(set(data) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"RotationPlan: unknown fields {unknown}; this checkpoint needs a newer quarot")
        values = dict(data)
        for name in ("r1_hadamard", "r2", "attn_out_input", "r3", "mlp_out_input", "expert_out_input"):
            if values.get(name) is not None:
                values[name] = HadamardSpec.from_dict(values[name])
        if isinstance(values.get("notes"), list):
            values["notes"] = tuple(values["notes"])
        return cls(**values)


def _text(spec: HadamardSpec | None) -> str:
    return "none" if spec is None else str(spec)
