"""The compiled extension holds the instructions it is meant to; skipped where it is not built, or cannot be read."""

import functools
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


@functools.cache
def opcodes(arch):
    return disassembly.opcodes(FILE, arch)


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [(80, disassembly.INT4_MMA), (86, disassembly.INT4_MMA), (89, disassembly.INT4_MMA), (90, "IGMMA")],
)
def test_integer_products_run_on_tensor_cores(arch, instruction):
    """Without INT4 instructions ptxas emulates the product, many times slower, and says nothing."""
    if arch not in ARCHITECTURES:
        pytest.skip(f"built for {ARCHITECTURES}")
    assert any(name.startswith(instruction) for name in opcodes(arch))


def test_all_of_the_code_is_read():
    found = opcodes(ARCHITECTURES[0])
    assert sum(found.values()) > 10_000
    assert found["EXIT"] > 100  # every kernel ends
