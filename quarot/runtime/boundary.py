"""What lies before the first decoder layer and behind the last: embedding, slots, rotary tables and final norm.

Each is one kernel where the model's module is plain, and the module itself where it is not: hooked, or a RoPE whose
frequencies depend on the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quarot.nn.hooks import HookWatch
from quarot.nn.page_table import slots_of
from quarot.ops.add_rms_norm import add_rms_norm
from quarot.ops.begin_step import begin_step
from quarot.runtime.gains import Gains


class Boundary:
    """Modules of one model.

    Args:
        embed: token embedding.
        rotary: gives cos and sin [B, T, R] for ``(hidden, position_ids=..)``.
        final_norm: of the last layer's output.
        eps: of the final norm.

    Attributes:
        gain: says whether the final norm's is 1.
        watch: says whether one of them has a hook, which a recorded step would not call.
    """

    def __init__(self, embed: nn.Module, rotary: Any, final_norm: nn.Module, eps: float) -> None:
        self.embed, self.rotary, self.final_norm, self.eps = embed, rotary, final_norm, eps
        self.watch = HookWatch([embed, rotary, final_norm])
        self.gain = Gains([final_norm])

    def begin(
        self, ids: Tensor, before: Tensor, positions: Tensor, table: Tensor, page_size: int, advance: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """hidden [B, H], lengths, slots, cos and sin [B, R] of one new token a row (:mod:`quarot.ops.begin_step`)."""
        if type(self.embed) is nn.Embedding and self._fixed_frequencies() and self.watch.find() is None:
            frequency, scaling = self.rotary.inv_freq.float(), float(self.rotary.attention_scaling)
            weight = self.embed.weight.data
            return begin_step(ids, weight, before, positions, table, frequency, scaling, page_size, advance)
        hidden = self.embed(ids)
        cos, sin = (t.flatten(0, 1) for t in self.rotary(hidden, position_ids=positions))
        lengths = before + 1
        slots = slots_of(table, before[:, None].to(torch.int64), page_size).view(-1)
        if advance:
            before.add_(1)
            positions.add_(1)
        return hidden.flatten(0, 1), lengths, slots, cos, sin

    def finish(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """The final norm of ``residual + delta`` [M, hidden]."""
        if self.gain.are_ones() and self.watch.find() is None:
            return add_rms_norm(residual, None, self.eps) if delta is None else add_rms_norm(delta, residual, self.eps)
        return self.final_norm(residual if delta is None else residual + delta)

    def _fixed_frequencies(self) -> bool:
        kind = getattr(self.rotary, "rope_type", None)
        known = isinstance(kind, str) and "dynamic" not in kind and kind != "longrope"
        return known and isinstance(getattr(self.rotary, "inv_freq", None), Tensor)
