"""The op registry: every op is one schema, one plain-PyTorch reference and, where there is a kernel, one CUDA launch.

The reference is the specification of the op and its fallback: it serves every device the compiled extension does not.
``QUAROT_BACKEND=reference`` (or :func:`reference_backend`) forces it everywhere, which is how kernels are tested.

Ops are registered with ``torch.library.Library.define/impl``, not ``torch.library.custom_op``: the latter adds several
microseconds of Python to each call, which an eager decode step feels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from quarot.ops.inference_only import refusing

logger = logging.getLogger("quarot")

_LIBRARY = torch.library.Library("quarot", "DEF")
_BACKENDS = ("auto", "reference")
_force_reference = False


def _read_backend() -> bool:
    value = os.environ.get("QUAROT_BACKEND", "auto")
    if value not in _BACKENDS:
        raise ValueError(f"QUAROT_BACKEND={value!r} is not one of {', '.join(_BACKENDS)}")
    return value == "reference"


_force_reference = _read_backend()


@contextlib.contextmanager
def reference_backend() -> Iterator[None]:
    """Run every op through its plain-PyTorch reference inside the ``with`` block (not thread-local)."""
    global _force_reference
    before, _force_reference = _force_reference, True
    try:
        yield
    finally:
        _force_reference = before


def forces_reference() -> bool:
    """Whether every op runs its reference now."""
    return _force_reference


@functools.cache
def extension() -> ModuleType | None:
    """The compiled module ``quarot._C``, or None (the reason is :func:`extension_status`)."""
    try:
        return importlib.import_module("quarot._C")
    except ImportError:
        return None


def extension_status() -> str:
    """One line saying whether the CUDA extension is there, and if not, why."""
    if extension() is not None:
        return "built"
    try:
        from quarot import _build_info
    except ImportError:
        try:
            importlib.import_module("quarot._C")
        except ModuleNotFoundError:
            return "not built: this copy of quarot was not installed with pip (run `pip install .`)"
        except ImportError as error:
            return f"cannot be loaded: {error}"
        return "built"
    return f"not built: {_build_info.reason}" if not _build_info.cuda else "built but missing: reinstall quarot"


@functools.cache
def device_reason(index: int) -> str | None:
    """Why the extension has no code for CUDA device ``index`` (None when it has)."""
    module = extension()
    if module is None:
        return extension_status()
    major, minor = torch.cuda.get_device_capability(index)
    capability = 10 * major + minor
    compiled, ptx = module.architectures(), module.ptx_architectures()
    # A cubin runs on its own major version and later minors; PTX is compiled by the driver for anything newer.
    if any(arch // 10 == major and arch % 10 <= minor for arch in compiled) or any(arch <= capability for arch in ptx):
        return None
    have = ", ".join(f"sm_{arch}" for arch in compiled)
    return f"no kernel image for sm_{capability} (built for {have}); reinstall with QUAROT_CUDA_ARCHS={capability}"


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def stream(tensor: torch.Tensor) -> int:
    """The raw handle of the current CUDA stream on the tensor's device."""
    index = tensor.device.index
    try:
        return torch._C._cuda_getCurrentRawStream(index)
    except AttributeError:
        return torch.cuda.current_stream(index).cuda_stream


def _register_gradient(name: str, gradient: Callable[..., Any]) -> None:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.args = inputs[1:]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return gradient(grad, *ctx.args), *(None for _ in ctx.args)

    torch.library.register_autograd(f"quarot::{name}", backward, setup_context=keep, lib=_LIBRARY)


def define_op(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    available: Callable[..., str | None] | None = None,
    gradient: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``torch.ops.quarot.<name>`` and return its ``.default`` overload.

    Args:
        name: name of the op, also the stem of its kernel, test and benchmark.
        schema: argument list and returns in ``torch.library`` notation, e.g. ``"(Tensor x, int bits) -> Tensor"``.
        reference: plain PyTorch, the specification; serves every device without a kernel.
        fake: shapes and dtypes of the outputs, for ``torch.compile`` and meta tensors.
        cuda: launches the kernel; gets the same arguments.
        available: returns None when ``cuda`` can serve these arguments, else the reason it cannot (the reference then
            serves, and says so once in the log).
        gradient: ``gradient(grad, *args)``, the gradient by the first argument, the only one that has any; None for ops
            that refuse backward (:mod:`quarot.ops.inference_only`). It costs each call 5 us outside inference mode.
    """

    def guarded(implementation: Callable[..., Any]) -> Callable[..., Any]:
        return refusing(name, schema, implementation) if gradient is None else implementation

    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, guarded(reference), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quarot::{name}", fake, lib=_LIBRARY)
    if cuda is not None:

        def launch(*args: Any) -> Any:
            if _force_reference:
                return reference(*args)
            device = next(a.device for a in args if isinstance(a, torch.Tensor))
            reason = device_reason(device.index)
            if reason is None and available is not None:
                reason = available(*args)
            if reason is None:
                return cuda(*args)
            _warn_once(f"quarot::{name} runs its slow reference on {device}: {reason}")
            return reference(*args)

        _LIBRARY.impl(name, guarded(launch), "CUDA")
    if gradient is not None:
        _register_gradient(name, gradient)
    else:  # the implementations themselves refuse; PyTorch would warn of something else
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return getattr(torch.ops.quarot, name).default
