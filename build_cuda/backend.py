"""The PEP 517 backend: setuptools', plus the CUDA build requirements only where the extension is going to be built.

A machine without nvcc needs setuptools and nothing else; with it, pybind11, ninja and the CUTLASS headers from PyPI.
"""

from __future__ import annotations

import os
from typing import Any

from setuptools import build_meta as _setuptools

from build_cuda.toolkit import find_nvcc

CUDA_REQUIREMENTS = ["pybind11>=2.13", "ninja", "nvidia-cutlass>=4.2"]


def requirements() -> list[str]:
    """What the build needs beyond setuptools, by QUAROT_CUDA and whether there is an nvcc."""
    mode = os.environ.get("QUAROT_CUDA", "auto")
    return list(CUDA_REQUIREMENTS) if mode == "1" or (mode == "auto" and find_nvcc()) else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return requirements()


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []


# The rest is setuptools', named here because hooks are looked up by attribute.
build_wheel = _setuptools.build_wheel
build_editable = _setuptools.build_editable
build_sdist = _setuptools.build_sdist
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable
