"""Describe a saved model: bits, rotations, tensors and sizes, without loading it."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from quarot.cli import models
from quarot.integrations.checkpoint_folder import read_config
from quarot.integrations.safetensors_header import read_header

_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="folder of a saved model, or smollm2")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    facts = describe(Path(models.resolve(options.model)))
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    print(f"{facts['folder']}: {facts['model_type']}, {models.megabytes(facts['bytes'])} in {facts['tensors']} tensors")
    for kind, size in facts["bytes_by_dtype"].items():
        print(f"  {kind:5} {models.megabytes(size)}")
    quantization = facts["quantization"]
    if quantization is None:
        print("not quantised")
        return 0
    print(f"quantised by {quantization.get('quant_method')}:")
    for name, value in quantization.items():
        if name not in ("rotation", "quant_method") and value not in (None, {}, []):
            print(f"  {name} = {_short(value)}")
    if quantization.get("rotation"):
        from quarot.rotation.plan import RotationPlan

        print(RotationPlan.from_dict(quantization["rotation"]).describe())
    return 0


def _short(value: Any) -> str:
    """Values by module name (overrides, experts that had few tokens) counted, where there are many."""
    if not isinstance(value, dict) or len(value) <= _MOST:
        return str(value)
    counts = Counter(json.dumps(one) for one in value.values())
    shown = ", ".join(f"{count} x {one}" for one, count in counts.most_common(_MOST))
    return f"{len(value)} modules: {shown}" + (", .." if len(counts) > _MOST else "")


_MOST = 6


def describe(folder: Path) -> dict[str, Any]:
    """Facts about a checkpoint from config.json and the headers of its safetensors files.

    Raises:
        ValueError: no model there, or a damaged file.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json: not a saved model")
    config = read_config(folder)
    sizes: Counter[str] = Counter()
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        for dtype, shape in read_header(path).values():
            sizes[dtype] += math.prod(shape) * _ITEM_BYTES.get(dtype, 1)
            count += 1
    return {
        "folder": str(folder),
        "model_type": config.get("model_type"),
        "bytes": sum(sizes.values()),
        "tensors": count,
        "bytes_by_dtype": dict(sizes.most_common()),
        "quantization": config.get("quantization_config"),
    }
