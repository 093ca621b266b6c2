"""Recording CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """``torch.cuda.graph`` that nothing outside the block breaks.

    Other threads may go on using the GPU. Python's garbage collector waits: a graph that it frees meanwhile (caches and
    their graphs refer to each other, so only the collector frees them) would end this recording with an error.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()
