"""The one command for a GPU machine: ``python -m benchmarks.run_all`` runs tests/gpu, then every benchmark.

Rows are appended to ``benchmarks/results/<gpu>.json`` as they are measured. Exit status 0 when everything ran.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.report import RESULTS, append, gpu_slug, stamp
from benchmarks.shapes import SHAPES, Options


def names() -> list[str]:
    """The benchmark modules there are: the files of this folder that define ``rows``."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if "\ndef rows(" in file.read_text(encoding="utf-8")]


def run_one(name: str, options: Options, output: Path) -> int:
    """Run one benchmark module and save its rows one by one; returns how many."""
    count = 0
    for row in importlib.import_module(f"benchmarks.{name}").rows(options):
        append([stamp(row)], output)
        count += 1
        sizes = " ".join(f"{key}={row[key]}" for key in ("m", "n", "k") if row.get(key) is not None)
        peer = f" | {row['ratio']:.2f}x {row['peer']}" if row.get("ratio") else ""
        roof = f" | {row['roof_us'] / row['us']:.0%} of roof" if row.get("roof_us") and row.get("us") else ""
        us = f"{row['us']:.2f} us" if row.get("us") is not None else ""
        print(f"{row['op']} {row['model']} {row['layer'] or ''} {sizes} | {us}{roof}{peer}", flush=True)
    return count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_all", description=__doc__)
    parser.add_argument("--ops", help=f"comma-separated benchmarks; all of: {', '.join(names())}")
    parser.add_argument("--models", help=f"comma-separated; known: {', '.join(SHAPES)}")
    parser.add_argument("--quick", action="store_true", help="one model, few sizes")
    parser.add_argument("--no-tests", action="store_true", help="skip tests/gpu")
    parser.add_argument("--output", type=Path, help="results file (default benchmarks/results/<gpu>.json)")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device; the benchmarks need a GPU", file=sys.stderr)
        return 2
    failed: list[str] = []
    if not chosen.no_tests:
        tests = Path(__file__).resolve().parent.parent / "tests" / "gpu"
        if subprocess.run([sys.executable, "-m", "pytest", "-q", str(tests)]).returncode:
            failed.append("tests/gpu")
    options = Options.quickest() if chosen.quick else Options()
    if chosen.models:
        options = Options(tuple(chosen.models.split(",")), options.tokens, options.batches, options.contexts)
    output = chosen.output or RESULTS / f"{gpu_slug(torch.cuda.get_device_name())}.json"
    for name in chosen.ops.split(",") if chosen.ops else names():
        start = time.monotonic()
        try:
            count = run_one(name, options, output)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        else:
            print(f"-- {name}: {count} rows, {time.monotonic() - start:.0f} s", flush=True)
        torch.cuda.empty_cache()
    print(f"rows in {output}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
