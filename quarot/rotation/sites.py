"""Where each rotation of the paper acts, as data, and the check that makes a rotated model compute the same function.

Notation (column vectors): a linear layer computes ``y = W x + b``. A rotation R (orthogonal, ``R^-1 = R^T``) sits

* on an ``output``:   ``W <- R W``, ``b <- R b``, so that the layer writes ``R y``;
* on an ``activation``: the input is rotated at run time, ``x <- R x``;
* on an ``input`` as its inverse: ``W <- W R^-1``, so that the layer undoes a rotation of what it reads.

Reading along a path, outputs and activations push rotations and inputs pop them; what is left must be the identity.

| rotation | size | paper (section 4) |
|---|---|---|
| ``r1`` | hidden | the residual stream, "weight modification" |
| ``r2`` | head_dim, each head | values, the offline half of "Hadamard heads" |
| ``head`` | heads (x) head_dim, or all of it | the online half of "Hadamard heads" |
| ``r3`` | head_dim, each head | queries and keys after RoPE; cancels in the scores, so it touches no weight |
| ``r4`` | intermediate | the input of the down projection |
| ``r4_expert`` | intermediate of an expert | the input of each expert's down projection |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Site:
    """One rotation in one place of one kind of layer.

    Attributes:
        rotation: ``r1``, ``r2``, ``head``, ``r4`` or ``r4_expert``.
        place: ``output``, ``activation`` or ``input`` (as its inverse).
        slot: ``embed``, ``attn_in``, ``v`` (the value rows of ``attn_in``), ``attn_out``, ``mlp_in``, ``mlp_out``,
            ``router``, ``expert_in``, ``expert_out`` or ``lm_head``.
    """

    rotation: str
    place: Literal["output", "activation", "input"]
    slot: str


SITES: tuple[Site, ...] = (
    Site("r1", "output", "embed"),
    Site("r1", "input", "attn_in"),
    Site("r2", "output", "v"),
    Site("head", "activation", "attn_out"),
    Site("r2", "input", "attn_out"),
    Site("head", "input", "attn_out"),
    Site("r1", "output", "attn_out"),
    Site("r1", "input", "mlp_in"),
    Site("r4", "activation", "mlp_out"),
    Site("r4", "input", "mlp_out"),
    Site("r1", "output", "mlp_out"),
    Site("r1", "input", "router"),
    Site("r1", "input", "expert_in"),
    Site("r4_expert", "activation", "expert_out"),
    Site("r4_expert", "input", "expert_out"),
    Site("r1", "output", "expert_out"),
    Site("r1", "input", "lm_head"),
)
"""In the order in which they are applied to a weight; a rotation that is switched off drops out of every site."""

_WRITERS = ("embed", "attn_out", "mlp_out", "expert_out")
_READERS = ("attn_in", "mlp_in", "router", "expert_in", "lm_head")
PATHS: tuple[tuple[str, str], ...] = (
    *((writer, reader) for writer in _WRITERS for reader in _READERS),
    ("v", "attn_out"),
    ("mlp_in", "mlp_out"),
    ("expert_in", "expert_out"),
)
"""Which slot reads what another has written, with no nonlinearity between that a rotation would not commute with."""


def rotations_at(place: str, slot: str, sites: tuple[Site, ...] = SITES) -> tuple[str, ...]:
    """Names of the rotations in one place of one slot, in the order in which they are applied."""
    return tuple(site.rotation for site in sites if (site.place, site.slot) == (place, slot))


def check_sites(sites: tuple[Site, ...] = SITES) -> None:
    """Check that every path multiplies to the identity.

    Raises:
        ValueError: naming the first path that does not, and what is left on it.
    """
    for writer, reader in PATHS:
        pushed = [*rotations_at("output", writer, sites), *rotations_at("activation", reader, sites)]
        popped = rotations_at("input", reader, sites)
        if list(popped) != pushed:
            raise ValueError(
                f"rotations do not cancel from {writer} to {reader}: carried {pushed}, undone {list(popped)}"
            )
