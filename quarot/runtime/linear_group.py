"""``LinearGroup``: linear layers that read the same input, run as one integer GEMM.

Concatenating their rows costs no memory: the parameters of the member layers become views of the joint tensors, so
``state_dict`` and saving see the same names and values as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quarot.nn.joint import joined
from quarot.nn.quant_linear import QuantLinear
from quarot.ops import add_rms_norm_gemm_w4a4 as norm_gemm
from quarot.ops import hadamard_gemm_w4a4 as hadamard_gemm
from quarot.ops import registry
from quarot.ops import silu_mul_hadamard_gemm_w4a4 as silu_gemm
from quarot.ops.add_rms_norm_quantize import add_rms_norm_quantize
from quarot.ops.gemm_prologue import ROWS
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize

_ROWS_PER_STRIP = 16  # rows of an int4 tile: members must end on a strip, or the next one would start inside it


class LinearGroup:
    """``[y_1 | y_2 | ..] = x [W_1 | W_2 | ..]^T`` from the codes of x.

    Attributes:
        members: the layers, in the order of the output columns.
        out_features: width of the joint output.
    """

    def __init__(self, members: Sequence[QuantLinear]) -> None:
        self.members = tuple(members)
        self.out_features = sum(m.out_features for m in members)
        self.first = self.members[0]

    @staticmethod
    def reason(members: Sequence[nn.Module]) -> str | None:
        """Why these layers cannot run as one integer GEMM (None when they can)."""
        for m in members:
            if not isinstance(m, QuantLinear):
                return f"{type(m).__name__} is not quantised"
            if m.w_bits not in (4, 8) or m.a_bits == 16 or m.a_group_size is not None or m.weight_zero is not None:
                return f"no integer GEMM for {m.extra_repr()}"
        alike = {(m.w_bits, m.w_group_size, m.a_bits, m.a_clip, m.input_rotation, m.in_features) for m in members}
        if len(alike) > 1:
            return "layers on the same input are quantised differently"
        if any(m.out_features % _ROWS_PER_STRIP for m in members[:-1]):
            return f"{[m.out_features for m in members]} rows are not multiples of {_ROWS_PER_STRIP}"
        return None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Joint codes, scales and bias; joined again when a member was moved or reloaded since."""
        return joined(self.members)[:3]

    def __call__(self, codes: torch.Tensor, row_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[M, out_features] in ``dtype`` from codes [M, Kp] and fp32 row scales [M]."""
        qweight, scale, bias = self.tensors()
        if self.first.w_bits == 8:
            return gemm_w8a8(codes, row_scale, qweight, scale, bias, dtype)
        return gemm_w4a4(codes, row_scale, qweight, scale, bias, dtype, codes.dtype == torch.uint8)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[M, out_features] from the RMSNorm of ``x + residual``, and that sum: one kernel for a few rows, else two."""
        first = self.first
        if self._few(x):
            arguments = (x, residual, eps, first.a_bits, first.a_clip, *self.tensors())
            if norm_gemm.available(*arguments) is None:
                return norm_gemm.add_rms_norm_gemm_w4a4(*arguments)
        layout = first._code_layout(x)
        codes, scale, total = add_rms_norm_quantize(x, residual, eps, first.a_bits, first.a_clip, *layout)
        return self(codes, scale, x.dtype), total

    def after_rotation(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``residual`` and what the layer makes of x after its online rotation, [M, out_features].

        One kernel for a few rows, which gives their sum and None; else two.
        """
        first, r = self.first, self.first.input_rotation
        if r is not None and self._few(x):
            arguments = (x, r.order, r.pow2, r.inner, first.a_bits, first.a_clip, *self.tensors(), residual)
            if hadamard_gemm.available(*arguments) is None:
                return hadamard_gemm.hadamard_gemm_w4a4(*arguments), None
        codes, scale = first.quantize_input(x)
        return residual, self(codes, scale, x.dtype)

    def after_gate(self, gate_up: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same of silu(gate) * up."""
        first, r = self.first, self.first.input_rotation
        order, pow2 = (1, 1) if r is None else (r.order, r.pow2)
        if self._few(gate_up):
            arguments = (gate_up, order, pow2, first.a_bits, first.a_clip, *self.tensors(), residual)
            if silu_gemm.available(*arguments) is None:
                return silu_gemm.silu_mul_hadamard_gemm_w4a4(*arguments), None
        layout = first._code_layout(gate_up)
        codes, scale = silu_mul_hadamard_quantize(gate_up, order, pow2, first.a_bits, first.a_clip, *layout)
        return residual, self(codes, scale, gate_up.dtype)

    def _few(self, x: torch.Tensor) -> bool:
        """Whether rows are so few that the GEMM had better make its codes itself (where it can)."""
        if x.shape[0] > ROWS or not x.is_cuda or self.first.w_bits != 4 or self.first._packs_activations(x):
            return False
        return registry.device_reason(x.device.index) is None
