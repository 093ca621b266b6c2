"""Asymmetric calibration: which full-precision weight to round, when the inputs already carry errors.

A layer W [N, K] was trained for inputs x~ but will see x (quantised weights upstream, perhaps quantised activations).
With means over calibration tokens H = E[x x^T], C = E[x~ x^T] and, for layers that write to the residual stream,
D = E[(r~ - r) x^T] [N, K] (r the stream the output is added to), the loss

    E |(W x~ + r~) - (W' x + r)|^2  =  tr (W' - W*) H (W' - W*)^T + const,     W* = (W C + D) H^-1

so rounding W* with GPTQ on H minimises it: GPTQ itself stays as it is. This is the aim of GPTAQ (Li et al., 2025) in
closed form. The damping pulls W* towards W where H says little: ``W* = (W C + D + d W) (H + d I)^-1``.
"""

from __future__ import annotations

import torch


def target_weight(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    cross: torch.Tensor,
    residual: torch.Tensor | None,
    damping: float,
) -> torch.Tensor:
    """W* fp32 [N, K]; ``hessian`` and ``cross`` [K, K], ``residual`` [N, K] or None; solved in fp64."""
    h, w = hessian.double(), weight.double()
    d = damping * h.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    right = w @ cross.double() + d * w
    if residual is not None:
        right += residual.double()
    damped = h + d * torch.eye(h.shape[0], dtype=h.dtype, device=h.device)
    return torch.cholesky_solve(right.T, torch.linalg.cholesky(damped)).T.float()
