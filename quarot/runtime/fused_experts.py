"""A mixture of experts behind the norm of its layer, on fused ops and without a look from the host at few tokens.

residual + delta -> RMSNorm -> codes -> gate_up of the chosen experts -> SiLU * up (-> R4) -> codes -> down -> sum
                            -> router -> softmax, top k
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quarot.architectures import Experts
from quarot.nn.expert_list import ExpertList
from quarot.nn.expert_stack import ExpertStack
from quarot.ops.add_rms_norm import add_rms_norm
from quarot.ops.add_rms_norm_quantize import add_rms_norm_quantize
from quarot.ops.expert_route import expert_route


class FusedExperts:
    """The MLP of a decoder layer that has experts.

    Raises:
        NotImplementedError: experts without a GEMM for all of them, or a block with more than router and experts.
    """

    def __init__(self, layer: nn.Module, place: Experts) -> None:
        experts, router = layer.get_submodule(place.module), layer.get_submodule(place.router)
        if not isinstance(experts, ExpertList):
            raise NotImplementedError("the experts are not quantised")
        reason = experts.obstacle()
        if reason is not None:
            raise NotImplementedError(f"{place.module}: {reason}")
        block = layer.get_submodule(place.module.rpartition(".")[0])
        others = [name for name, child in block.named_children() if child not in (experts, router)]
        if others:
            raise NotImplementedError(f"{type(block).__name__} has {', '.join(others)} beside its experts")
        self.experts, self.router = experts, router
        self.float32_weights = place.float32_weights

    def routing(self) -> tuple[int, bool]:
        """How many experts a token goes to, and whether their weights are divided by their sum; looked up each time, as
        the router itself does."""
        return int(self.router.top_k), bool(getattr(self.router, "norm_topk_prob", True))  # type: ignore[arg-type]

    def groups(self) -> tuple[ExpertStack, ...]:
        """Its joined linear layers."""
        return self.experts.stacks or ()

    def after_norm(self, x: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """``x + residual`` [M, hidden] and what becomes of its RMSNorm."""
        normed = add_rms_norm(x, residual, eps)
        logits = nn.functional.linear(normed, self.router.weight)  # type: ignore[arg-type]
        kind = torch.float32 if self.float32_weights else logits.dtype
        share, index = expert_route(logits, *self.routing(), kind)
        first = self.experts.gate_up[0]
        packed = self.experts.packs(x, index)
        codes, scale, total = add_rms_norm_quantize(x, residual, eps, first.a_bits, first.a_clip, packed)
        return total, self.experts.forward_codes(codes, scale, index, share, x.dtype)
