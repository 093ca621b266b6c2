"""Say what works here: versions, the CUDA extension, each GPU, optional packages.

Exit status 1 when something that should work does not (a GPU without kernels, an extension that does not load).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator

REQUIRED = ("torch", "transformers", "accelerate", "safetensors", "tqdm", "numpy")
OPTIONAL = {
    "datasets": "wikitext2 by name (extra eval)",
    "lm-eval": "zero-shot tasks (extra eval)",
    "gguf": "the model smollm2 (extra gguf)",
    "matplotlib": "quarot plot (extra plot)",
    "flashinfer-python": "prefill attention, and a benchmark peer (extra flashinfer)",
}
_VARIABLES = (
    "QUAROT_BACKEND",
    "QUAROT_FLASHINFER",
    "QUAROT_HADAMARD",
    "QUAROT_CUDA_GRAPHS",
    "QUAROT_CACHE",
    "QUAROT_LOG_LEVEL",
    "CUDA_VISIBLE_DEVICES",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(options: argparse.Namespace) -> int:
    del options
    problems = []
    for good, line in report():
        print(("  " if good else "! ") + line)
        if not good:
            problems.append(line)
    print(
        f"{len(problems)} problem{'s' * (len(problems) != 1)} found"
        if problems
        else "everything that can work here works"
    )
    return 1 if problems else 0


def version_of(package: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report() -> Iterator[tuple[bool, str]]:
    """Lines of the report, each with whether it is in order."""
    import quarot

    yield True, f"quarot {quarot.__version__} ({os.path.dirname(quarot.__file__)})"
    yield True, f"Python {platform.python_version()}, {platform.platform()}"
    for package in REQUIRED:
        version = version_of(package)
        yield version is not None, f"{package} {version or 'is missing: pip install ' + package}"
    yield from _extension()
    yield from _devices()
    for package, purpose in OPTIONAL.items():
        version = version_of(package)
        yield True, f"{package} {version or 'not installed'}: {purpose}"
    for name in _VARIABLES:
        if name in os.environ:
            yield True, f"{name}={os.environ[name]}"


def _extension() -> Iterator[tuple[bool, str]]:
    import torch

    from quarot.ops import registry

    status, module = registry.extension_status(), registry.extension()
    if module is None:
        # Without a GPU nothing is lost: the reference ops serve the CPU anyway.
        lost = torch.cuda.is_available() or "cannot be loaded" in status
        yield not lost, f"CUDA extension {status}"
        return
    built = ", ".join(f"sm_{arch}" for arch in module.architectures())
    yield True, f"CUDA extension built for {built}" + "".join(f", PTX {arch}" for arch in module.ptx_architectures())
    try:
        from quarot import _build_info
    except ImportError:
        return
    yield True, f"compiled by {_build_info.nvcc}"


def _devices() -> Iterator[tuple[bool, str]]:
    import torch

    if not torch.cuda.is_available():
        yield True, f"no CUDA device (torch {torch.__version__}): everything runs on the plain-PyTorch reference ops"
        return
    from quarot.ops import registry

    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        reason = registry.device_reason(index)
        if reason is None:
            reason = _check_kernel(index)
        yield (
            reason is None,
            f"cuda:{index} {name}, {memory:.0f} GiB: {reason or 'kernels run and agree with the reference'}",
        )


def _check_kernel(index: int) -> str | None:
    """Run one kernel against its reference on a GPU; None when they agree."""
    import torch

    from quarot.ops.quantize_per_token import quantize_per_token
    from quarot.ops.registry import reference_backend

    x = torch.randn(4, 256, device=f"cuda:{index}", dtype=torch.float16)
    try:
        codes, scale = quantize_per_token(x, 4, 0.9, False)
        with reference_backend():
            wanted, wanted_scale = quantize_per_token(x, 4, 0.9, False)
    except Exception as error:
        return f"the test kernel failed: {error}"
    same = torch.equal(codes, wanted) and torch.equal(scale, wanted_scale)
    return None if same else "the test kernel disagrees with its reference: reinstall, and report it"
