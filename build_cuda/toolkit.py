"""Finding nvcc and the CUTLASS headers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


class BuildError(RuntimeError):
    """The extension cannot be built; the message says why, in one line, and what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit and the headers beside it.

    Attributes:
        nvcc: the compiler driver as the user's PATH names it; may be a shell wrapper.
        version: ``(major, minor)`` of nvcc.
        cutlass: include directory of CUTLASS.
    """

    nvcc: str
    version: tuple[int, int]
    cutlass: Path

    @property
    def text(self) -> str:
        """For messages and ``quarot doctor``."""
        return f"nvcc {self.version[0]}.{self.version[1]} ({self.nvcc})"


def _nvcc_candidates() -> Iterator[Path]:
    for variable in ("QUAROT_NVCC", "CUDACXX"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    site = Path(sysconfig.get_paths()["purelib"])
    yield from sorted(site.glob("nvidia/*/bin/nvcc"), reverse=True)  # the PyPI packages nvidia-cuda-nvcc*


def find_nvcc() -> str | None:
    """The first nvcc there is: QUAROT_NVCC, CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, PyPI packages."""
    for candidate in _nvcc_candidates():
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    return None


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """``(major, minor)`` that ``nvcc --version`` reports."""
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{nvcc} does not run: {error}") from None
    match = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    if answer.returncode or match is None:
        raise BuildError(f"{nvcc} --version failed: {(answer.stderr or answer.stdout).strip()[:200]}")
    return int(match[1]), int(match[2])


def cutlass_include() -> Path | None:
    """``$CUTLASS_HOME/include``, or the headers in the PyPI package nvidia-cutlass (not imported: that is slow)."""
    if os.environ.get("CUTLASS_HOME"):
        return Path(os.environ["CUTLASS_HOME"]) / "include"
    spec = find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = Path(folder) / "source" / "include"
        if (include / "cutlass" / "cutlass.h").is_file():
            return include
    return None


def find_toolkit() -> Toolkit:
    """The toolkit to build with.

    Raises:
        BuildError: no nvcc, one too old, no host compiler, or no CUTLASS headers.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc was not found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)")
    version = nvcc_version(nvcc)
    if version < (12, 4):
        raise BuildError(f"nvcc {version[0]}.{version[1]} is too old; CUDA 12.4 or newer is needed")
    if not (os.environ.get("NVCC_CCBIN") or shutil.which("g++") or shutil.which("c++")):
        raise BuildError("no host C++ compiler (g++) was found")
    cutlass = cutlass_include()
    if cutlass is None or not (cutlass / "cutlass" / "cutlass.h").is_file():
        raise BuildError("the CUTLASS headers were not found: pip install nvidia-cutlass, or set CUTLASS_HOME")
    return Toolkit(nvcc, version, cutlass)


def cuda_include(nvcc: str) -> Path | None:
    """The toolkit's include directory, from nvcc itself: ``nvcc`` may be a wrapper, so its own path says nothing."""
    answer = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, timeout=60)
    match = re.search(r"^#\$ TOP=(.+)$", answer.stderr, re.MULTILINE)
    if match is None:
        return None
    top = Path(match[1].strip().strip('"')).resolve()
    target = next((top / "targets").glob("*/include/cuda_runtime.h"), None) if (top / "targets").is_dir() else None
    return target.parent if target else top / "include"
