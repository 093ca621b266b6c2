"""Time a model against transformers in full precision: prefill, decode and memory, of one block and of the whole model.

quarot bench llama-2-7b --out bench            (random weights; tables 16 and 17 of the paper, and whole models)
quarot bench llama-2-70b --no-peer --tables decode --batch 1
quarot bench ./llama-w4a4kv4 --quick           (a quantised folder; its peer has random weights of the same sizes)
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quarot.bench.shapes import SHAPES, config_of
from quarot.cli import models
from quarot.writable import check_folder

TABLES = ("block prefill", "block decode", "prefill", "decode")
SIZES = {
    "batch": (1, 4, 16, 32, 64),
    "prompt": (2048,),
    "tokens": (50, 256),
    "contexts": (256, 512, 1024, 2048, 4096),
}
QUICK = {"batch": (1, 16), "prompt": (512,), "tokens": (16,), "contexts": (512,)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"a folder, a hub id, or one of: {', '.join(SHAPES)}")
    models.add_place_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.md, bench.json and bench.png here")
    parser.add_argument("--no-peer", action="store_true", help="measure quarot alone")
    parser.add_argument("--quick", action="store_true", help="few and small sizes")
    group = parser.add_argument_group("sizes (comma-separated; default: the paper's)")
    group.add_argument("--tables", metavar="NAMES", help=f"of: {', '.join(TABLES)} (default all)")
    group.add_argument("--batch", metavar="N,..", help="rows (default 1,4,16,32,64)")
    group.add_argument("--prompt", metavar="N", help="tokens of a prefill, cached ones when decoding (default 2048)")
    group.add_argument("--tokens", metavar="N,..", help="tokens decoded (default 50,256)")
    group.add_argument("--contexts", metavar="N,..", help="cached tokens of block decode (default 256 to 4096)")
    group.add_argument("--layers", type=int, metavar="N", help="decoder layers of the whole model, for large ones")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; the median counts (default 3)")
    group = parser.add_argument_group("recipe of random weights (default W4A4KV4)")
    for letter in "wa":
        group.add_argument(f"--{letter}-bits", type=int, metavar="N")
    group.add_argument("--kv-bits", type=int, metavar="N")


def run(options: argparse.Namespace) -> int:
    sizes = {name: _numbers(options, name) for name in SIZES}
    for name in ("layers", "repeats"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if len(sizes["prompt"]) > 1:
        raise ValueError("--prompt takes one number")
    tables = TABLES if options.tables is None else tuple(name.strip() for name in options.tables.split(","))
    unknown = [name for name in tables if name not in TABLES]
    if unknown:
        raise ValueError(f"--tables: no {unknown[0]!r}; choose from {', '.join(TABLES)}")

    if options.out:
        check_folder(options.out, "--out")

    import torch

    from quarot.bench import compare, measure, report

    device = models.device_of(options)
    automatic = "float16" if device.type == "cuda" else "float32"
    dtype = automatic if options.dtype == "auto" else options.dtype
    makes = _subjects(options, getattr(torch, dtype), device)
    wanted = list(measure.cases(tables, sizes["batch"], sizes["prompt"][0], sizes["tokens"], sizes["contexts"]))
    rows = compare.compare(makes, wanted, options.repeats, device, not options.quiet)
    about = {"model": options.model, "dtype": dtype, **compare.surroundings(device), "layers": options.layers}
    title = f"{options.model} on {about['device']}"
    text = f"{title}; random or given weights; {dtype} peer: transformers {about['transformers']}, sdpa\n\n"
    text += report.markdown(rows, dtype)
    print(text)
    if options.out is not None:
        _write(options.out, text, {**about, "rows": rows}, lambda file: report.plot(rows, title, file))
    return 0


def _numbers(options: argparse.Namespace, name: str) -> tuple[int, ...]:
    text = getattr(options, name)
    if text is None:
        return QUICK[name] if options.quick else SIZES[name]
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} {text}: write whole numbers with commas between them") from None
    if min(values) < 1:
        raise ValueError(f"--{name} must be at least 1")
    return values


def _subjects(options: argparse.Namespace, dtype: Any, device: Any) -> dict[str, Callable[[bool], Any]]:
    """How to build quarot's model, from a quantised folder or of random codes, and its peer."""
    from transformers import AutoConfig

    from quarot.bench.compare import EAGER, OURS
    from quarot.bench.subjects import Quantized, Subject, plain
    from quarot.config import QuarotConfig

    path, recorded = None, None
    if options.model in SHAPES:
        whole = config_of(SHAPES[options.model])
    else:
        path = models.checked(models.resolve(options.model))
        whole, recorded = AutoConfig.from_pretrained(path), models.quantization_of(path)
    given = {n: getattr(options, n) for n in ("w_bits", "a_bits", "kv_bits") if getattr(options, n) is not None}
    if recorded is not None and recorded.get("quant_method") == "quarot":
        if given:
            name, value = next(iter(given.items()))
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {value}: {options.model} is quantised already; its own recipe is measured")
        recipe = QuarotConfig.from_dict({**recorded, "overrides": {}})
    else:
        cache = given.pop("kv_bits", 4)
        recipe, path = QuarotConfig(w_method="rtn", k_bits=cache, v_bits=cache, **given), None
    if options.layers is not None:
        whole, path = _resized(whole, options.layers), None
        pairs = itertools.cycle(recipe.kv_bits_by_layer)
        recipe = recipe.replace(kv_bits_by_layer=list(itertools.islice(pairs, options.layers)))
    block = _resized(plain(whole), 1, vocab=32)

    def quarots(is_block: bool) -> Any:
        if path is not None and not is_block:
            return Quantized(models.load(path, options, device=device))
        return Quantized.random_codes(block if is_block else whole, recipe, dtype, device)

    def peers(is_block: bool) -> Any:
        return Subject.random(block if is_block else whole, dtype, device)

    return {OURS: quarots} if options.no_peer else {OURS: quarots, EAGER: peers}


def _resized(config: Any, layers: int, vocab: int | None = None) -> Any:
    """A copy of a configuration with so many layers and rows of the embedding."""
    import copy

    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    if vocab is not None:
        config.vocab_size = vocab
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return config


def _write(folder: Path, text: str, data: dict[str, Any], draw: Callable[[Path], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.md").write_text(text + "\n", encoding="utf-8")
    (folder / "bench.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    try:
        draw(folder / "bench.png")
    except (ImportError, ValueError) as reason:
        print(f"no picture: {reason}", file=sys.stderr)
    print(f"written to {folder}")
