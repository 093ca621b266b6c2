"""Instructions of the compiled kernels: ``python -m build_cuda.disassembly [FILE] [--arch 80] [--pattern IMMA]``.

FILE is an object or the extension module (default: the one beside quarot's Python files). An architecture whose tensor
cores multiply INT4 shows ``IMMA.16864.S4.S4`` (with ``.SAT``); elsewhere ptxas writes many other instructions instead.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from .toolkit import BuildError

INT4_MMA = "IMMA.16864.S4.S4"
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)")


def find_cuobjdump() -> str | None:
    """The CUDA toolkit's disassembler, or None."""
    return shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")


def opcodes(file: Path, arch: int) -> Counter[str]:
    """How often each opcode occurs in the machine code of ``file`` for compute capability ``arch`` / 10.

    Raises:
        BuildError: no cuobjdump, or it cannot read the file.
    """
    tool = find_cuobjdump()
    if tool is None:
        raise BuildError("no cuobjdump on PATH or in /usr/local/cuda; it comes with the CUDA toolkit")
    name = f"sm_{arch}a" if arch == 90 else f"sm_{arch}"
    run = subprocess.Popen([tool, "-sass", "-arch", name, str(file)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    found = Counter(match[1] for line in run.stdout if (match := _OPCODE.match(line)))
    if run.wait():
        raise BuildError(f"{tool} cannot disassemble {file}")
    return found


def extension_file() -> Path | None:
    """quarot/_C*.so of this checkout, or None."""
    return next(iter(sorted((Path(__file__).resolve().parent.parent / "quarot").glob("_C*.so"))), None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m build_cuda.disassembly", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=extension_file())
    parser.add_argument("--arch", type=int, default=80)
    parser.add_argument("--pattern", default="IMMA", help="opcodes that begin so")
    options = parser.parse_args()
    try:
        if options.file is None:
            raise BuildError("no extension in quarot/; build it with: python -m build_cuda")
        found = opcodes(options.file, options.arch)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen = {name: count for name, count in sorted(found.items()) if name.startswith(options.pattern)}
    print("\n".join(f"{count:8d} {name}" for name, count in chosen.items()) or f"none of {sum(found.values())} opcodes")
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
