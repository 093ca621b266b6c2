"""Describe a saved model: bits, rotations, tensors and sizes, without loading it."""

from __future__ import annotations

import argparse
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from quarot.cli import models

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
            print(f"  {name} = {value}")
    if quantization.get("rotation"):
        from quarot.rotation.plan import RotationPlan

        print(RotationPlan.from_dict(quantization["rotation"]).describe())
    return 0


def describe(folder: Path) -> dict[str, Any]:
    """Facts about a checkpoint from config.json and the headers of its safetensors files.

    Raises:
        ValueError: no model there, or a damaged file.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json: not a saved model")
    config = json.loads(file.read_text(encoding="utf-8"))
    sizes: Counter[str] = Counter()
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        for dtype, shape in read_header(path):
            items = 1
            for width in shape:
                items *= width
            sizes[dtype] += items * _ITEM_BYTES.get(dtype, 1)
            count += 1
    return {
        "folder": str(folder),
        "model_type": config.get("model_type"),
        "bytes": sum(sizes.values()),
        "tensors": count,
        "bytes_by_dtype": dict(sizes.most_common()),
        "quantization": config.get("quantization_config"),
    }


def read_header(path: Path) -> list[tuple[str, list[int]]]:
    """(dtype, shape) of every tensor of a safetensors file, from its header alone.

    Raises:
        ValueError: truncated or damaged.
    """
    with path.open("rb") as file:
        start = file.read(8)
        size = path.stat().st_size
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise ValueError(f"{path} is damaged: no safetensors header")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path} is damaged: its safetensors header is not JSON") from None
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    end = max((entry["data_offsets"][1] for entry in tensors), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{path} is truncated: {size} bytes, its header speaks of {8 + length + end}")
    return [(entry["dtype"], entry["shape"]) for entry in tensors]
