"""Zero-shot accuracy (paper, section 5) by lm-eval, on local JSON-lines files, without a network.

Two kinds of files, told apart by their fields: multiple choice (``query``, ``choices``, ``gold``) and LAMBADA
(``text``, whose last word is the target). In a task named winogrande, the choice fills the blank ``_`` of the query,
and the likelihood of what follows it is compared.
"""

from __future__ import annotations

import gzip
import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from quarot.evaluation.likelihoods import likelihoods
from quarot.evaluation.perplexity import check_at_least_1

PREFIX = {
    "arc_easy": "Question: {q}\nAnswer:",
    "arc_challenge": "Question: {q}\nAnswer:",
    "piqa": "Question: {q}\nAnswer:",
}
"""How lm-eval's own tasks of these names word the question."""


def parse_tasks(text: str) -> dict[str, Path]:
    """``"piqa=a.jsonl,lambada=b.jsonl.gz"`` -> files by name; a bare file's name is its stem.

    Raises:
        ValueError: no such file, or a name used twice.
    """
    tasks: dict[str, Path] = {}
    for entry in text.split(","):
        name, equals, file = entry.partition("=")
        path = Path(file if equals else name)
        key = name if equals else path.name.split(".")[0]
        if not path.is_file():
            raise ValueError(f"task {key!r}: no file {path}")
        if key in tasks:
            raise ValueError(f"task {key!r} is given twice")
        tasks[key] = path
    return tasks


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``.jsonl`` or ``.jsonl.gz`` file.

    Raises:
        ValueError: not JSON lines, rows of neither kind or of both, or a question without an answer, with the line.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    rows = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                rows.append(_row(line, f"{path}:{number}"))
                if _is_text(rows[-1]) != _is_text(rows[0]):
                    raise ValueError(f"{path}:{number}: rows with a text and rows with choices do not mix")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be read behind line {len(rows)}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no questions")
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    """A line of a task file, whatever is wrong with it told now: a wrong ``gold`` would only lower the accuracy."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict) or not (_is_text(row) or {"query", "choices", "gold"} <= set(row)):
        raise ValueError(f"{where} has neither text nor query, choices and gold")
    if _is_text(row):
        _last_word(row["text"], where)
        return row
    query, choices, gold = row["query"], row["choices"], row["gold"]
    if not isinstance(query, str):
        raise ValueError(f"{where}: query {query!r} is no text")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise ValueError(f"{where}: choices {choices!r} must be a list of two texts or more, none of them empty")
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(f"{where}: gold {gold!r} must be the place of the right choice, 0 to {len(choices) - 1}")
    return row


def _is_text(row: dict[str, Any]) -> bool:
    return isinstance(row.get("text"), str)


def _last_word(text: str, where: str) -> tuple[str, str]:
    """What stands in front of the last space of a LAMBADA text, and behind."""
    context, _, target = text.rpartition(" ")
    if not context or not target:
        raise ValueError(f"{where}: text {text!r} needs a last word, and a space and some words before it")
    return context, target


def requests(name: str, row: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """The (context, continuation) pairs of one question, and which is right.

    Raises:
        ValueError: a ``text`` that is not some words and a last one, or a winogrande question without its blank.
    """
    if _is_text(row):
        context, target = _last_word(row["text"], name)
        return [(context, " " + target)], 0
    query, choices = row["query"], row["choices"]
    if name.startswith("winogrande"):
        if query.count("_") != 1:
            raise ValueError(f"{name}: query {query!r} needs one blank, _, for the choices to fill")
        head, tail = query.split("_")
        return [(head + choice, " " + tail.strip()) for choice in choices], row["gold"]
    context = PREFIX.get(next((key for key in PREFIX if name.startswith(key)), ""), "{q}").format(q=query)
    return [(context, " " + choice.lstrip()) for choice in choices], row["gold"]


def zero_shot(
    model: Any, tokenizer: Any, tasks: dict[str, Path], *, batch_size: int = 1, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Accuracies by task and metric: ``acc``, and ``acc_norm`` (per byte of the choice) for multiple choice.

    Requests are tokenised by lm-eval's ``HFLM``, and scored as there (:mod:`quarot.evaluation.likelihoods`).

    Raises:
        ImportError: lm-eval is missing, with what to install.
        ValueError: damaged task files, or a batch_size or limit below 1.
    """
    check_at_least_1(batch_size=batch_size, limit=limit)
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        raise ImportError("zero-shot tasks need lm-eval: pip install lm-eval") from None
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=2048)
    sizes = {"batch_size": batch_size, "max_length": harness.max_length, "device": harness.device}
    harness._loglikelihood_tokens = partial(likelihoods, harness._model_call, **sizes)
    scores = {}
    # Without a cache the attention function quantises every key and value, as the paper's simulation does; with one, a
    # prompt attends to its own unquantised ones and the cache's bits would not count.
    cached, model.config.use_cache = model.config.use_cache, False
    try:
        for name, path in tasks.items():
            questions = [requests(name, row) for row in read_rows(path)[:limit]]
            pairs = [pair for several, _ in questions for pair in several]
            instances = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
            scores[name] = score(questions, harness.loglikelihood(instances))
    finally:
        model.config.use_cache = cached
    return scores


def score(questions: list[tuple[list[tuple[str, str]], int]], answers: list[tuple[float, bool]]) -> dict[str, float]:
    """Accuracies from the (log-likelihood, is greedy) of every pair, in order."""
    right = normalised = position = 0
    several = any(len(pairs) > 1 for pairs, _ in questions)
    for pairs, gold in questions:
        mine = answers[position : position + len(pairs)]
        position += len(pairs)
        if len(pairs) == 1:
            right += bool(mine[0][1])
            continue
        values = [likelihood for likelihood, _ in mine]
        per_byte = [v / len(pair[1].strip().encode()) for v, pair in zip(values, pairs, strict=True)]
        right += values.index(max(values)) == gold
        normalised += per_byte.index(max(per_byte)) == gold
    result = {"acc": right / len(questions)}
    return {**result, "acc_norm": normalised / len(questions)} if several else result
