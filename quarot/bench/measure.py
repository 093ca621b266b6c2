"""Cases, and what one case costs a subject: milliseconds and peak memory, or why there are none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quarot.bench.subjects import Subject, release

LONG_ENOUGH_S = 1.0
"""A call that takes this long is timed once."""

BLOCK_CALLS = 8
"""Calls of a single layer over a prompt without a break between them, on a GPU.

Its first kernel waits for the host, which the layers before it hide in a model. Llama-2-7B, 8 x 2048 tokens on an H200:
6.1 ms of kernels, 7.4 to 8.4 ms for a call by itself, 6.7 to 7.1 ms for one of eight.
"""


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Attributes:
        table: ``block prefill``, ``block decode``, ``prefill`` or ``decode``.
        batch: rows.
        prompt: tokens of the prompt, or cached ones when decoding.
        tokens: decoded ones; 0 for a prefill.
    """

    table: str
    batch: int
    prompt: int
    tokens: int = 0

    @property
    def is_block(self) -> bool:
        """A single decoder layer instead of the whole model."""
        return self.table.startswith("block")

    @property
    def ways_out(self) -> str:
        """What to lower when memory does not suffice."""
        options = [("--batch", self.batch), ("--prompt", self.prompt), ("--tokens", self.tokens)]
        return " or ".join(f"{name} ({value})" for name, value in options if value > 1)


@dataclass(frozen=True)
class Found:
    """What a case cost.

    Attributes:
        ms: milliseconds of the prefill, or of a decoded token.
        nbytes: peak memory of the calls, weights and cache included, on a GPU; None on a CPU.
        failure: why there is nothing; empty otherwise.
    """

    ms: float | None = None
    nbytes: int | None = None
    failure: str = ""


def milliseconds(
    call: Callable[[], Any], repeats: int, inner: int = 1, *, before: Callable[[], Any] | None = None
) -> float:
    """Median time of ``inner`` calls, divided by it; host time included, because an eager step is bound by it.

    Args:
        call: what is timed, once unmeasured before.
        repeats: how often; less for what takes longer than ``LONG_ENOUGH_S``.
        inner: calls without a break between them.
        before: called in front of every round, unmeasured.
    """
    times: list[float] = []
    for turn in range(repeats + 1):
        if before is not None:
            before()
        _wait()
        start = time.perf_counter()
        for _ in range(inner if turn else 1):
            call()
        _wait()
        if turn:
            times.append(time.perf_counter() - start)
            if times[-1] > LONG_ENOUGH_S:
                break
    return statistics.median(times) * 1e3 / inner


def cost(subject: Subject, case: Case, repeats: int, recorded: bool = False) -> Found:
    """Time one case; running out of memory is an answer, and says what to lower."""
    device = subject.device
    release(device)
    call: Any = None
    before: Any = None
    try:
        with torch.inference_mode():
            call, before = _prepared(subject, case, recorded)
            if device.type == "cuda":  # what it took to fill the caches is no cost of the case
                torch.cuda.reset_peak_memory_stats(device)
            together = BLOCK_CALLS if case.is_block and device.type == "cuda" else 1
            ms = milliseconds(call, repeats, case.tokens or together, before=before)
        nbytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Found(ms, nbytes)
    except torch.OutOfMemoryError:
        return Found(failure=f"out of memory: lower {case.ways_out}")
    except RuntimeError as error:
        if not recorded:
            raise
        # A peer that waits for the GPU inside a step (some mixtures of experts) is no reason to stop.
        return Found(failure=f"its step cannot be recorded as a CUDA graph: {str(error).splitlines()[0]}")
    finally:
        del call, before
        release(device)


def _prepared(subject: Subject, case: Case, recorded: bool) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """What is timed, and what goes before each round."""
    if case.tokens:
        decode = subject.decode(case.batch, case.prompt, case.tokens + 1, recorded)
        return decode.step, decode.rewind
    prefill = subject.prefill_block if case.is_block else subject.prefill
    return prefill(case.batch, case.prompt), None


def cases(
    tables: tuple[str, ...], batches: tuple[int, ...], prompt: int, tokens: tuple[int, ...], contexts: tuple[int, ...]
) -> Iterator[Case]:
    """All lines of the tables asked for; the sizes default to those of the paper (tables 16 and 17) in the command.

    Args:
        tables: names as in :class:`Case`.
        batches: rows, of every table.
        prompt: tokens of a prefill, and cached ones in front of a decode.
        tokens: how many are decoded.
        contexts: cached tokens for ``block decode``.
    """
    for table in tables:
        for batch in batches:
            if table == "block decode":
                yield from (Case(table, batch, context, 1) for context in contexts)
            elif table == "decode":
                yield from (Case(table, batch, prompt, count) for count in tokens)
            else:
                yield Case(table, batch, prompt)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
