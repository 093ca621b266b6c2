"""Run the paper's accuracy experiments on any model.

  quarot reproduce --list
  quarot reproduce kv --model smollm2 --text wiki.test.raw --calibration wiki.valid.raw --out results
  quarot reproduce main --model meta-llama/Llama-2-7b-hf --seeds 3 --out results
  quarot reproduce all --model smollm2 --tasks piqa.jsonl,winogrande.jsonl --out results

`all` runs every table, `main,kv` these two, and what tables have in common once. Each row is saved to OUT/TABLE.json as
soon as it is measured; the same command continues where it stopped. OUT/TABLE.md has the paper's figures beside ours
where the model is one of the paper's.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from quarot.cli import models
from quarot.writable import check_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", nargs="?", help="all, or one or more (a,b) that --list shows")
    parser.add_argument("--list", action="store_true", help="list the tables and stop")
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help="hub id, folder, or smollm2 (default)")
    models.add_place_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="(default results)")
    parser.add_argument("--text", default="wikitext2", metavar="TEXT", help="wikitext2 (default), pydoc or a file")
    parser.add_argument("--calibration", default="wikitext2", metavar="TEXT", help="likewise; its training part")
    parser.add_argument("--tasks", metavar="NAME=FILE,...", help="files of a zero-shot table")
    parser.add_argument("--limit", type=int, metavar="N", help="questions of each task (default all)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds a random setting (default 1)")
    parser.add_argument("--windows", type=int, metavar="N", help="evaluate on the first N windows only")
    parser.add_argument("--window", type=int, default=2048, metavar="N", help="tokens a window (default 2048)")
    parser.add_argument("--samples", type=int, default=128, metavar="N", help="calibration windows (default 128)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens in each (default 2048)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="windows at once (default 8 on a GPU, else 1)")


def run(options: argparse.Namespace) -> int:
    from quarot.evaluation.paper import TABLES, paper_model

    if options.list or options.table is None:
        for name, table in TABLES.items():
            print(f"{name:18} {table.title} ({len(table.experiments)} settings)")
        return 0
    names = list(TABLES) if options.table == "all" else options.table.split(",")
    if unknown := [name for name in names if name not in TABLES]:
        raise ValueError(f"no table {unknown[0]!r}; choose from {', '.join(TABLES)}, all")
    tables = _runnable({name: TABLES[name] for name in names}, options)

    check_folder(options.out, "--out")

    from quarot.evaluation import load_text
    from quarot.evaluation.reproduce import Reproduction
    from quarot.evaluation.reproduced_table import markdown
    from quarot.evaluation.zero_shot import parse_tasks

    path = models.resolve(options.model)
    _check_original(path)
    tasks = parse_tasks(options.tasks) if options.tasks else None
    text, calibration = load_text(options.text), load_text(options.calibration, "train")
    reproduction = Reproduction(
        tables,
        lambda: models.load(path, options),
        models.load_tokenizer(path),
        text,
        calibration,
        options.out,
        windows=options.windows,
        window=options.window,
        samples=options.samples,
        length=options.length,
        batch_size=_batch_size(options),
        progress=not options.quiet,
        tasks=tasks,
        limit=options.limit,
        model=options.model,
    )
    measured = reproduction.run(options.seeds)
    for name, rows in measured.items():
        shown = markdown(name, tables[name], rows, paper_model(options.model))
        (options.out / f"{name}.md").write_text(shown + "\n", encoding="utf-8")
        print(shown + "\n")
    reasons = [row.get("skipped") for rows in measured.values() for row in rows]
    if reasons and all(reasons):
        raise ValueError(f"no setting could be measured: {reasons[0]}")
    return 0


def _batch_size(options: argparse.Namespace) -> int:
    if options.batch_size is not None:
        return int(options.batch_size)
    return 8 if models.device_of(options).type == "cuda" else 1


def _check_original(path: str) -> None:
    """Raise ValueError for a quantised model: its settings would all be skipped."""
    method = (models.quantization_of(models.checked(path)) or {}).get("quant_method")
    if method is not None:
        raise ValueError(f"{path} is quantised by {method!r}; the experiments start from the original model")


def _runnable(tables: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The tables that can be run here; of several, those that cannot are left out with a reason.

    Raises:
        ValueError: the only table cannot be run.
    """
    reason = None
    if not options.tasks:
        reason = "a zero-shot table needs its questions: --tasks piqa=piqa.jsonl,arc_easy=arc_easy.jsonl,..."
    elif importlib.util.find_spec("lm_eval") is None:
        reason = "zero-shot tasks need lm-eval: pip install lm-eval"
    left = {name: table for name, table in tables.items() if reason is None or not table.zero_shot}
    if not left:
        raise ValueError(reason)
    for name in sorted(set(tables) - set(left)):
        print(f"{name}: skipped: {reason}")
    return left
