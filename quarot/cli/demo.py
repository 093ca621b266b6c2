"""The whole job on a real model: rotate, quantise, save, reload, evaluate, generate.

Without arguments: SmolLM2-135M from PyPI, the paper's W4A4KV4 GPTQ recipe, sized to the machine: minutes on two
processor cores, the full protocol (WikiText-2, 128 calibration windows of 2048) on a GPU where the hub can be reached.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quarot.cli import models, recipe
from quarot.cli.generate import continue_text

PROMPT = "The capital of France is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help="default smollm2")
    models.add_place_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the quantised model here")
    parser.add_argument(
        "--text", metavar="TEXT", help="wikitext2, pydoc or a file (default wikitext2; without a hub pydoc)"
    )
    parser.add_argument("--windows", type=int, metavar="N", help="evaluation windows of 2048 tokens")
    parser.add_argument("--prompt", default=PROMPT, help=f"(default {PROMPT!r})")
    recipe.add_recipe_arguments(parser)
    parser.set_defaults(calibration=None)


def run(options: argparse.Namespace) -> int:
    start = time.monotonic()
    device = models.device_of(options)
    small = device.type == "cpu"
    if small:
        # A 2048-token window of this model takes a processor a dozen seconds; short calibration windows cost least.
        options.samples, options.length = options.samples or 16, options.length or 512
        options.windows = options.windows or 3
    config = recipe.config_of(options)
    evaluation, calibration = _texts(options)
    path = models.resolve(options.model)
    model, tokenizer = models.load(path, options), models.load_tokenizer(path)

    rows = [_row("full precision", model, tokenizer, evaluation, options)]
    import quarot

    plan = recipe.rotate(model, options)
    if plan is not None:
        print(plan.describe())
    quarot.quantize_model(model, config, tokenizer=tokenizer, calibration=calibration, progress=not options.quiet)
    with tempfile.TemporaryDirectory(prefix="quarot-demo-") as temporary:
        folder = options.out or Path(temporary) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        model = models.load(str(folder), options)
        rows.append(_row(name_of(config), model, tokenizer, evaluation, options))
    _print(rows, options, time.monotonic() - start)
    return 0


def name_of(config: Any) -> str:
    """``W4A4KV4 GPTQ``."""
    kv = f"KV{config.k_bits}" if config.k_bits == config.v_bits else f"K{config.k_bits}V{config.v_bits}"
    return f"W{config.w_bits}A{config.a_bits}{kv} {config.w_method.upper()}"


@dataclass(frozen=True)
class Row:
    """One line of the result: sizes in bytes, perplexity over so many windows, the prompt's continuation."""

    name: str
    weights: int
    layers: int
    ppl: float
    windows: int
    text: str


def _row(name: str, model: Any, tokenizer: Any, text: str, options: argparse.Namespace) -> Row:
    from quarot.evaluation import perplexity

    sizes = models.weight_bytes(model), models.weight_bytes(model, layers_only=True)
    result = perplexity(model, tokenizer, text, max_windows=options.windows, progress=not options.quiet)
    continuation = continue_text(model, tokenizer, options.prompt, max_new_tokens=24)
    return Row(name, *sizes, result.ppl, result.windows, continuation)


def _texts(options: argparse.Namespace) -> tuple[str, str]:
    """Evaluation and calibration text, disjoint, and a line that says which."""
    from quarot.evaluation import load_text
    from quarot.evaluation.texts import DATASETS, hub_reachable

    source = options.text or ("wikitext2" if hub_reachable() else "pydoc")
    if not options.text and source == "pydoc":
        print(
            "The Hugging Face hub cannot be reached: the text is CPython's own help topics (pydoc), not WikiText-2;\n"
            "its perplexities compare with each other only. Pass --text FILE for a text of yours."
        )
    evaluation = load_text(source)
    other = options.calibration or (source if source in DATASETS else "pydoc")
    calibration = load_text(other, "train")
    print(f"evaluated on {source}, calibrated on {other}" + (", another part" if other == source else ""))
    return evaluation, calibration


def _print(rows: list[Row], options: argparse.Namespace, seconds: float) -> None:
    print(f"\n{'model':18} {'weights':>10} {'of which layers':>16} {'perplexity':>11}")
    for row in rows:
        sizes = f"{models.megabytes(row.weights):>10} {models.megabytes(row.layers):>16}"
        print(f"{row.name:18} {sizes} {row.ppl:11.3f}")
    print(f"({rows[0].windows} windows of 2048 tokens; the second row was saved and loaded again;")
    print(" embeddings and head are not quantised, and a rotated model keeps them apart)\n")
    for row in rows:
        print(f"{row.name}: {options.prompt}{row.text}")
    print(f"\ndone in {seconds:.0f} s" + (f"; model in {options.out}" if options.out else ""))
