"""Runs every case on quarot's model and on its peers, one model in memory at a time."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quarot.bench.measure import Case, Found, cost
from quarot.bench.subjects import Subject, release
from quarot.progress import progress_bar

Make = Callable[[bool], Subject]
"""Builds a subject: a single block (without embedding and head) for True, else the whole model."""

OURS, EAGER, GRAPH = "quarot", "eager", "graph"


def compare(
    makes: dict[str, Make], cases: list[Case], repeats: int, device: torch.device, progress: bool = True
) -> list[dict[str, Any]]:
    """One row a case: its sizes, and ``{subject}_ms``, ``{subject}_bytes``, ``{subject}_failure`` for every subject.

    Args:
        makes: by subject: ``quarot``, and ``eager`` where there is a peer; on a GPU the peer also decodes as a recorded
            ``graph``.
        cases: what to measure; blocks and whole models may be mixed.
        repeats: timed rounds of each.
        device: where the subjects are.
    """
    found: dict[tuple[str, Case], Found] = {}
    steps = [(name, block) for block in (True, False) for name in makes if any(c.is_block == block for c in cases)]
    bar = progress_bar(_run(makes, steps, cases, repeats, device), "measuring", progress, _count(steps, cases, device))
    for name, case, result in bar:
        found[name, case] = result
    names = list(dict.fromkeys(name for name, _ in found))
    rows = []
    for case in cases:
        row: dict[str, Any] = {"table": case.table, "batch": case.batch, "prompt": case.prompt, "tokens": case.tokens}
        for name in names:
            result = found.get((name, case), Found())
            row |= {f"{name}_ms": result.ms, f"{name}_bytes": result.nbytes, f"{name}_failure": result.failure}
        rows.append(row)
    return rows


def _ways(name: str, case: Case, device: torch.device) -> list[tuple[str, bool]]:
    """The columns that one subject fills for a case, and whether each is recorded as a graph."""
    if name == OURS:
        return [(OURS, False)]
    graph = [(GRAPH, True)] if case.tokens and device.type == "cuda" else []
    return [(EAGER, False), *graph]


def _count(steps: list[tuple[str, bool]], cases: list[Case], device: torch.device) -> int:
    return sum(len(_ways(name, c, device)) for name, block in steps for c in cases if c.is_block == block)


def _run(
    makes: dict[str, Make], steps: list[tuple[str, bool]], cases: list[Case], repeats: int, device: torch.device
) -> Iterator[tuple[str, Case, Found]]:
    for name, block in steps:
        mine = [case for case in cases if case.is_block == block]
        subject: Subject | None = None
        try:
            subject = makes[name](block)
        except torch.OutOfMemoryError:
            failure = Found(failure="the model itself does not fit into memory: fewer --layers, or a smaller one")
        for case in mine:
            for column, recorded in _ways(name, case, device):
                yield column, case, failure if subject is None else cost(subject, case, repeats, recorded)
        subject = None
        release(device)


def surroundings(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code: machine and versions."""
    import transformers

    import quarot

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "quarot": quarot.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
