"""Perplexity of one model at the paper's settings and beyond.

``python benchmarks/accuracy.py MODEL --text FILE --calibration FILE [--settings w4a4kv4-gptq,kv4] [--windows 4]``

Every (setting, seed) is one row of the results file; rows that are there already are skipped, so an interrupted run
continues. The protocol is GPTQ's and the paper's: non-overlapping windows of 2048 tokens, the remainder dropped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accuracy_settings import SETTINGS
from transformers import AutoModelForCausalLM, AutoTokenizer

import quarot
from quarot.evaluation import perplexity

DEFAULT_OUT = Path(__file__).parent / "results" / "accuracy-smollm2.json"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of the full-precision model")
    parser.add_argument("--text", required=True, help="test text, a file")
    parser.add_argument("--calibration", required=True, help="calibration text, a file")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated names (default: all)")
    parser.add_argument("--seeds", type=int, help="seeds 0 .. n-1 for every setting, in place of its own count")
    parser.add_argument("--windows", type=int, help="evaluate only this many windows")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8, help="windows evaluated at once on a GPU")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further setting after this long")
    parser.add_argument("--force", action="store_true", help="measure again what is in the results file")
    options = parser.parse_args()
    unknown = sorted(set(options.settings.split(",")) - set(SETTINGS))
    if unknown:
        parser.error(f"unknown settings {unknown}; known: {', '.join(SETTINGS)}")
    return options


def quantized(name: str, seed: int, options: argparse.Namespace, tokenizer: Any) -> Any:
    """The model at one setting."""
    setting = SETTINGS[name]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).to(options.device)
    if setting.rotate is not None:
        quarot.rotate_model(model, seed=seed, progress=False, **setting.rotate)
    if setting.quantize is not None:
        fields = {"seed": seed, "calibration_samples": options.samples, **setting.quantize}
        quarot.quantize_model(
            model, tokenizer=tokenizer, calibration=Path(options.calibration), progress=False, **fields
        )
    return model


def measure(name: str, seed: int, options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """One row."""
    start = time.time()
    model = quantized(name, seed, options, tokenizer)
    prepared = time.time()
    batch = options.batch if options.device.startswith("cuda") else 1
    text = Path(options.text).read_text(encoding="utf-8")
    result = perplexity(model, tokenizer, text, max_windows=options.windows, batch_size=batch, progress=False)
    return {
        "table": SETTINGS[name].table,
        "setting": name,
        "seed": seed,
        "ppl": round(result.ppl, 4),
        "windows": result.windows,
        "text": Path(options.text).name,
        "quantize_s": round(prepared - start, 1),
        "eval_s": round(time.time() - prepared, 1),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["setting"], row["seed"], row["windows"], row.get("text")


def _commit() -> str | None:
    if "QUAROT_COMMIT" in os.environ:
        return os.environ["QUAROT_COMMIT"]
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return found.stdout.strip() or None


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Replace the results file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    os.replace(temporary, path)


def main() -> int:
    """Measure what is missing."""
    options = arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    tokens = len(tokenizer(Path(options.text).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    windows = min(tokens // 2048, options.windows or tokens)
    start = time.time()
    for name in options.settings.split(","):
        for seed in range(options.seeds or SETTINGS[name].seeds):
            key = (name, seed, windows, Path(options.text).name)
            if time.time() - start > options.seconds:
                print(f"stopped before {name} seed {seed}: {options.seconds:g} s are over")
                return 1
            if not options.force and any(_key(row) == key for row in rows):
                continue
            row = measure(name, seed, options, tokenizer)
            rows = [old for old in rows if _key(old) != _key(row)] + [row]
            write(rows, options.out)
            print(
                f"{name:28s} seed {seed}  ppl {row['ppl']:10.4f}  {row['quantize_s']}s + {row['eval_s']}s", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
