"""Kernels of a decode step keep their registers on the architectures that .ci/run does not build."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build_cuda.ninja_file import COMMON_FLAGS  # noqa: E402
from build_cuda.toolkit import find_nvcc  # noqa: E402

SOURCES = ("gemm/skinny_int4.cu", "gemm/prologue_norm.cu", "gemm/prologue_heads.cu", "decode_step/argmax_rows.cu")


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("source", SOURCES)
def test_nothing_spills_on_ada(source, tmp_path):
    """sm_89 stands for sm_86 too, whose registers ptxas hands out alike. QUAROT_STRICT=1 checks all of csrc."""
    target = tmp_path / "object.o"
    checked = [sys.executable, "build_cuda/checked_nvcc.py", "--strict", f"csrc/{source}", str(target)]
    flags = [*COMMON_FLAGS.split(), "-Icsrc", "-Xptxas", "-v", "-gencode=arch=compute_89,code=sm_89"]
    command = [*checked, str(find_nvcc()), *flags, "-c", f"csrc/{source}", "-o", str(target)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert target.exists()
