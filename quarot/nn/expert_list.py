"""``ExpertList``: a mixture of experts as plain linear layers, one gate-up and one down projection for each expert.

transformers keeps expert weights in two 3-D parameters, which leaves no place for an online rotation, packed codes or
calibration hooks. Here each expert's projections are modules of their own, so that what is true of a linear layer of a
dense model (rotation, quantisation, saving) is true of an expert's.

It is a loop over the experts that some token goes to, not a grouped GEMM: two products for each of them. Everything
around the products is done once for all experts: tokens are sorted by expert with one look at the counts from the host,
and integer experts share one quantisation of the layer's input and one fused SiLU, R4 and quantisation of all their
down projections' inputs. No result depends on which other tokens are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from quarot.nn.quant_linear import QuantLinear
from quarot.nn.rotated_linear import RotatedLinear
from quarot.ops.inference_only import inference_only
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize
from quarot.rotation.spec import HadamardSpec

Part = tuple[int, int, int]
"""An expert, and the first and last (excluded) of its rows among the pairs of token and choice sorted by expert."""


class ExpertList(nn.Module):
    """Runs each token through its experts, one expert after the other (see the module).

    Attributes:
        gate_up: for each expert, hidden -> 2 * intermediate, gate rows first.
        down: for each expert, intermediate -> hidden.
        act_fn: activation of the gate.
        integer: whether all experts quantise alike, so that they share their quantisers (:meth:`settle`).
        origin: the module that this one took the place of, its weights on ``meta``; in a tuple, so that it is no child.
    """

    def __init__(self, gate_up: list[nn.Module], down: list[nn.Module], act_fn: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self.act_fn = act_fn
        self.integer = False
        self.origin: tuple[nn.Module, ...] = ()

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

    def settle(self) -> None:
        """Look at the experts, which are about to stay as they are, and decide whether they can share quantisers."""
        self.integer = (
            _alike(self.gate_up)
            and _alike(self.down)
            and self.gate_up[0].input_rotation is None
            and isinstance(self.act_fn, nn.Module)
            and type(self.act_fn).__name__ in ("SiLU", "SiLUActivation")
        )

    def expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, hidden] through one expert, whatever its layers are."""
        gate, up = self.gate_up[index](x).chunk(2, dim=-1)
        out: torch.Tensor = self.down[index](self.act_fn(gate) * up)
        return out

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            hidden: [tokens, hidden].
            top_k_index: int64 [tokens, k], the experts of each token.
            top_k_weights: [tokens, k], what each contributes.
        """
        if not len(hidden):
            return torch.zeros_like(hidden)
        flat = top_k_index.flatten()
        order = flat.argsort(stable=True)
        token = order // top_k_index.shape[1]
        parts, start = [], 0
        for index, count in enumerate(torch.bincount(flat, minlength=len(self.gate_up)).tolist()):
            if count:
                parts.append((index, start, start + count))
                start += count
        if self.integer and not self._hooked(parts):
            sorted_out = inference_only("ExpertList", lambda x: self._run_integer(x, token, parts), hidden)
        else:
            sorted_out = torch.cat([self.expert(index, hidden[token[a:b]]) for index, a, b in parts])
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        weighted = out.view(*top_k_index.shape, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden.dtype)

    def _hooked(self, parts: list[Part]) -> bool:
        """Whether anything waits for a call of one of these experts' layers: the user, or accelerate with weights."""
        layers = [layers[index] for index, _, _ in parts for layers in (self.gate_up, self.down)]
        return any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in layers)

    def _run_integer(self, hidden: torch.Tensor, token: torch.Tensor, parts: list[Part]) -> torch.Tensor:
        """[pairs, hidden] in the order of ``token`` (the token of each pair), with one quantiser for all experts."""
        first, last = self.gate_up[0], self.down[0]
        codes, scale = first.quantize_input(hidden)
        gate_up = self._products(self.gate_up, codes[token], scale[token], parts, hidden.dtype)
        r = last.input_rotation
        order, pow2 = (1, 1) if r is None else (r.order, r.pow2)
        packed = last._packs_activations(hidden)
        codes, scale = silu_mul_hadamard_quantize(gate_up, order, pow2, last.a_bits, last.a_clip, packed)
        return self._products(self.down, codes, scale, parts, hidden.dtype)

    @staticmethod
    def _products(
        layers: nn.ModuleList, codes: torch.Tensor, scale: torch.Tensor, parts: list[Part], dtype: torch.dtype
    ) -> torch.Tensor:
        outs = [layers[i].forward_codes(codes[a:b], scale[a:b], dtype) for i, a, b in parts]  # type: ignore[operator]
        return torch.cat(outs)

    def extra_repr(self) -> str:
        return f"experts={len(self.gate_up)}"


def _alike(layers: nn.ModuleList) -> bool:
    """Whether all layers are integer and quantise their input in the same way."""
    if not all(isinstance(m, QuantLinear) and m.a_bits < 16 and m.a_group_size is None for m in layers):
        return False
    return len({(m.a_bits, m.a_clip, m.input_rotation, m.w_bits == 4 and m.w_symmetric) for m in layers}) == 1


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
