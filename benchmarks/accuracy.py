"""Perplexity of one model at the paper's settings and beyond.

``python benchmarks/accuracy.py MODEL --text FILE --calibration FILE [--settings w4a4kv4-gptq,kv4] [--windows 4]``

Every (setting, seed) is one row of the results file; rows that are there already are skipped, so an interrupted run
continues, unless they say that a default was another one then. The protocol is GPTQ's and the paper's: non-overlapping
windows of 2048 tokens, the remainder dropped.
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
from accuracy_settings import SETTINGS, Setting
from transformers import AutoModelForCausalLM, AutoTokenizer

import quarot
from quarot.evaluation import perplexity
from quarot.evaluation.sharing import options_digest, retarget, shareable, shares_weights, weights_key
from quarot.ops.registry import extension, forces_reference

DEFAULT_OUT = Path(__file__).parent / "results" / "accuracy-smollm2.json"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of the full-precision model")
    parser.add_argument("--text", required=True, help="test text, a file")
    parser.add_argument("--second-text", help="another text, a file, evaluated with the same models")
    parser.add_argument("--second-windows", type=int, default=40, help="windows of it (default 40)")
    parser.add_argument("--calibration", required=True, help="calibration text, a file")
    parser.add_argument(
        "--settings", default=",".join(SETTINGS), help="comma-separated names, of settings or tables (default: all)"
    )
    parser.add_argument("--seeds", type=int, help="seeds 0 .. n-1 for every setting, in place of its own count")
    parser.add_argument("--first-seed", type=int, default=0, help="... or from this one on")
    parser.add_argument("--windows", type=int, help="evaluate only this many windows")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=JSON", help="a field of QuarotConfig, for every setting"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8, help="windows evaluated at once on a GPU")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further setting after this long")
    parser.add_argument("--force", action="store_true", help="measure again what is in the results file")
    options = parser.parse_args()
    tables = {setting.table for setting in SETTINGS.values()}
    unknown = sorted(set(options.settings.split(",")) - set(SETTINGS) - tables)
    if unknown:
        parser.error(f"unknown settings {unknown}; known: {', '.join(sorted(tables))}, {', '.join(SETTINGS)}")
    return options


def fields_of(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """What `quantize_model` is told at one setting, ``--set`` included; None: nothing is quantised."""
    quantize = SETTINGS[name].quantize
    if quantize is None:
        return None
    return {"seed": seed, "calibration_samples": options.samples, **quantize, **_overrides(options)}


def key_of(name: str, seed: int, options: argparse.Namespace) -> str:
    """Equal for runs that share quantised weights."""
    key = weights_key(SETTINGS[name].rotate, fields_of(name, seed, options), seed)
    return key if SETTINGS[name].candidates == 1 else key + name  # a search looks at the bits of activations too


def digest_of(name: str, seed: int, options: argparse.Namespace) -> str:
    """Equal for rows that measured the same: their settings with the defaults of their time."""
    return options_digest(SETTINGS[name].rotate, fields_of(name, seed, options), SETTINGS[name].candidates)


def is_measured(rows: list[dict[str, Any]], wanted: dict[str, Any]) -> bool:
    """Whether a row stands for ``wanted``; rows of a time before they had ``options`` are trusted."""
    same = (row for row in rows if _key(row) == _key(wanted))
    return any(row.get("options", wanted["options"]) == wanted["options"] for row in same)


def quantized(name: str, seed: int, options: argparse.Namespace, tokenizer: Any) -> Any:
    """The model with the weights of one setting; one that shares them is still to be retargeted."""
    setting = SETTINGS[name]

    def load() -> Any:
        dtype = getattr(torch, options.dtype)
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device)

    rotation_seed = seed
    if setting.candidates > 1:
        rotation_seed = _searched(setting, seed, load, options, tokenizer)
    model = load()
    if setting.rotate is not None:
        quarot.rotate_model(model, seed=rotation_seed, progress=False, **setting.rotate)
    if (fields := fields_of(name, seed, options)) is not None:
        text = Path(options.calibration)
        quarot.quantize_model(model, tokenizer=tokenizer, calibration=text, progress=False, **shareable(fields))
    return model


def _searched(setting: Setting, seed: int, load: Any, options: argparse.Namespace, tokenizer: Any) -> int:
    """The best of the candidates that belong to this seed."""
    bits = {name: value for name, value in (setting.quantize or {}).items() if name.endswith("bits")}
    best, found = quarot.search_seed(
        load,
        range(seed * setting.candidates, (seed + 1) * setting.candidates),
        quarot.QuarotConfig(**bits),
        tokenizer=tokenizer,
        calibration=Path(options.calibration),
        progress=False,
        **(setting.rotate or {}),
    )
    print("perplexities by seed:", {candidate: round(ppl, 2) for candidate, ppl in found.items()}, flush=True)
    return best


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    pairs = (entry.partition("=") for entry in options.set)
    return {name: json.loads(value) for name, _, value in pairs}


def row_of(
    name: str, seed: int, model: Any, file: str, windows: int | None, options: argparse.Namespace, tokenizer: Any
) -> dict[str, Any]:
    """Measure one setting on one text."""
    start = time.time()
    batch = options.batch if options.device.startswith("cuda") else 1
    text = Path(file).read_text(encoding="utf-8")
    result = perplexity(model, tokenizer, text, max_windows=windows, batch_size=batch, progress=False)
    return {
        "table": SETTINGS[name].table,
        "setting": name,
        "seed": seed,
        "ppl": round(result.ppl, 4),
        "windows": result.windows,
        "text": Path(file).name,
        **_extra(options),
        "options": digest_of(name, seed, options),
        "backend": backend_of(options),
        "eval_s": round(time.time() - start, 1),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _extra(options: argparse.Namespace) -> dict[str, Any]:
    """What a row says besides its setting, where it is not the usual."""
    fields = {"fields": _overrides(options)} if options.set else {}
    return {**fields, **({"samples": options.samples} if options.samples != 128 else {})}


def backend_of(options: argparse.Namespace) -> str:
    """Which ops ran: the CUDA kernels, or the references in plain PyTorch (``QUAROT_BACKEND=reference``)."""
    reference = not options.device.startswith("cuda") or forces_reference() or extension() is None
    return "reference" if reference else "cuda"


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    fields = json.dumps(row.get("fields"), sort_keys=True)
    return row["setting"], row["seed"], row["windows"], row.get("text"), fields, row.get("samples", 128)


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


def runs(options: argparse.Namespace) -> list[tuple[str, int]]:
    """(setting, seed) in the order asked for, except that runs which share weights follow each other."""
    first, wanted = options.first_seed, options.settings.split(",")
    names = dict.fromkeys(n for w in wanted for n in ([w] if w in SETTINGS else _of_table(w)))
    asked = [(n, seed) for n in names for seed in range(first, first + (options.seeds or SETTINGS[n].seeds))]
    place: dict[str, int] = {}
    for index, run in enumerate(asked):
        place.setdefault(key_of(*run, options), index)
    return sorted(asked, key=lambda run: place[key_of(*run, options)])


def _of_table(table: str) -> list[str]:
    return [name for name, setting in SETTINGS.items() if setting.table == table]


def main() -> int:
    """Measure what is missing."""
    options = arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    tokens = len(tokenizer(Path(options.text).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    windows = min(tokens // 2048, options.windows or tokens)
    begin = time.time()
    kept: tuple[str | None, Any] = (None, None)
    for name, seed in runs(options):
        wanted = {"setting": name, "seed": seed, "windows": windows, "text": Path(options.text).name, **_extra(options)}
        wanted["options"] = digest_of(name, seed, options)
        if not options.force and is_measured(rows, wanted):
            continue
        if time.time() - begin > options.seconds:
            print(f"stopped before {name} seed {seed}: {options.seconds:g} s are over")
            return 1
        start, key, fields = time.time(), key_of(name, seed, options), fields_of(name, seed, options)
        if key != kept[0]:
            kept = (key, quantized(name, seed, options, tokenizer))
        if fields is not None and shares_weights(fields):
            retarget(kept[1], fields)
        model = kept[1]
        prepared = time.time() - start
        texts = [(options.text, options.windows)]
        texts += [(options.second_text, options.second_windows)] if options.second_text else []
        for file, count in texts:
            row = {**row_of(name, seed, model, file, count, options, tokenizer), "quantize_s": round(prepared, 1)}
            rows = [old for old in rows if _key(old) != _key(row)] + [row]
            write(rows, options.out)
            spent = f"{prepared:.1f} s + {row['eval_s']} s"
            print(f"{name:28s} seed {seed}  ppl {row['ppl']:10.4f}  {spent}  {row['text']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
