"""Compile the extension in place, without installing: ``python -m build_cuda [--objects]``."""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from .architectures import selection
from .compile import compile_extension
from .toolkit import BuildError, find_toolkit


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m build_cuda", description=__doc__)
    parser.add_argument("--objects", action="store_true", help="compile the CUDA objects only, no bindings and no link")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    output = None if arguments.objects else f"quarot/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    try:
        layout = compile_extension(root, find_toolkit(), selection(), output)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"built {output or layout.objects}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
