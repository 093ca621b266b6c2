"""Builds quarot: pure Python plus, where nvcc is found, the CUDA extension (``QUAROT_CUDA=auto|1|0``).

Everything that is not about the extension is in pyproject.toml; how the extension is compiled is in build_cuda/.
"""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there when pip runs this file

from build_cuda.command import BuildExt, BuildPy, plan

extensions, _ = plan()
setup(ext_modules=extensions, cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
