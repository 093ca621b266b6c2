"""Rows of :mod:`quarot.bench.compare` as Markdown tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quarot.bench.compare import EAGER, GRAPH, OURS

PEERS = (EAGER, GRAPH)


def markdown(rows: list[dict[str, Any]], dtype: str) -> str:
    """One table for every ``table`` among the rows; ratios are the peer's time or memory over ours."""
    parts = []
    for table in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == table]
        peers = [peer for peer in PEERS if any(_measured(row, peer) for row in mine)]
        memory = any(row[f"{OURS}_bytes"] for row in mine)
        head = ["batch", "cached" if mine[0]["tokens"] else "prompt"]
        head += ["tokens"] if any(row["tokens"] > 1 for row in mine) else []
        unit = "ms a token" if mine[0]["tokens"] else "ms"
        head += [f"quarot, {unit}", "tokens/s"]
        for peer in peers:
            head += [f"{dtype} {peer}", "ratio"]
        head += ["quarot, GB"] if memory else []
        head += [f"{dtype}, GB", "ratio"] if memory and peers else []
        lines = [head, ["---:"] * len(head)]
        lines += [_line(row, head, peers, memory) for row in mine]
        parts.append(f"**{table}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
        notes = {f"{name}, batch {row['batch']}: {row[f'{name}_failure']}" for row in mine for name in (OURS, *PEERS)
                 if row.get(f"{name}_failure")}  # fmt: skip
        parts += [f"- {note}" for note in sorted(notes)]
    return "\n\n".join(parts)


def _measured(row: dict[str, Any], name: str) -> bool:
    return row.get(f"{name}_ms") is not None or bool(row.get(f"{name}_failure"))


def _line(row: dict[str, Any], head: list[str], peers: list[str], memory: bool) -> list[str]:
    ours = row[f"{OURS}_ms"]
    cells = [str(row["batch"]), str(row["prompt"])] + ([str(row["tokens"])] if "tokens" in head else [])
    count = row["batch"] if row["tokens"] else row["batch"] * row["prompt"]
    cells += [_time(row, OURS), "" if ours is None else f"{count / ours * 1e3:.0f}"]
    for peer in peers:
        cells += [_time(row, peer), ratio(row.get(f"{peer}_ms"), ours)]
    if memory:
        cells.append(_gigabytes(row[f"{OURS}_bytes"]))
    if memory and peers:
        cells += [_gigabytes(row.get(f"{EAGER}_bytes")), ratio(row.get(f"{EAGER}_bytes"), row[f"{OURS}_bytes"])]
    return cells


def _time(row: dict[str, Any], name: str) -> str:
    if row.get(f"{name}_failure"):
        return "no memory" if "memory" in row[f"{name}_failure"] else "none"
    value = row.get(f"{name}_ms")
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _gigabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e9:.3g}"


def ratio(peer: float | None, ours: float | None) -> str:
    """``2.61x``, or nothing where one is missing."""
    return "" if peer is None or ours is None else f"{peer / ours:.2f}x"


def plot(rows: list[dict[str, Any]], title: str, target: Path) -> None:
    """Bars of the ratios, one panel a table, with a line at 1.

    Raises:
        ImportError: matplotlib is missing (``pip install matplotlib``).
        ValueError: no row has a peer.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [(f"{peer}_ms", f"{OURS}_ms", f"time, {peer}") for peer in PEERS]
    kinds.append((f"{EAGER}_bytes", f"{OURS}_bytes", "memory"))
    panels = [t for t in dict.fromkeys(r["table"] for r in rows) if any(_bars(rows, t, *k[:2]) for k in kinds)]
    if not panels:
        raise ValueError("nothing to draw: no row has a peer")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for panel, table in zip(axes[0], panels, strict=True):
        names = [_name(row) for row in rows if row["table"] == table]
        drawn = [kind for kind in kinds if _bars(rows, table, *kind[:2])]
        for index, (peer, ours, label) in enumerate(drawn):
            bars = _bars(rows, table, peer, ours)
            places = [names.index(name) + (index - (len(drawn) - 1) / 2) * 0.8 / len(drawn) for name in bars]
            panel.bar(places, list(bars.values()), 0.8 / len(drawn), label=label)
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(table)
        panel.set_ylabel("times less than the peer")
        panel.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _name(row: dict[str, Any]) -> str:
    return f"{row['batch']} x {row['prompt']}" + (f" + {row['tokens']}" if row["tokens"] > 1 else "")


def _bars(rows: list[dict[str, Any]], table: str, peer: str, ours: str) -> dict[str, float]:
    mine = [row for row in rows if row["table"] == table]
    return {_name(row): row[peer] / row[ours] for row in mine if row.get(peer) and row.get(ours)}
