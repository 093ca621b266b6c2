"""Run the paper's accuracy experiments on any model.

  quarot reproduce --list
  quarot reproduce kv --model smollm2 --text wiki.test.raw --calibration wiki.valid.raw --out results
  quarot reproduce main --model meta-llama/Llama-2-7b-hf --seeds 3 --out results

Each row is saved to OUT/TABLE.json as soon as it is measured; the same command continues where it stopped. OUT/TABLE.md
has the paper's figures beside ours where the model is one of the paper's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quarot.cli import models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", nargs="?", help="see --list")
    parser.add_argument("--list", action="store_true", help="list the tables and stop")
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help="hub id, folder, or smollm2 (default)")
    models.add_place_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="(default results)")
    parser.add_argument("--text", default="wikitext2", metavar="TEXT", help="wikitext2 (default), pydoc or a file")
    parser.add_argument("--calibration", default="wikitext2", metavar="TEXT", help="likewise; its training part")
    parser.add_argument("--tasks", metavar="NAME=FILE,...", help="files of a zero-shot table")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds a random setting (default 1)")
    parser.add_argument("--windows", type=int, metavar="N", help="evaluate on the first N windows only")
    parser.add_argument("--window", type=int, default=2048, metavar="N", help="tokens a window (default 2048)")
    parser.add_argument("--samples", type=int, default=128, metavar="N", help="calibration windows (default 128)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens in each (default 2048)")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="windows at once")


def run(options: argparse.Namespace) -> int:
    from quarot.evaluation.paper import NOT_REPRODUCED, TABLES, paper_model

    if options.list or options.table is None:
        for name, table in TABLES.items():
            print(f"{name:12} {table.title} ({len(table.experiments)} settings)")
        for name, reason in NOT_REPRODUCED.items():
            print(f"not reproduced: {name}: {reason}")
        return 0
    if options.table in NOT_REPRODUCED:
        raise ValueError(NOT_REPRODUCED[options.table])
    if options.table not in TABLES:
        raise ValueError(f"no table {options.table!r}; choose from {', '.join(TABLES)}")
    table = TABLES[options.table]

    from quarot.evaluation import load_text
    from quarot.evaluation.reproduce import Reproduction, markdown
    from quarot.evaluation.zero_shot import parse_tasks

    tasks = parse_tasks(options.tasks) if options.tasks else None
    if table.zero_shot and tasks is None:
        raise ValueError("a zero-shot table needs its questions: --tasks piqa=piqa.jsonl,arc_easy=arc_easy.jsonl,...")
    text, calibration = load_text(options.text), load_text(options.calibration, "train")
    path = models.resolve(options.model)
    reproduction = Reproduction(
        options.table,
        table,
        lambda: models.load(path, options),
        models.load_tokenizer(path),
        text,
        calibration,
        options.out / f"{options.table}.json",
        windows=options.windows,
        window=options.window,
        samples=options.samples,
        length=options.length,
        batch_size=options.batch_size,
        progress=not options.quiet,
        tasks=tasks,
        model=options.model,
    )
    shown = markdown(options.table, table, reproduction.run(options.seeds), paper_model(options.model))
    (options.out / f"{options.table}.md").write_text(shown + "\n", encoding="utf-8")
    print(shown)
    return 0
