"""``ExpertList``: a mixture of experts as plain linear layers, one gate-up and one down projection for each expert.

transformers keeps expert weights in two 3-D parameters, which leaves no place for an online rotation, packed codes or
calibration hooks. Here each expert's projections are modules of their own, so that what is true of a linear layer of a
dense model (rotation, quantisation, saving) is true of an expert's.

Few tokens (decode steps, short prompts) go through one GEMM for all experts (:mod:`quarot.ops.expert_gemm_w4a4`): the
numbers of the experts stay on the device, so the step can be recorded. More tokens, and experts without such a GEMM,
take a loop over the experts that some token goes to: two products for each of them, tokens sorted by expert with one
look at the counts from the host. Either way integer experts share one quantisation of the layer's input and one fused
SiLU, R4 and quantisation of all down projections' inputs, and give the same bits. No result depends on which other
tokens are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from quarot.nn.expert_stack import ExpertStack
from quarot.nn.hooks import HookWatch
from quarot.nn.quant_linear import QuantLinear
from quarot.nn.rotated_linear import RotatedLinear
from quarot.nn.settings import SettingsWatch
from quarot.ops import expert_gemm_w4a4
from quarot.ops.expert_sum import expert_sum
from quarot.ops.inference_only import inference_only
from quarot.ops.quantize_per_token import quantize_per_token
from quarot.ops.silu_mul_hadamard_quantize import silu_mul_hadamard_quantize
from quarot.rotation.spec import HadamardSpec

STACKED_ROWS = 64
"""Pairs of token and choice for every expert of the layer, up to which one GEMM for all experts is faster than a loop
(csrc/experts/NOTES.md)."""

Part = tuple[int, int, int]
"""An expert, and the first and last (excluded) of its rows among the pairs of token and choice sorted by expert."""


class ExpertList(nn.Module):
    """Runs each token through its experts, one expert after the other (see the module).

    Attributes:
        gate_up: for each expert, hidden -> 2 * intermediate, gate rows first.
        down: for each expert, intermediate -> hidden.
        act_fn: activation of the gate.
        integer: whether all experts quantise alike, so that they share their quantisers (:meth:`settle`).
        stacks: the projections as one GEMM each takes them; None where it cannot.
        watch: says whether an integer expert has a hook, and must be called as a module.
        settings: says whether an integer expert rounds its input in another way by now.
        origin: the module that this one took the place of, its weights on ``meta``; in a tuple, so that it is no child.
    """

    def __init__(self, gate_up: list[nn.Module], down: list[nn.Module], act_fn: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self.act_fn = act_fn
        self.integer = False
        self.stacks: tuple[ExpertStack, ExpertStack] | None = None
        self._settled: list[nn.Module] = []
        self.watch = HookWatch(())
        self.settings = SettingsWatch(())
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
        """Look at the experts, which are about to stay as they are, and decide what they can share."""
        self.integer = (
            _alike(self.gate_up)
            and _alike(self.down)
            and self.gate_up[0].input_rotation is None
            and isinstance(self.act_fn, nn.Module)
            and type(self.act_fn).__name__ in ("SiLU", "SiLUActivation")
        )
        self._settled = self._layers()
        self.stacks, self.watch, self.settings = None, HookWatch(self._settled), SettingsWatch(self._settled)
        if self.obstacle() is None:
            self.stacks = ExpertStack(self.gate_up), ExpertStack(self.down)
        self._join()

    def _layers(self) -> list[nn.Module]:
        return [*self.gate_up._modules.values(), *self.down._modules.values()]  # type: ignore[list-item]

    def obstacle(self) -> str | None:
        """Why a step over these experts has to wait for the host (None when it need not)."""
        if not self.integer:
            return "its experts do not share quantisers"
        return ExpertStack.reason(self.gate_up) or ExpertStack.reason(self.down)

    def _join(self) -> None:
        """Join what a GPU reads joined: in the first forward it would be too late for a compiled one."""
        if self.stacks is not None and self.gate_up[0].qweight.is_cuda:
            for stack in self.stacks:
                stack.tensors()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ExpertList:
        super()._apply(fn, recurse)
        self._join()
        return self

    def expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, hidden] through one expert, whatever its layers are."""
        gate, up = self.gate_up[index](x).chunk(2, dim=-1)
        out: torch.Tensor = self.down[index](self.act_fn(gate) * up)
        return out

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            hidden: [tokens, hidden].
            top_k_index: int64 [tokens, top_k], the experts of each token.
            top_k_weights: [tokens, top_k], what each contributes.
        """
        if not len(hidden):
            return torch.zeros_like(hidden)
        if (self.integer and self._layers() != self._settled) or not self.settings.are_kept():
            self.settle()  # an expert was replaced, or rounds its input in another way
        if self.integer and self.watch.find() is None:
            return inference_only("ExpertList", lambda x: self._quantized(x, top_k_index, top_k_weights), hidden)
        order, token, parts = self._sorted(top_k_index)
        outs = [self.expert(index, hidden[token[a:b]]) for index, a, b in parts]
        weighted = _unsorted(torch.cat(outs), order).view(*top_k_index.shape, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden.dtype)

    def _quantized(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        first = self.gate_up[0]
        codes, scale = quantize_per_token(hidden, first.a_bits, first.a_clip, self.packs(hidden, index))
        return self.forward_codes(codes, scale, index, weights, hidden.dtype)

    def packs(self, x: torch.Tensor, index: torch.Tensor) -> bool:
        """Whether :meth:`forward_codes` takes the codes of x for these choices [tokens, top_k] as packed int4."""
        return not self._stacked(index) and self.gate_up[0]._packs_activations(x)

    def forward_codes(
        self,
        codes: torch.Tensor,
        row_scale: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """:meth:`forward` in ``dtype`` of integer experts, from the codes and row scales of the input."""
        run = self._run_stacked if self._stacked(top_k_index) else self._run_loop
        return expert_sum(run(codes, row_scale, top_k_index, dtype), top_k_weights)

    def _stacked(self, index: torch.Tensor) -> bool:
        """Whether these choices [tokens, top_k] go through one GEMM for all experts."""
        few = index.numel() <= STACKED_ROWS * len(self.gate_up)
        waits = not (index.is_cuda and _recorded())  # a recording cannot wait for the host, which a loop does
        return (few or not waits) and self.stacks is not None and self.gate_up[0].qweight.is_cuda

    def _run_stacked(
        self, codes: torch.Tensor, scale: torch.Tensor, index: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """[tokens * top_k, hidden], as many tokens at once as one launch takes."""
        assert self.stacks is not None
        gate_up, down = self.stacks
        at_once = max(1, expert_gemm_w4a4.ROWS // index.shape[1])
        outs = []
        for c, s, i in zip(codes.split(at_once), scale.split(at_once), index.split(at_once), strict=True):
            outs.append(down(*self._inner(gate_up(c, s, i, dtype), False), i.reshape(-1, 1), dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _run_loop(
        self, codes: torch.Tensor, scale: torch.Tensor, index: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """[tokens * top_k, hidden], one expert after the other."""
        order, token, parts = self._sorted(index)
        gate_up = self._products(self.gate_up, codes[token], scale[token], parts, dtype)
        inner = self._inner(gate_up, self.down[0]._packs_activations(gate_up))
        return _unsorted(self._products(self.down, *inner, parts, dtype), order)

    def _inner(self, gate_up: torch.Tensor, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of the down projections' inputs."""
        last = self.down[0]
        r = last.input_rotation
        order, pow2 = (1, 1) if r is None else (r.order, r.pow2)
        return silu_mul_hadamard_quantize(gate_up, order, pow2, last.a_bits, last.a_clip, packed)

    def _sorted(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[Part]]:
        """The pairs of token and choice sorted by expert, the token of each, and where each expert's begin and end."""
        flat = index.flatten()
        order = flat.argsort(stable=True)
        parts, start = [], 0
        for expert, count in enumerate(torch.bincount(flat, minlength=len(self.gate_up)).tolist()):
            if count:
                parts.append((expert, start, start + count))
                start += count
        return order, order // index.shape[1], parts

    @staticmethod
    def _products(
        layers: nn.ModuleList, codes: torch.Tensor, scale: torch.Tensor, parts: list[Part], dtype: torch.dtype
    ) -> torch.Tensor:
        outs = [layers[i].forward_codes(codes[a:b], scale[a:b], dtype) for i, a, b in parts]  # type: ignore[operator]
        return torch.cat(outs)

    def extra_repr(self) -> str:
        return f"experts={len(self.gate_up)}"


def _recorded() -> bool:
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def _unsorted(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(rows)
    out[order] = rows
    return out


def _alike(layers: nn.ModuleList) -> bool:
    """Whether all layers are integer and quantise their input in the same way."""
    if not all(isinstance(m, QuantLinear) and m.a_bits < 16 and m.a_group_size is None for m in layers):
        return False
    return len({(m.a_bits, m.a_clip, m.input_rotation, m.w_bits == 4 and m.w_symmetric) for m in layers}) == 1


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
