"""Perplexity of a model on WikiText-2 or a text file, and zero-shot accuracy.

quarot eval smollm2-w4a4kv4 --text wiki.test.raw
quarot eval meta-llama/Llama-2-7b-hf --dataset wikitext2 --batch-size 4
quarot eval smollm2 --tasks piqa=piqa_valid.jsonl,arc_easy=arc.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quarot.cli import models
from quarot.writable import check_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_model_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--text", metavar="FILE", help="a UTF-8 text file")
    what.add_argument("--dataset", choices=("wikitext2", "pydoc"), help="default wikitext2")
    what.add_argument("--tasks", metavar="NAME=FILE,...", help="zero-shot tasks on JSON-lines files (needs lm-eval)")
    parser.add_argument("--window", type=int, default=2048, metavar="N", help="tokens a window (default 2048)")
    windows = ("--windows", "--max-windows")  # as other commands call it, and as it once was
    parser.add_argument(*windows, dest="max_windows", type=int, metavar="N", help="the first N windows only")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="windows, or questions, at once")
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: the first N questions of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as JSON as well")


def run(options: argparse.Namespace) -> int:
    if options.limit is not None and not options.tasks:
        raise ValueError("--limit goes with --tasks; --windows limits a perplexity")
    if options.json:
        check_file(options.json, "--json")
    result = _tasks(options) if options.tasks else _perplexity(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _perplexity(options: argparse.Namespace) -> dict[str, Any]:
    from quarot.evaluation import load_text, perplexity
    from quarot.evaluation.perplexity import check_sizes

    check_sizes(options.window, options.batch_size, options.max_windows)
    source = options.text or options.dataset or "wikitext2"
    path = models.checked(models.resolve(options.model))
    text = load_text(source)
    model, tokenizer = models.load(path, options), models.load_tokenizer(path)
    result = perplexity(
        model,
        tokenizer,
        text,
        window=options.window,
        max_windows=options.max_windows,
        batch_size=options.batch_size,
        progress=not options.quiet,
    )
    print(f"{options.model} on {source}: {result}")
    return {
        "model": options.model, "text": source, "ppl": result.ppl, "nll": result.nll, "windows": result.windows,
        "tokens": result.tokens, "window": options.window, "seconds": round(result.seconds, 1),
    }  # fmt: skip


def _tasks(options: argparse.Namespace) -> dict[str, Any]:
    from quarot.evaluation.zero_shot import parse_tasks, zero_shot

    path = models.checked(models.resolve(options.model))
    tasks = parse_tasks(options.tasks)
    model, tokenizer = models.load(path, options), models.load_tokenizer(path)
    scores = zero_shot(model, tokenizer, tasks, batch_size=options.batch_size, limit=options.limit)
    for name, score in scores.items():
        print(f"{options.model} {name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in score.items()))
    return {"model": options.model, "tasks": scores}
