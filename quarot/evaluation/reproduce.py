"""Runs the paper's experiments on a model, one row at a time, resumable, each kind of work once.

Rows that differ in run-time settings only share one quantised model (:mod:`quarot.evaluation.sharing`) and follow each
other; a setting that several tables have is measured once; texts are tokenised once.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import quarot
from quarot.evaluation.half_hadamard import half_hadamard
from quarot.evaluation.paper import Experiment, Table
from quarot.evaluation.perplexity import check_at_least_1, check_sizes, encode, perplexity
from quarot.evaluation.residual_stream import residual_bits
from quarot.evaluation.sharing import options_digest, retarget, run_time_of, shareable, shares_weights, weights_key
from quarot.progress import progress_bar

Row = dict[str, Any]

_SKIPPED = (ValueError, NotImplementedError, FloatingPointError)
"""What says that a setting does not fit a model or a text."""


class Reproduction:
    """Tables on one model.

    Args:
        tables: what to run, by name.
        load: makes a fresh full-precision model; called once for each set of weights.
        tokenizer: of the model.
        text, calibration: evaluation and calibration text.
        out: folder; ``TABLE.json`` in it has the rows of a table, and those already in it are not run again, unless
            what a setting stands for has changed since (a default, a preset): then a new row takes the old one's place.
        windows: evaluate the first ones only.
        window: tokens in each.
        samples, length: calibration windows and their length.
        batch_size: windows at once.
        progress: show progress bars.
        tasks: JSON-lines files of zero-shot tables.
        limit: questions of each task; None for all.
        model: its name; rows of other models in ``out`` are left alone.

    Raises:
        ValueError: a size below 1, or a file in ``out`` that does not hold rows.
    """

    def __init__(
        self,
        tables: dict[str, Table],
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
        limit: int | None = None,
        model: str = "",
    ) -> None:
        check_sizes(window, batch_size, windows)
        check_at_least_1(samples=samples, length=length, limit=limit)
        self.tables, self.load, self.tokenizer, self.out = tables, load, tokenizer, out
        self.windows, self.window, self.batch_size, self.progress = windows, window, batch_size, progress
        self.tasks, self.limit = tasks or {}, limit
        self.ids, self.calibration = encode(tokenizer, text), encode(tokenizer, calibration)
        self.sizes = {"calibration_samples": samples, "calibration_length": length}
        self.common: Row = {
            "model": model, "text": _digest(text), "calibration": _digest(calibration),
            "window": window, "windows_asked": windows, "samples": samples, "length": length,
        }  # fmt: skip
        self.rows: dict[str, list[Row]] = {
            name: [row for row in _read(self._file(name)) if not row.get("again")] for name in tables
        }
        self._kept: tuple[str, Any] = ("", None)

    def run(self, seeds: int = 1) -> dict[str, list[Row]]:
        """Run what is missing; each row is saved as soon as it is measured. Returns the rows of these settings."""
        check_at_least_1(seeds=seeds)
        measured: dict[str, Row] = {}
        missing: dict[str, list[tuple[str, Experiment, int]]] = {}
        for name, experiment, seed in self._wanted(seeds):
            found = next((row for row in self.rows[name] if _matches(row, self._key(name, experiment, seed))), None)
            work = self._work(name, experiment, seed)
            if found is None:
                missing.setdefault(work, []).append((name, experiment, seed))
            else:
                measured.setdefault(work, {k: v for k, v in found.items() if k in _FIGURES})
        bar = progress_bar(_by_weights(missing), "rows", self.progress)
        for work in bar:
            name, experiment, seed = missing[work][0]
            figures = measured.get(work)
            if figures is None:
                if self.progress:
                    print(f"{name}: {experiment.setting}, seed {seed}", flush=True)
                figures = self._measure(experiment, seed, self.tables[name].zero_shot)
            for each in missing[work]:
                self._add({**self._key(*each), **figures, "date": _now()}, self._key(*each))
        self._kept = ("", None)
        return {name: [row for row in rows if self._counts(name, row)] for name, rows in self.rows.items()}

    def _add(self, row: Row, key: Row) -> None:
        """Save a row; one of the same setting with other options, measured before a default changed, makes way."""
        name, same = row["table"], {field: value for field, value in key.items() if field != "options"}
        self.rows[name] = [old for old in self.rows[name] if not _matches(old, same)] + [row]
        self._save(name)

    def _counts(self, name: str, row: Row) -> bool:
        """Whether a row is of this model, these texts and sizes, and of what its setting stands for now."""
        options = {experiment.setting: _options(experiment) for experiment in self.tables[name].experiments}
        return _matches(row, self.common) and row.get("options") == options.get(row["setting"])

    def _wanted(self, seeds: int) -> Iterator[tuple[str, Experiment, int]]:
        for name, table in self.tables.items():
            for experiment in table.experiments:
                for seed in range(seeds if experiment.random else 1):
                    yield name, experiment, seed

    def _key(self, name: str, experiment: Experiment, seed: int) -> Row:
        """Everything that a row's figures depend on."""
        asked: Row = {"tasks_asked": sorted(self.tasks), "limit": self.limit} if self.tables[name].zero_shot else {}
        options = _options(experiment)
        return {"table": name, "setting": experiment.setting, "seed": seed, **self.common, **asked, "options": options}

    def _work(self, name: str, experiment: Experiment, seed: int) -> str:
        """Equal for rows with equal figures; starts with what their weights depend on."""
        weights = weights_key(experiment.rotate, experiment.quantize, seed)
        more = [
            run_time_of(experiment.quantize or {}),
            experiment.residual_bits,
            experiment.half_hadamard,
            self.tables[name].zero_shot,
        ]
        return weights + _SEPARATOR + json.dumps(more, sort_keys=True)

    def _measure(self, experiment: Experiment, seed: int, zero_shot: bool) -> Row:
        """The figures of one row, or why there are none: a setting that does not fit model, text or memory is skipped.

        What memory did not suffice for is tried again by the next run, which may have more of it.
        """
        start = time.monotonic()
        try:
            model = self._prepared(experiment, seed)
            prepared = time.monotonic()
            with _at_run_time(model, experiment):
                figures = self._accuracies(model) if zero_shot else self._perplexity(model)
        except _SKIPPED as error:
            return {"ppl": None, "skipped": " ".join(str(error).split())}
        except torch.OutOfMemoryError as error:
            self._kept = ("", None)
            return {"ppl": None, "skipped": " ".join(str(error).split()), "again": True}
        seconds = {"prepare_s": prepared - start, "eval_s": time.monotonic() - prepared}
        return {**figures, **{name: round(value, 1) for name, value in seconds.items()}}

    def _prepared(self, experiment: Experiment, seed: int) -> Any:
        """The model at one setting: the last one with other run-time fields where the weights are the same."""
        fields = experiment.quantize
        key = weights_key(experiment.rotate, fields, seed)
        if self._kept[0] != key:
            self._kept = ("", None)  # frees the memory first
            model = self.load()
            if experiment.rotate is not None:
                quarot.rotate_model(model, seed=seed, progress=self.progress, **experiment.rotate)
            if fields is not None:
                quarot.quantize_model(
                    model,
                    calibration=self.calibration,
                    progress=self.progress,
                    **{**self.sizes, "seed": seed, **shareable(fields)},
                )
            self._kept = (key, model)
        if fields is not None and shares_weights(fields):
            retarget(self._kept[1], fields)
        return self._kept[1]

    def _perplexity(self, model: Any) -> Row:
        sizes: Any = {"window": self.window, "max_windows": self.windows, "batch_size": self.batch_size}
        result = perplexity(model, self.ids, progress=self.progress, **sizes)
        return {"ppl": result.ppl, "windows": result.windows}

    def _accuracies(self, model: Any) -> Row:
        from quarot.evaluation.zero_shot import zero_shot

        scores = zero_shot(model, self.tokenizer, self.tasks, batch_size=self.batch_size, limit=self.limit)
        return {"ppl": None, "tasks": scores}

    def _file(self, name: str) -> Path:
        return self.out / f"{name}.json"

    def _save(self, name: str) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        temporary = self.out / f"{name}.json.tmp"
        temporary.write_text("[\n" + ",\n".join(map(json.dumps, self.rows[name])) + "\n]\n", encoding="utf-8")
        os.replace(temporary, self._file(name))


_SEPARATOR = "\n"
_FIGURES = ("ppl", "windows", "tasks", "skipped", "prepare_s", "eval_s")


def _by_weights(works: dict[str, Any]) -> list[str]:
    """In the order given, except that those which share weights follow each other."""
    place: dict[str, int] = {}
    for index, work in enumerate(works):
        place.setdefault(work.split(_SEPARATOR)[0], index)
    return sorted(works, key=lambda work: place[work.split(_SEPARATOR)[0]])


@contextmanager
def _at_run_time(model: Any, experiment: Experiment) -> Iterator[None]:
    """The experiments that change a model only while it is measured."""
    with ExitStack() as stack:
        if experiment.residual_bits is not None:
            stack.enter_context(residual_bits(model, experiment.residual_bits))
        if experiment.half_hadamard:
            stack.enter_context(half_hadamard(model))
        yield


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away, what it held is measured anew") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a JSON list of rows; move it away, or choose another folder")
    return rows


def _options(experiment: Experiment) -> str:
    """A digest of all that an experiment does to a model, whether it says so or leaves it to a default."""
    return options_digest(experiment.rotate, experiment.quantize, experiment.residual_bits, experiment.half_hadamard)


def _matches(row: Row, key: Row) -> bool:
    return all(row.get(name) == value for name, value in key.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
