"""The loss: how far the quantised model's next-token distribution is from the full-precision one's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quarot.architectures import architecture_of, logits_scaling
from quarot.nn.quant_linear import linear_weight

_ROWS = 4096


class _HeadDivergence(torch.autograd.Function):
    """Mean over rows of KL(teacher || student) through a frozen head; logits exist for ``_ROWS`` rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        total = torch.zeros((), device=student.device)
        gradient = torch.empty_like(student, dtype=torch.float32)
        for start in range(0, student.shape[0], _ROWS):
            part = slice(start, start + _ROWS)
            own, target = (F.linear(states[part].to(head.dtype), head) for states in (student, teacher))
            losses, slope = _divergence(own, target, scaling)
            total += losses.sum()
            gradient[part] = slope @ head
        ctx.save_for_backward(gradient.div_(student.shape[0] * scaling))
        ctx.dtype = student.dtype
        return total / student.shape[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return (ctx.saved_tensors[0] * gradients[0]).to(ctx.dtype), None, None, None


def _divergence(own: torch.Tensor, target: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """From logits [R, V]: KL of the rows, and the difference of the probabilities in the dtype of the logits."""
    if own.is_cuda and own.dtype != torch.float64:
        try:
            from quarot.tuning import triton_divergence
        except ImportError:
            pass
        else:
            return triton_divergence.divergence_(own, target, scaling), own
    student, teacher = (F.log_softmax(logits.float() / scaling, -1) for logits in (own, target))
    wanted = teacher.exp()
    return (wanted * (teacher - student)).sum(-1), (student.exp_() - wanted).to(own.dtype)


def divergence_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """:func:`head_divergence` of student and teacher through a model's own head, in bfloat16 on a GPU, else in fp32."""
    head = linear_weight(model.get_submodule(architecture_of(model).lm_head)).detach()
    head, scaling = head.to(torch.bfloat16 if head.is_cuda else torch.float32), logits_scaling(model)
    return lambda student, teacher: head_divergence(student, teacher, head, scaling)


def head_divergence(
    student: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor, scaling: float = 1.0
) -> torch.Tensor:
    """Mean KL divergence of next-token distributions, in nats.

    Args:
        student, teacher: [..., hidden], outputs of the final norm; gradients flow to ``student`` only.
        head: [vocabulary, hidden], in the dtype its products are to be computed in.
        scaling: logits are divided by it (Granite).
    """
    flat = student.reshape(-1, student.shape[-1])
    return _HeadDivergence.apply(flat, teacher.reshape(flat.shape), head, scaling)  # type: ignore[no-untyped-call,no-any-return]
