"""A reproduced table as Markdown: ours, the paper's figures where it has this model, and what was skipped, and why."""

from __future__ import annotations

from typing import Any

from quarot.evaluation.paper import TASKS, Experiment, Table

Row = dict[str, Any]


def markdown(name: str, table: Table, rows: list[Row], model: str | None) -> str:
    """The table.

    Args:
        name, table: which one.
        rows: of :class:`quarot.evaluation.reproduce.Reproduction`; those of other tables do not count.
        model: the paper's model that they are of, or None.
    """
    mine = [row for row in rows if row["table"] == name]
    grouped = [(e, [row for row in mine if row["setting"] == e.setting]) for e in table.experiments]
    found = [(experiment, group) for experiment, group in grouped if group]
    show = _accuracies if table.zero_shot else _perplexities
    return "\n".join([f"### {table.title}", "", *show(found, model)])


def _perplexities(found: list[tuple[Experiment, list[Row]]], model: str | None) -> list[str]:
    lines = ["| setting | perplexity | seeds | range | windows | paper |", "|---|---|---|---|---|---|"]
    for experiment, rows in found:
        values = [row["ppl"] for row in rows if row.get("ppl") is not None]
        if not values:
            lines.append(f"| {experiment.setting} | skipped: {rows[-1]['skipped']} |")
            continue
        spread = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""
        paper = experiment.paper.get(model or "")
        shown = [experiment.setting, f"{sum(values) / len(values):.4g}", len(values), spread]
        shown += [rows[-1].get("windows", ""), "" if paper is None else f"{paper:.2f}"]
        lines.append("| " + " | ".join(map(str, shown)) + " |")
    return lines


def _accuracies(found: list[tuple[Experiment, list[Row]]], model: str | None) -> list[str]:
    """Per cent of each task, ``acc_norm`` where there is one, and their mean; the paper's in a row below."""
    names = {task for _, rows in found for row in rows for task in row.get("tasks", {})}
    tasks = [*(task for task in TASKS if task in names), *sorted(names - set(TASKS))]
    lines = ["| setting | " + " | ".join(tasks) + " | average |", "|---|" + "---|" * (len(tasks) + 1)]
    for experiment, rows in found:
        scored = [row["tasks"] for row in rows if "tasks" in row]
        if not scored:
            lines.append(f"| {experiment.setting} | skipped: {rows[-1]['skipped']} |")
            continue
        values = [100 * sum(_accuracy(s[task]) for s in scored) / len(scored) for task in tasks]
        values.append(sum(values) / max(len(values), 1))
        lines.append(f"| {experiment.setting} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
        paper = experiment.paper_tasks.get(model or "")
        if paper is not None:
            *each, average = paper
            by_task = dict(zip(TASKS, each, strict=True)) if each else {}
            figures = [f"{by_task[task]:.2f}" if task in by_task else "" for task in tasks]
            lines.append("| the paper's | " + " | ".join([*figures, f"{average:.2f}"]) + " |")
    return lines


def _accuracy(score: dict[str, float]) -> float:
    return score.get("acc_norm", score["acc"])
