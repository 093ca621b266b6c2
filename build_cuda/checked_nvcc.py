"""Runs one nvcc compile and refuses objects that would be slow without anyone noticing.

ptxas messages C7510, C7512, C7513 and C7514 mean that wgmma instructions were serialised (a Hopper GEMM several times
slower): always an error. Register spills are an error under ``--strict`` and a warning otherwise, except in a file that
says ``// spills: <reason>``; a user's newer nvcc may allocate differently, and a working install beats none.

Usage: python checked_nvcc.py [--strict] SOURCE OBJECT nvcc ARGUMENTS...
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_SERIALISED = re.compile(r"\bC75(?:10|12|13|14)\b")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_RESOURCE_LINE = re.compile(r"ptxas info|bytes stack frame|Function properties|^\s*$|Compiling entry function")

_LONGEST_LINE = 600


def spills(log: str) -> list[str]:
    """``function: n bytes`` of every function in ptxas's -v output that spills."""
    found, function = [], "?"
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            function = match[1]
        elif (match := _SPILL.search(line)) and int(match[2]) + int(match[3]):
            found.append(f"{function}: {match[2]} bytes stored, {match[3]} loaded")
    return found


def serialised(log: str) -> list[str]:
    """The lines with ptxas warnings about serialised wgmma."""
    return [line for line in log.splitlines() if _SERIALISED.search(line)]


def main(arguments: list[str]) -> int:
    strict = arguments[0] == "--strict"
    source, target, *command = arguments[strict:]
    result = subprocess.run(command, capture_output=True, text=True)
    log = result.stdout + result.stderr
    # A CUTLASS type in an error message takes tens of thousands of characters.
    other = "\n".join(line[:_LONGEST_LINE] for line in log.splitlines() if not _RESOURCE_LINE.search(line))
    if other:
        print(other)
    if result.returncode:
        return result.returncode
    failures = [f"{source}: {line}" for line in serialised(log)]
    spilling = spills(log)
    if spilling and "// spills:" not in Path(source).read_text(encoding="utf-8"):
        lines = [f"{source}: register spills in {line}" for line in spilling]
        if strict:
            failures += lines
        else:
            print("\n".join(f"warning: {line}" for line in lines))
    if failures:
        Path(target).unlink(missing_ok=True)
        print("error: " + "\nerror: ".join(failures))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
