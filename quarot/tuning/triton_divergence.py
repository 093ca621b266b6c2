"""The loss of training from two rows of logits in one Triton kernel; CUDA only.

Logits are a vocabulary wide, so the passes of PyTorch's operations over their fp32 copies take a tenth of a training
step. Here both rows are read twice, the second time from the cache, and the gradient takes the place of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _divergence(student, teacher, losses, columns, factor, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    student += row * columns
    teacher += row * columns
    # The running maximum of each lane and the sum of exponentials relative to it.
    lane_s = tl.full((block,), float("-inf"), tl.float32)
    lane_t = lane_s
    sum_s = tl.zeros((block,), tl.float32)
    sum_t = sum_s
    for start in range(0, columns, block):
        place = start + tl.arange(0, block)
        mask = place < columns
        # Chosen in fp32: as a half-precision `other` the value would be infinite, and a lane without a column NaN.
        s = tl.where(mask, tl.load(student + place, mask=mask, other=0.0).to(tl.float32) * factor, -1e30)
        t = tl.where(mask, tl.load(teacher + place, mask=mask, other=0.0).to(tl.float32) * factor, -1e30)
        top_s, top_t = tl.maximum(lane_s, s), tl.maximum(lane_t, t)
        sum_s = sum_s * tl.exp(lane_s - top_s) + tl.exp(s - top_s)
        sum_t = sum_t * tl.exp(lane_t - top_t) + tl.exp(t - top_t)
        lane_s, lane_t = top_s, top_t
    most_s, most_t = tl.max(lane_s, 0), tl.max(lane_t, 0)
    norm_s = most_s + tl.log(tl.sum(sum_s * tl.exp(lane_s - most_s), 0))
    norm_t = most_t + tl.log(tl.sum(sum_t * tl.exp(lane_t - most_t), 0))
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        place = start + tl.arange(0, block)
        mask = place < columns
        s = tl.load(student + place, mask=mask, other=0.0).to(tl.float32) * factor - norm_s
        t = tl.load(teacher + place, mask=mask, other=0.0).to(tl.float32) * factor - norm_t
        wanted = tl.exp(t)
        total += tl.where(mask, wanted * (t - s), 0.0)
        tl.store(student + place, (tl.exp(s) - wanted).to(student.dtype.element_ty), mask=mask)
    tl.store(losses + row, tl.sum(total, 0))


def divergence_(student: Tensor, teacher: Tensor, scaling: float) -> Tensor:
    """KL(teacher || student) of every row of logits [R, V] divided by ``scaling``: fp32 [R].

    ``student`` is overwritten by the difference of the probabilities, student minus teacher.
    """
    losses = torch.empty(student.shape[0], device=student.device)
    if student.numel():
        _divergence[(student.shape[0],)](
            student, teacher, losses, student.shape[1], 1.0 / scaling, block=_BLOCK, num_warps=8
        )
    return losses
