"""Charts of the measured rows: how much faster than each peer, and how near the roof, against M."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, newest, read

Row = dict[str, Any]
Curve = list[tuple[int, float, float, float]]
"""(m, geometric mean, lowest, highest), by m."""

_PEER_NAMES = {
    "cublas_fp16": "cuBLAS fp16",
    "fp8_rowwise": "fp8 row-wise",
    "int_mm": "torch._int_mm",
    "copy_floor": "a copy of the same bytes",
    "torch_unfused": "unfused PyTorch",
    "fast_hadamard_transform": "fast_hadamard_transform",
    "flashinfer_fp16": "FlashInfer fp16",
    "flashinfer_fp8": "FlashInfer fp8",
    "transformers_fp16_eager": "transformers fp16, eager",
    "transformers_fp16_graph": "transformers fp16, CUDA graph",
}


def curve(values: Iterable[tuple[int, float]]) -> Curve:
    """Values of several shapes at each m, summed up."""
    groups: dict[int, list[float]] = {}
    for m, value in values:
        groups.setdefault(m, []).append(value)
    return [
        (m, math.exp(sum(map(math.log, found)) / len(found)), min(found), max(found))
        for m, found in sorted(groups.items())
    ]


def _draw(axes: Any, name: str, points: Curve) -> None:
    m, mean, lowest, highest = zip(*points, strict=True)
    (line,) = axes.plot(m, mean, marker="o", markersize=4, label=name)
    axes.fill_between(m, lowest, highest, alpha=0.12, color=line.get_color(), linewidth=0)


def _speed_up(axes: Any, rows: list[Row]) -> None:
    for peer in dict.fromkeys(row["peer"] for row in rows):
        points = [(row["m"], row["ratio"]) for row in rows if row["peer"] == peer and row["ratio"]]
        if points:
            _draw(axes, _PEER_NAMES.get(peer, peer), curve(points))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times faster than the peer")


def _roof(axes: Any, rows: list[Row]) -> None:
    # Rows of one size against several peers may be of several runs: the newest time counts.
    dated = sorted(rows, key=lambda row: row.get("date") or "")
    single = {(row["model"], row["layer"], row["m"], row["n"], row["k"], row["dtype"]): row for row in dated}
    for layer in dict.fromkeys(row["layer"] for row in rows):
        points = [
            (row["m"], row["roof_us"] / row["us"])
            for row in single.values()
            if row["layer"] == layer and row["roof_us"] and row["us"]
        ]
        if points:
            _draw(axes, layer or "all", curve(points))
    axes.set_ylim(0, 1)
    axes.set_ylabel("roof time / measured time")


def plots(folder: Path, results: Path = RESULTS) -> list[Path]:
    """One PNG an op and GPU that was measured at more than one M.

    Lines are geometric means over shapes, bands reach from the lowest to the highest.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted(results.glob("*.json")):
        rows = [row for row in newest(read(path)) if row.get("ratio") is not None and row.get("m")]
        for op in dict.fromkeys(row["op"] for row in rows):
            mine = [row for row in rows if row["op"] == op]
            if len({row["m"] for row in mine}) < 2:
                continue  # a number, no curve: the tables have it
            figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
            _speed_up(left, mine)
            _roof(right, mine)
            for axes in (left, right):
                axes.set_xscale("log", base=2)
                ticks = sorted({row["m"] for row in mine})
                axes.set_xticks(ticks, [str(m) for m in ticks], rotation=60, fontsize=7)
                axes.set_xlabel("M (tokens; batch for attention and whole models)")
                axes.grid(alpha=0.3)
                if axes.has_data() and axes.get_legend_handles_labels()[0]:
                    axes.legend(fontsize=7)
            figure.suptitle(f"{op} on {mine[0]['gpu']}", fontsize=10)
            figure.tight_layout()
            target = folder / f"{path.stem}-{op}.png"
            figure.savefig(target, dpi=110, metadata={"Software": None})
            pyplot.close(figure)
            written.append(target)
    return written
