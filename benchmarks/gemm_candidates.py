"""Every kernel that can serve a GEMM, timed side by side: what ``csrc/gemm/dispatch.cu`` is made from.

``python -m benchmarks.gemm_candidates [--tokens 64,256] [--models llama-2-7b] [--group 128] [--weight-bits 8]
[--output FILE]`` checks each candidate against the others bit for bit, times it with cold weights, and prints the
fastest beside the one that the dispatcher takes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm_w4a4 import moved_bytes, operands
from benchmarks.peers import cublas_fp16
from benchmarks.shapes import DEFAULT_MODELS, SHAPES
from benchmarks.timing import copies_for, l2_bytes
from quarot.ops import gemm_launch
from quarot.ops.registry import extension

Tactic = tuple[int, int, int, int]
"""kernel, a, b, c as in ``csrc/gemm/dispatch.h``."""

SKINNY, WIDE, GROUPED, TILE, SPLIT, WIDE_GROUPS, RING = 0, 1, 2, 4, 5, 6, 7
RING_TILES = (
    *((64, 32), (128, 32), (192, 32)),
    *((64, 64), (128, 64), (192, 64), (320, 64), (384, 64), (64, 128), (128, 128), (192, 128), (128, 256)),
)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_ROUNDS = 5
_FORMATS = {4: gemm_launch.INT4_TILES, 8: gemm_launch.INT8_ROWS}


def candidates(m: int, n: int, k: int, group: int = 0, bits: int = 4) -> Iterator[Tactic]:
    """Those worth timing at this size.

    Args:
        group: inputs that share a weight scale, 0 for one scale a channel.
        bits: of the weights.
    """
    if group:
        if m <= 64:
            yield GROUPED, 0, 0, 0
        else:
            yield TILE, 0, 0, 0
        for channels, tokens in ((128, 128), (64, 128), (64, 64), (64, 32)):
            if tokens == 32 or tokens <= 4 * m:
                yield WIDE_GROUPS, channels, tokens, 0
        return
    if m <= 64:
        yield SKINNY, 8 if m <= 8 else 16 if m <= 16 else 32, 16, 1
    if bits == 8:
        for swizzle in (0, 1) if m >= 1024 else (0,):  # as launch.h takes it, none
            yield WIDE, 128, 128, swizzle
            yield WIDE, 128, 256, swizzle
        for parts in (1, 2, 3, 4):
            if k % (32 * parts) == 0 and m <= 256:
                yield SPLIT, 64, 64, parts
            if k % (32 * parts) == 0 and m <= 1024:
                yield SPLIT, 128, 64, parts
        return
    for channels, tokens in RING_TILES:
        if (tokens == 32) == (m <= 32) and (tokens < 2 * m or m <= 32) and n * m <= 1000 * channels * tokens:
            yield RING, channels, tokens, 0
            meets = (channels, tokens) in ((64, 32), (64, 64), (192, 32))
            if meets and k > 128 and 2 * math.ceil(n / channels) * math.ceil(m / tokens) <= _multiprocessors():
                yield RING, channels, tokens, 2


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def choice(m: int, n: int, k: int, group: int = 0, bits: int = 4) -> Tactic:
    """What the library takes by itself."""
    module: Any = extension()
    return tuple(module.gemm_choice(m, n, k, n, k // group if group else 0, 0, _FORMATS[bits], False))


def _recorded(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def times(m: int, n: int, k: int, group: int = 0, bits: int = 4) -> dict[str, float]:
    """Median microseconds of every candidate and of cuBLAS fp16, measured in turns on the same cold operands."""
    nbytes = moved_bytes(m, n, k, bits) + (4 * n * k // group if group else 0)
    sets = [operands(m, n, k, bits) for _ in range(copies_for(nbytes, l2_bytes()))]
    if group:
        sets = [(*operand[:3], torch.rand(n, k // group, device="cuda") * 0.01) for operand in sets]
    graphs = {}
    first: torch.Tensor | None = None
    for tactic in dict.fromkeys([*candidates(m, n, k, group, bits), choice(m, n, k, group, bits)]):

        def run(operand: tuple[torch.Tensor, ...], tactic: Tactic = tactic) -> torch.Tensor:
            how = {"weight_format": _FORMATS[bits], "tactic": tactic}
            return gemm_launch.launch(*operand, None, torch.float16, **how)  # type: ignore[arg-type]

        got = run(sets[0])
        first = got if first is None else first
        for _ in range(3):
            if not torch.equal(got, first):
                raise AssertionError(f"{tactic} differs from the first candidate at M={m}, N={n}, K={k}")
            got = run(sets[0])
        graphs[",".join(map(str, tactic))] = _recorded([lambda o=o, run=run: run(o) for o in sets])  # type: ignore[misc]
    make = cublas_fp16(m, n, k)
    graphs["cublas_fp16"] = _recorded([make() for _ in sets])
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    replays = max(2, min(20, int(2e12 / (m * n * k * len(sets)))))
    shuffle = random.Random(m * n * k).shuffle
    order = list(graphs)
    for _ in range(_ROUNDS):
        shuffle(order)  # near the power limit what ran before decides over the clocks: up to 8 %
        for name in order:
            graph = graphs[name]
            graph.replay()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                graph.replay()
            stop.record()
            stop.synchronize()
            taken[name].append(start.elapsed_time(stop) * 1e3 / (replays * len(sets)))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gemm_candidates", description=__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS))
    parser.add_argument("--group", type=int, default=0, help="inputs that share a weight scale (default 0: all)")
    parser.add_argument("--weight-bits", type=int, choices=sorted(_FORMATS), default=4)
    parser.add_argument("--output", type=Path, help="all times as JSON")
    options = parser.parse_args()
    if options.group and options.weight_bits != 4:
        parser.error("--group is for 4-bit weights")
    how = (options.group, options.weight_bits)
    sizes = sorted({size for name in options.models.split(",") for size in SHAPES[name].linears.values()})
    everything = []
    for m in map(int, options.tokens.split(",")):
        ours, best = [], []
        for n, k in sizes:
            found = times(m, n, k, *how)
            peer, mine = found.pop("cublas_fp16"), ",".join(map(str, choice(m, n, k, *how)))
            ranked = sorted(found, key=lambda name: found[name])
            ours.append(math.log(peer / found[mine]))
            best.append(math.log(peer / found[ranked[0]]))
            everything.append({"m": m, "n": n, "k": k, "chosen": mine, "cublas_fp16": peer, "us": found})
            listed = "  ".join(f"{name} {found[name]:.1f}" for name in ranked[:4])
            print(f"M={m} {n}x{k}: fp16 {peer:.1f} | chosen {mine} {found[mine]:.1f} | {listed}", flush=True)
            if options.output:
                options.output.write_text(json.dumps(everything))
            torch.cuda.empty_cache()
        means = [math.exp(sum(logs) / len(logs)) for logs in (ours, best)]
        print(f"M={m}: {means[0]:.2f}x cuBLAS fp16 as dispatched, {means[1]:.2f}x with the best of each", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
