"""Compiles the extension with ninja."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from .architectures import Selection
from .ninja_file import Layout, render
from .toolkit import BuildError, Toolkit

GIBIBYTES_PER_JOB = 4
"""A CUTLASS file takes nvcc up to this much memory."""


def jobs() -> int:
    """``MAX_JOBS``, or as many as there are processors and memory for."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    except (ValueError, OSError, AttributeError):
        memory = GIBIBYTES_PER_JOB
    return max(1, min(processors, memory // GIBIBYTES_PER_JOB))


def strict() -> bool:
    """``QUAROT_STRICT=1``: register spills fail the build (CI)."""
    return os.environ.get("QUAROT_STRICT", "0") == "1"


def _ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
    if found is None:
        raise BuildError("ninja was not found: pip install ninja")
    return found


def kept_headers(build: Path, cutlass: Path) -> Path:
    """A copy of the CUTLASS headers under ``build``, made once a version.

    An isolated pip build has them in a new temporary folder each time, so every object would look out of date.
    """
    version = (cutlass / "cutlass" / "version.h").read_text(encoding="utf-8")
    numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", version)
    target = build / ("cutlass-" + ".".join(numbers))
    if not target.is_dir():
        build.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=build) as temporary:
            copy = Path(temporary) / "include"
            shutil.copytree(cutlass, copy)
            copy.rename(target)
    return target


def compile_extension(
    root: Path, toolkit: Toolkit, chosen: Selection, output: str | None, layout: Layout | None = None
) -> Layout:
    """Compile ``csrc`` and link it to ``output`` (relative to ``root`` or absolute); None: the CUDA objects only.

    Raises:
        BuildError: ninja or a compiler failed, with the first error line; the whole output is on stdout.
    """
    layout = layout or Layout(root, chosen)
    if not os.environ.get("CUTLASS_HOME"):  # headers that somebody may be editing are used where they are
        toolkit = replace(toolkit, cutlass=kept_headers(root / layout.build, toolkit.cutlass).relative_to(root))
    manifest = root / layout.manifest
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(render(layout, toolkit, strict=strict(), output=output), encoding="utf-8")
    command = [_ninja(), "-f", str(layout.manifest), "-j", str(jobs())]
    print(f"quarot: compiling csrc with {toolkit.text} for {chosen.tag}, {jobs()} jobs", flush=True)
    # Commands are the same whichever Python runs them, or ninja would compile everything again for another one.
    environment = {**os.environ, "QUAROT_BUILD_PYTHON": sys.executable}
    status, first_error = _run(command, root, environment)
    if status:
        raise BuildError(f"compiling csrc failed with status {status}: {first_error or 'see the output above'}")
    return layout


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run and print a command; its exit status and the first line that reports an error."""
    first_error = ""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if not first_error and re.search(r"\berror\b", line, re.IGNORECASE):
                first_error = line.strip()[:300]
    return process.returncode, first_error
