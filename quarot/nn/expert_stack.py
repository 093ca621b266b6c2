"""``ExpertStack``: one projection of all experts of a layer, joined for :mod:`quarot.ops.expert_gemm_w4a4`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from quarot.nn.joint import joined
from quarot.nn.quant_linear import QuantLinear
from quarot.ops.expert_gemm_w4a4 import expert_gemm_w4a4


class ExpertStack:
    """``y[r] = x[r] W[expert[r]]^T`` from the codes of x.

    Attributes:
        members: the layers, in the order of the experts.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        self.members: tuple[QuantLinear, ...] = tuple(members)  # type: ignore[arg-type]

    @staticmethod
    def reason(members: Iterable[nn.Module]) -> str | None:
        """Why these layers, which quantise their inputs alike, have no such GEMM (None when they have)."""
        for m in members:
            assert isinstance(m, QuantLinear)
            plain = m.w_bits == 4 and m.w_symmetric and m.weight_scale.ndim == 1 and m.bias is None
            if not plain or m.out_features % 16:
                return f"no GEMM for many experts with {m.extra_repr()}"
        return None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int4 tiles [E, N/16, Kp/32, 256] and float32 scales [E, N]."""
        joint, count = joined(self.members), len(self.members)
        return joint.qweight.view(count, -1, *joint.qweight.shape[1:]), joint.scale.view(count, -1)

    def __call__(
        self, codes: torch.Tensor, row_scale: torch.Tensor, expert: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """[M * top_k, N] from codes [M, Kp] and the experts [M, top_k] of each row."""
        return expert_gemm_w4a4(codes, row_scale, expert, *self.tensors(), dtype)
