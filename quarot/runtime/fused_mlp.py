"""A gated MLP behind the norm of its layer: two integer GEMMs, each with its quantiser."""

from __future__ import annotations

from torch import Tensor

from quarot.runtime.linear_group import LinearGroup


class FusedMlp:
    """The MLP of a dense decoder layer."""

    def __init__(self, gate_up: LinearGroup, down: LinearGroup) -> None:
        self.gate_up, self.down = gate_up, down

    def groups(self) -> tuple[LinearGroup, ...]:
        """Its joined linear layers."""
        return self.gate_up, self.down

    def after_norm(self, x: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
        """``x + residual`` [M, hidden] and what becomes of its RMSNorm; the sum of both and None for a few rows."""
        gate_up, total = self.gate_up.after_norm(x, residual, eps)
        return self.down.after_gate(gate_up, total)
