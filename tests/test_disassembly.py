"""The compiled extension holds the instructions it is meant to; skipped where it is not built, or cannot be read."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_cuda import disassembly
from quarot.ops.registry import extension

FILE = disassembly.extension_file()
ARCHITECTURES = extension().architectures() if FILE is not None and extension() is not None else []

pytestmark = pytest.mark.skipif(
    not ARCHITECTURES or disassembly.find_cuobjdump() is None, reason="needs the compiled extension and cuobjdump"
)


@pytest.mark.parametrize("arch", [80, 86, 89])
def test_gpus_with_int4_tensor_cores_use_them(arch):
    """Without such an instruction ptxas emulates the product, many times slower, and says nothing."""
    if arch not in ARCHITECTURES:
        pytest.skip(f"built for {ARCHITECTURES}")
    found = disassembly.opcodes(FILE, arch)
    assert any(name.startswith(disassembly.INT4_MMA) for name in found)


def test_an_opcode_that_is_not_there_is_not_found():
    found = disassembly.opcodes(FILE, ARCHITECTURES[0])
    assert sum(found.values()) > 10_000
    assert "IMMA.NO.SUCH" not in found
