"""Timing on a GPU: graph replays on cold L2, medians, and the roof of the machine, measured.

A kernel timed on the same few megabytes again and again reads them from L2, which no layer of a real model does.
So one graph holds a call on each of several copies of the inputs, together three times the size of the cache.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

REST_S = 0.5
"""Seconds without work between a sustained measurement and one that is not.

The clocks that the power limit left stay for 0.1 to 0.2 s: right behind a sustained FP8 GEMM an H200 began the four
INT4 GEMMs of Llama-2-7B at M = 1 with 1.26 GHz and took 35.4 us for them; then, and after a rest, 30.5 us.
"""
_sustained_until = float("-inf")  # of time.monotonic()

# Dense peaks in TFLOP/s (TOP/s) from NVIDIA's data sheets, without sparsity.
_PEAKS = {
    "H200": {"int8": 1979.0, "fp8": 1979.0, "fp16": 989.5},
    "H100": {"int8": 1979.0, "fp8": 1979.0, "fp16": 989.5},
    "A100": {"int8": 624.0, "fp16": 312.0, "int4": 1248.0},
    "L40S": {"int8": 733.0, "fp8": 733.0, "fp16": 362.0},
    "4090": {"int8": 660.6, "fp8": 660.6, "fp16": 330.3},
}


def l2_bytes() -> int:
    """Size of the L2 cache of the current device."""
    return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 50 << 20))


def copies_for(nbytes: int, cache: int, *, least: int = 2, most: int = 100) -> int:
    """How many sets of inputs of ``nbytes`` make up three times the cache."""
    return max(least, min(most, -(-3 * cache // max(nbytes, 1))))


def measure(
    make: Callable[[], Call],
    nbytes: int,
    *,
    graph: bool = True,
    replays: int = 20,
    cold: bool = True,
    sustain: float = 0.0,
) -> float:
    """Median microseconds of one call.

    Args:
        make: builds fresh inputs and returns the call on them (no allocation that a CUDA graph could not hold).
        nbytes: bytes one call reads and writes, which decides how many sets of inputs are rotated through.
        graph: replay a CUDA graph (a decode step); False launches each call from Python (eager).
        replays: timed repetitions of the whole rotation.
        cold: rotate through enough inputs to overflow L2; False keeps one set, hot.
        sustain: seconds of replays before timing, and half as long timed: the clocks are then those that the board's
            power limit leaves to this kernel in a long prefill, not those of a burst.
    """
    global _sustained_until
    calls = [make() for _ in range(copies_for(nbytes, l2_bytes()) if cold else 1)]
    # A short rotation is repeated inside the graph so that one replay is long against the timer's resolution.
    rounds = max(1, 20 // len(calls))

    def everything() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    run: Call = everything
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            everything()
        run = captured.replay
    if not sustain:
        time.sleep(max(0.0, _sustained_until + REST_S - time.monotonic()))
    for _ in range(3):
        run()
    if sustain:
        once = _milliseconds(run)
        replays = max(3, min(int(sustain * 500 / once), 500))
        for _ in range(int(sustain * 1e3 / once)):
            run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    if sustain:
        _sustained_until = time.monotonic()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e3 / (rounds * len(calls))


def _milliseconds(run: Call) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(stop), 1e-3)


@functools.cache
def copy_bandwidth() -> float:
    """Bytes per second that a large device-to-device copy moves (read plus write), measured: the honest memory roof."""
    size = 2 << 30

    def make() -> Call:
        source = torch.ones(size // 4, dtype=torch.float32, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    # Launched, not recorded: a copy node of a graph reached two thirds of the bandwidth of the same launched copy.
    return 2 * size / (measure(make, 2 * size, graph=False, replays=10) * 1e-6)


def peak(kind: str) -> float | None:
    """Operations per second of ``"int8"``, ``"fp8"``, ``"fp16"`` or ``"int4"`` on this GPU; None where unknown."""
    name = torch.cuda.get_device_name()
    for key, peaks in _PEAKS.items():
        if key in name:
            return peaks[kind] * 1e12 if kind in peaks else None
    return None


def roof_us(nbytes: int, *, int8_ops: float = 0, fp8_flops: float = 0, fp16_flops: float = 0) -> float:
    """Microseconds below which this call cannot go: memory at copy bandwidth or arithmetic at peak, the larger."""
    bounds = [nbytes / copy_bandwidth()]
    for kind, count in (("int8", int8_ops), ("fp8", fp8_flops), ("fp16", fp16_flops)):
        top = peak(kind)
        if count and top:
            bounds.append(count / top)
    return max(bounds) * 1e6
