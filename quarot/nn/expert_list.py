"""``ExpertList``: a mixture of experts as plain linear layers, one gate-up and one down projection for each expert.

transformers keeps expert weights in two 3-D parameters, which leaves no place for an online rotation, packed codes or
calibration hooks. Here each expert's projections are modules of their own, so that what is true of a linear layer of a
dense model (rotation, quantisation, saving) is true of an expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from quarot.nn.rotated_linear import RotatedLinear
from quarot.rotation.spec import HadamardSpec


class ExpertList(nn.Module):
    """Runs each token through its experts, one expert after the other (a loop, not a grouped kernel).

    Attributes:
        gate_up: for each expert, hidden -> 2 * intermediate, gate rows first.
        down: for each expert, intermediate -> hidden.
        act_fn: activation of the gate.
    """

    def __init__(self, gate_up: list[nn.Module], down: list[nn.Module], act_fn: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self.act_fn = act_fn

    @classmethod
    def from_parameters(
        cls,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        down_rotation: HadamardSpec | None = None,
    ) -> ExpertList:
        """Split 3-D expert parameters without copying them.

        Args:
            gate_up: [experts, 2 * intermediate, hidden].
            down: [experts, hidden, intermediate]; already holds the inverse of ``down_rotation``.
            act_fn: activation of the gate.
            down_rotation: online rotation of the down projections' input.
        """
        downs = [_linear(weight) for weight in down.detach().unbind()]
        if down_rotation is not None:
            downs = [RotatedLinear.from_linear(linear, down_rotation) for linear in downs]
        return cls([_linear(weight) for weight in gate_up.detach().unbind()], downs, act_fn)

    def linears(self) -> Iterator[tuple[str, nn.Module, str]]:
        """``(name, module, role)`` of every expert's layers; roles ``expert_gate_up`` and ``expert_down``."""
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield f"gate_up.{index}", gate_up, "expert_gate_up"
            yield f"down.{index}", down, "expert_down"

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            hidden: [tokens, hidden].
            top_k_index: int64 [tokens, k], the experts of each token.
            top_k_weights: [tokens, k], what each contributes.
        """
        total = torch.zeros_like(hidden)
        for index in top_k_index.unique().tolist():
            token, choice = torch.where(top_k_index == index)
            gate, up = self.gate_up[index](hidden[token]).chunk(2, dim=-1)
            out = self.down[index](self.act_fn(gate) * up) * top_k_weights[token, choice, None]
            total.index_add_(0, token, out.to(total.dtype))
        return total

    def extra_repr(self) -> str:
        return f"experts={len(self.gate_up)}"


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
