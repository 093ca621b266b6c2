"""Hessians of the experts of one decoder layer, and what becomes of experts that calibration hardly reaches.

Each expert's projection sees the tokens that the router sends to it, so a Hessian of its own needs far more calibration
text than a dense layer's, and some experts may see no token at all. One pass over the windows collects the Hessians of
all experts of a kind at once. Then, for every projection of K inputs that was reached by fewer than
``gptq_expert_tokens * K`` tokens, other tokens of the layer, evenly spaced over the calibration text, are sent through
that very expert as if they had been routed to it, until there are as many. So the Hessian shrinks towards that of the
layer's whole input, in the expert's own basis, the more the fewer tokens the expert has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from quarot.calibration.moments import Moments
from quarot.calibration.observed_linear import ObservedLinear
from quarot.nn.expert_list import ExpertList

BYTES_AT_ONCE = 4 << 30
"""Hessians of experts collected in one pass; more experts take more passes."""

Pass = Callable[[], Iterator[None]]
"""Sends the calibration windows through the layer, one step an item."""


def chunks(layers: dict[str, ObservedLinear]) -> Iterator[dict[str, ObservedLinear]]:
    """Parts of ``layers`` whose Hessians fit ``BYTES_AT_ONCE`` (one layer at least)."""
    part: dict[str, ObservedLinear] = {}
    size = 0
    for path, layer in layers.items():
        more = 4 * layer.matrix.shape[1] ** 2
        if part and size + more > BYTES_AT_ONCE:
            yield part
            part, size = {}, 0
        part[path], size = layer, size + more
    if part:
        yield part


def routed_moments(layers: dict[str, ObservedLinear], windows: Pass) -> dict[str, Moments]:
    """Moments of each layer's own tokens, by path."""
    moments = {path: Moments() for path in layers}
    for path, layer in layers.items():
        layer.observer = moments[path].add
    try:
        for _ in windows():
            pass
    finally:
        for layer in layers.values():
            layer.observer = None
    return moments


def top_up(
    experts: ExpertList, layers: dict[str, ObservedLinear], moments: dict[str, Moments], factor: int, windows: Pass
) -> dict[str, int]:
    """Send borrowed tokens through the experts whose ``layers`` were reached by fewer than ``factor * K`` tokens.

    Args:
        experts: the layer's experts; ``layers`` are some of their projections, by path in the decoder layer.
        moments: of the layers' own tokens; borrowed ones are added.
        factor: ``gptq_expert_tokens``.
        windows: sends the calibration windows through the layer.

    Returns:
        How many tokens of their own these layers had, by path; empty when all had enough. With a factor of 0 nothing
        is borrowed, and only layers without any token count.
    """
    wanted = {path: factor * layer.matrix.shape[1] for path, layer in layers.items()}
    own = {path: moments[path].tokens for path in layers if moments[path].tokens < max(wanted[path], 1)}
    if not own or not factor:
        return own
    x = torch.cat(list(_inputs(experts, windows)))
    for path in own:
        missing = min(wanted[path] - own[path], len(x))
        evenly = torch.arange(missing, device=x.device) * len(x) // missing
        index = int(path.rpartition(".")[2])
        layers[path].observer = moments[path].add
        try:
            for rows in x[evenly].split(_ROWS):
                experts.expert(index, rows)
        finally:
            layers[path].observer = None
    return own


_ROWS = 16384


def _inputs(experts: ExpertList, windows: Pass) -> Iterator[torch.Tensor]:
    """What the experts of the layer are given, [tokens, hidden] a step."""
    seen: list[torch.Tensor] = []

    def see(_: Any, args: Sequence[Any]) -> None:
        seen.append(args[0])

    handle = experts.register_forward_pre_hook(see)
    try:
        for _ in windows():
            yield seen.pop()
    finally:
        handle.remove()
