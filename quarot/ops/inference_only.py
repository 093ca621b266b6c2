"""No gradient rather than a wrong one: rounding has derivative zero, and kernels have none, so backward is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class _Refuse(torch.autograd.Function):
    """The second argument, as if it had been computed from the first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.what} has no gradient: quantised models are for inference; train the original model, "
            "or model.dequantize() first"
        )


def inference_only(what: str, compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``compute(x)``, whose backward raises a RuntimeError that names ``what``.

    Forwards outside ``torch.no_grad()`` work (and keep nothing for a backward); compiled ones are left to the compiler.
    """
    if not _wants_gradient(x):
        return compute(x)
    with torch.no_grad():
        out = compute(x)
    return refuse_gradient(what, x, out)


def refuse_gradient(what: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out``, with the same refusal where ``x`` wants a gradient."""
    return _Refuse.apply(x, out, what) if _wants_gradient(x) else out  # type: ignore[no-any-return]


def refusing(name: str, schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An op's implementation whose floating-point results refuse backward, where an argument wants a gradient.

    What autograd records inside a reference is a wrong gradient where something is rounded, and a kernel records none.

    Raises:
        RuntimeError: an argument that the op changes in place wants a gradient: there is no result to refuse with.
    """
    changed = [place for place, argument in enumerate(schema.split("->")[0].split(",")) if "!" in argument]

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return implementation(*args)
        wanting = next((a for a in args if isinstance(a, torch.Tensor) and a.requires_grad), None)
        if wanting is None:
            return implementation(*args)
        if any(args[place].requires_grad for place in changed):
            raise RuntimeError(f"quarot::{name} works in place and has no gradient: call it inside torch.no_grad()")
        with torch.no_grad():
            out = implementation(*args)
        what = f"quarot::{name}"
        if isinstance(out, tuple):
            return tuple(refuse_gradient(what, wanting, one) if one.is_floating_point() else one for one in out)
        wide = isinstance(out, torch.Tensor) and out.is_floating_point()
        return refuse_gradient(what, wanting, out) if wide else out

    return run


def _wants_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
