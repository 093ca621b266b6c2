"""Runs the paper's experiments on a model, one row at a time, resumable, and prints the paper's figures beside ours."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quarot.evaluation.paper import Experiment, Table
from quarot.evaluation.perplexity import perplexity

Row = dict[str, Any]


class Reproduction:
    """One table on one model.

    Args:
        name: key of the table, for the rows.
        table: what to run.
        load: makes a fresh full-precision model; called once an experiment and seed.
        tokenizer: of the model.
        text, calibration: evaluation and calibration text.
        out: JSON file of rows; those already in it are not run again.
        windows: evaluate the first ones only.
        samples, length: calibration windows and their length.
        batch_size: windows at once.
        progress: show progress bars.
        tasks: JSON-lines files of a zero-shot table.
        model: its name; rows of other models in ``out`` are left alone.
    """

    def __init__(
        self,
        name: str,
        table: Table,
        load: Callable[[], Any],
        tokenizer: Any,
        text: str,
        calibration: str,
        out: Path,
        *,
        windows: int | None = None,
        window: int = 2048,
        samples: int = 128,
        length: int = 2048,
        batch_size: int = 1,
        progress: bool = True,
        tasks: dict[str, Path] | None = None,
        model: str = "",
    ) -> None:
        self.name, self.table, self.load, self.tokenizer = name, table, load, tokenizer
        self.text, self.calibration, self.out = text, calibration, out
        self.windows, self.window, self.samples, self.length = windows, window, samples, length
        self.batch_size, self.progress, self.tasks = batch_size, progress, tasks
        self.common: Row = {
            "table": name, "model": model, "text": _digest(text), "calibration": _digest(calibration),
            "window": window, "windows_asked": windows, "samples": samples, "length": length,
        }  # fmt: skip
        self.rows: list[Row] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []

    def run(self, seeds: int = 1) -> list[Row]:
        """Run what is missing; each row is saved as soon as it is measured. Returns the rows of these settings."""
        for experiment in self.table.experiments:
            for seed in range(seeds if experiment.random else 1):
                key = self._key(experiment, seed)
                if not any(_matches(row, key) for row in self.rows):
                    if self.progress:
                        print(f"{self.name}: {experiment.setting}, seed {seed}", flush=True)
                    self.rows.append({**key, **self._measure(experiment, seed), "date": _now()})
                    self._save()
        return [row for row in self.rows if _matches(row, self.common)]

    def _key(self, experiment: Experiment, seed: int) -> Row:
        """Everything that a row's figures depend on."""
        return {"setting": experiment.setting, "seed": seed, **self.common}

    def _measure(self, experiment: Experiment, seed: int) -> Row:
        """The figures of one row, or why there are none: a setting that does not fit the model is skipped."""
        import quarot

        model = self.load()
        try:
            if experiment.rotate is not None:
                quarot.rotate_model(model, seed=seed, progress=self.progress, **experiment.rotate)
            if experiment.quantize is not None:
                size = {"calibration_samples": self.samples, "calibration_length": self.length, "seed": seed}
                quarot.quantize_model(
                    model,
                    tokenizer=self.tokenizer,
                    calibration=self.calibration,
                    progress=self.progress,
                    **{**size, **experiment.quantize},
                )
        except (ValueError, NotImplementedError) as error:
            return {"ppl": None, "skipped": " ".join(str(error).split())}
        if self.table.zero_shot:
            from quarot.evaluation.zero_shot import zero_shot

            scores = zero_shot(model, self.tokenizer, self.tasks or {}, batch_size=self.batch_size)
            return {"ppl": None, "tasks": scores}
        try:
            result = perplexity(
                model,
                self.tokenizer,
                self.text,
                window=self.window,
                max_windows=self.windows,
                batch_size=self.batch_size,
                progress=self.progress,
            )
        except FloatingPointError as error:
            return {"ppl": None, "skipped": f"the loss is not finite: {error}"}
        return {"ppl": result.ppl, "windows": result.windows, "seconds": round(result.seconds, 1)}

    def _save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.out.with_name(self.out.name + ".tmp")
        temporary.write_text("[\n" + ",\n".join(json.dumps(row) for row in self.rows) + "\n]\n", encoding="utf-8")
        os.replace(temporary, self.out)


def markdown(name: str, table: Table, rows: list[Row], model: str | None) -> str:
    """The table: ours (mean over seeds, and their range), the paper's where it has this model, and what was skipped."""
    lines = [f"### {table.title}", ""]
    tasks = sorted({task for row in rows for task in row.get("tasks", {})})
    if table.zero_shot:
        lines += ["| setting | " + " | ".join(tasks) + " | average |", "|---|" + "---|" * (len(tasks) + 1)]
    else:
        lines += ["| setting | perplexity | seeds | range | paper |", "|---|---|---|---|---|"]
    for experiment in table.experiments:
        mine = [row for row in rows if row["table"] == name and row["setting"] == experiment.setting]
        if not mine:
            continue
        if "skipped" in mine[-1]:
            lines.append(f"| {experiment.setting} | skipped: {mine[-1]['skipped']} |")
        elif table.zero_shot:
            scores = [mine[-1]["tasks"][task] for task in tasks]
            values = [100 * score.get("acc_norm", score["acc"]) for score in scores]
            shown = [*values, sum(values) / max(len(values), 1)]
            lines.append(f"| {experiment.setting} | " + " | ".join(f"{value:.2f}" for value in shown) + " |")
        else:
            values = [row["ppl"] for row in mine if row.get("ppl") is not None]
            spread = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""
            paper = experiment.paper.get(model or "", math.nan)
            shown_paper = "" if math.isnan(paper) else f"{paper:.2f}"
            mean = sum(values) / len(values)
            lines.append(f"| {experiment.setting} | {mean:.4g} | {len(values)} | {spread} | {shown_paper} |")
    return "\n".join(lines)


def _matches(row: Row, key: Row) -> bool:
    return all(row.get(name) == value for name, value in key.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
