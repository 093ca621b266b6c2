"""Markdown tables of the benchmark rows in ``results/``: the short ones of README.md and the full ones of docs/."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import FIELDS, RESULTS, STAMPS, newest, read


def commits(rows: Iterable[dict[str, Any]]) -> str:
    """``"commit 7607a78"``, or all of them."""
    names = list(dict.fromkeys(str(row.get("commit") or "unknown")[:7] for row in rows))
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """A Markdown table of these columns."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_number(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def speed_tables(results: Path = RESULTS) -> str:
    """One Markdown section a GPU and op, from every ``results/*.json`` that holds timing rows."""
    parts = []
    for path in sorted(results.glob("*.json")):
        rows = [row for row in newest(read(path)) if row.get("us") is not None or row.get("op") == "e2e_memory"]
        for op in dict.fromkeys(row["op"] for row in rows):
            mine = [row for row in rows if row["op"] == op]
            used = tuple(name for name in FIELDS[1:] if any(row.get(name) is not None for row in mine))
            extra = tuple(n for n in dict.fromkeys(k for row in mine for k in row) if n not in FIELDS + STAMPS)
            where = f"{mine[-1]['gpu']} (torch {mine[-1]['torch']}, {commits(mine)})"
            parts.append(f"**{op}** on {where}\n\n{table(mine, used + extra)}")
    return "\n\n".join(parts) or "No measurements yet."


_Measured = tuple[str, str, int, str, str, int]  # table, setting, windows, text, options, calibration windows


_SAMPLES = 128
"""Calibration windows of rows that do not say."""


def _accuracy_rows(results: Path) -> dict[_Measured, dict[int, dict[str, Any]]]:
    """The rows of ``results/accuracy-smollm2.json`` by what was measured and by seed, without the options apart.

    Seeds of one measurement are all of one commit, the newest it was made at; older ones do not count.
    """
    groups: dict[_Measured, dict[int, dict[str, Any]]] = {}
    for row in read(results / "accuracy-smollm2.json"):
        if row.get("ppl") is None or row["table"] == "options":
            continue
        fields = ", ".join(f"{name}={value}" for name, value in sorted((row.get("fields") or {}).items()))
        measured = row["table"], row["setting"], row["windows"], row.get("text"), fields, row.get("samples", _SAMPLES)
        seeds = groups.setdefault(measured, {})
        if seeds and next(iter(seeds.values())).get("commit") != row.get("commit"):
            seeds.clear()
        seeds[row.get("seed")] = row
    return groups


def _mean_ppl(seeds: dict[int, dict[str, Any]]) -> str:
    return f"{sum(row['ppl'] for row in seeds.values()) / len(seeds):.4g}"


def _range(seeds: dict[int, dict[str, Any]]) -> str:
    values = [row["ppl"] for row in seeds.values()]
    return f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""


def accuracy_table(results: Path = RESULTS) -> str:
    """Every accuracy measurement: mean over seeds, and their range."""
    groups = _accuracy_rows(results)
    if not groups:
        return "No measurements yet."
    shown = [
        {
            "table": name,
            "setting": setting,
            "ppl": _mean_ppl(seeds),
            "seeds": len(seeds),
            "range": _range(seeds),
            "windows": windows,
            "text": text,
            "commit": str(next(iter(seeds.values())).get("commit") or "")[:7],
            "calibration": "" if samples == _SAMPLES else samples,
            "options": fields,
        }
        for (name, setting, windows, text, fields, samples), seeds in groups.items()
    ]
    columns = ("table", "setting", "ppl", "seeds", "range", "windows", "text", "commit")
    columns += tuple(name for name in ("calibration", "options") if any(row[name] for row in shown))
    of = f"What calibrates does so on {_SAMPLES} windows, or those of the column that is named after it."
    said = "Each row is of the newest commit that its setting was measured at."
    return f"{said} {of if 'calibration' in columns else ''}".strip() + "\n\n" + table(shown, columns)


_SHOWN = {
    "full": "full precision",
    "w8a8kv8-rtn": "W8A8KV8, round to nearest",
    "w6a6kv8-rtn": "W6A6KV8, round to nearest",
    "kv4": "KV cache alone at 4 bits",
    "w4a16-gptq": "W4A16, GPTQ",
    "layerwise-w4a16": 'W4A16, `preset="layerwise"`',
    "best-w4a16": '**W4A16, `preset="best"`**',
    "w4a8kv4-gptq": "W4A8KV4, GPTQ",
    "layerwise-w4a8kv4": 'W4A8KV4, `preset="layerwise"`',
    "best-w4a8kv4": '**W4A8KV4, `preset="best"`**',
    "w4a4kv4-rtn": "W4A4KV4, round to nearest",
    "w4a4kv4-gptq": "W4A4KV4, GPTQ (the paper's recipe)",
    "layerwise": 'W4A4KV4, `preset="layerwise"`',
    "best": '**W4A4KV4, `preset="best"`**',
}


def accuracy_summary(results: Path = RESULTS) -> str:
    """The README's accuracy table: a setting a row, a text a column, each at the most windows it was measured on."""
    cells: dict[tuple[str, str], tuple[int, dict[int, dict[str, Any]]]] = {}
    groups = sorted(_accuracy_rows(results).items(), key=lambda group: -group[0][-1])  # the most calibration first
    for (_, setting, windows, text, fields, _), seeds in groups:
        if setting in _SHOWN and not fields and windows > cells.get((setting, text), (0, {}))[0]:
            cells[setting, text] = windows, seeds
    if not cells:
        return "No measurements yet."
    most = {text: max(w for (_, other), (w, _) in cells.items() if other == text) for _, text in cells}
    columns = {f"{text.partition('-')[0]} ({windows} windows)": text for text, windows in most.items()}
    shown = []
    for setting, name in _SHOWN.items():
        line: dict[str, Any] = {"perplexity": name}
        found = {text: cells[setting, text] for text in most if cells.get((setting, text), (0,))[0] == most[text]}
        for column, text in columns.items():
            line[column] = _mean_ppl(found[text][1]) if text in found else ""
        if found:
            seeds = next(iter(found.values()))[1]
            shown.append({**line, "seeds": len(seeds), "their range": _range(seeds)})
    used = [row for windows, seeds in cells.values() for row in seeds.values()]
    return f"{table(shown, ('perplexity', *columns, 'seeds', 'their range'))}\n\nOf {commits(used)}."


_PLAIN = "nothing"


def options_table(results: Path = RESULTS) -> str:
    """What each accuracy option does to plain GPTQ, alone: perplexity, and its change at equal seeds.

    Both are means over the seeds that an option was measured with; the first row is plain GPTQ.
    """
    rows = [row for row in read(results / "accuracy-smollm2.json") if row["table"] == "options"]
    if not rows:
        return "No measurements yet."
    cells: dict[tuple[str, str, str], dict[int, float]] = {}
    seconds: dict[str, list[float]] = {}
    for row in rows:
        base, _, option = row["setting"].partition("+")
        cells.setdefault((option, base, row["text"]), {})[row["seed"]] = row["ppl"]
        if row["quantize_s"] > 1:  # else the weights are those of another row
            seconds.setdefault(option, []).append(row["quantize_s"])
    options, bases, texts = (list(dict.fromkeys(key[i] for key in cells)) for i in range(3))
    columns = {f"{base}, {text.partition('-')[0]}": (base, text) for text in texts for base in bases}
    shown = []
    for option in options:
        seeds = max(len(found) for key, found in cells.items() if key[0] == option)
        line: dict[str, Any] = {"option": option, "seeds": seeds}
        for name, where in columns.items():
            line[name] = _beside(cells.get((option, *where), {}), cells.get((_PLAIN, *where), {}), option == _PLAIN)
        line["quantising"] = f"{min(seconds[option]):.0f} s" if option in seconds else ""
        shown.append(line)
    windows = " and ".join(f"{w} windows of {t}" for t, w in dict.fromkeys((r["text"], r["windows"]) for r in rows))
    samples = ", ".join(sorted({str(row.get("samples", 128)) for row in rows}))
    note = f"Perplexity on {windows}; {samples} GPTQ windows; {commits(rows)}."
    return table(shown, ("option", *columns, "seeds", "quantising")) + "\n\n" + note


def _beside(own: dict[int, float], plain: dict[int, float], alone: bool) -> str:
    """``"43.9 (-2.2 %)"``: the mean over seeds, and the geometric mean of the changes at equal seeds."""
    if not own:
        return ""
    mean = f"{sum(own.values()) / len(own):.4g}"
    ratios = [own[seed] / plain[seed] for seed in own if seed in plain]
    change = math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1 if ratios and not alone else None
    return mean if change is None else f"{mean} ({100 * change:+.1f} %)"


_WHOLE = {
    "e2e_decode": "decode step",
    "e2e_prefill": "prefill",
    "block_prefill": "prefill, one block",
    "e2e_memory": "peak memory",
}
_M_RANGES = ((16, "1-16"), (64, "17-64"), (1024, "65-1024"), (None, "over 1024"))


def _m_range(m: int) -> str:
    return next(name for most, name in _M_RANGES if most is None or m <= most)


def _geometric_mean(ratios: list[float]) -> float | None:
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 2) if ratios else None


def _whole_models(rows: list[dict[str, Any]]) -> str:
    """A measurement a row; a peer a column, with its time (memory) over ours."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        model = f"{row['model']}, {row['layer']}" if row.get("layer") else row["model"]
        where = (_WHOLE[row["op"]], model, row["m"], row["n"])
        line = lines.setdefault(where, dict(zip(("what", "model", "batch", "tokens"), where, strict=True)))
        line["tokens/s"] = f"{row['tokens_per_s']:.0f}" if row.get("tokens_per_s") else ""
        line["quarot"] = f"{row['us'] / 1000:.4g} ms" if row.get("us") else f"{row['bytes'] / 2**30:.3g} GiB"
        if row.get("peer"):
            line[row["peer"].replace("_", " ")] = f"{row['ratio']:.3g}x"
    peers = dict.fromkeys(name for line in lines.values() for name in line if name.startswith("transformers"))
    return table(list(lines.values()), ("what", "model", "batch", "tokens", "quarot", "tokens/s", *peers))


def speed_summary(results: Path = RESULTS) -> str:
    """The README's speed tables, GPU by GPU: whole models, and geometric means of kernels (all rows are in docs/)."""
    parts = []
    for path in sorted(results.glob("*.json")):
        rows = [row for row in newest(read(path)) if row.get("op") in _WHOLE or row.get("ratio") is not None]
        if not rows:
            continue
        parts.append(f"On {rows[-1]['gpu']}; ratios are time (or memory) of the peer / ours; {commits(rows)}.")
        parts.append(_whole_models([row for row in rows if row["op"] in _WHOLE]))
        parts.append(
            "Kernels, geometric mean over the shapes of Llama-2 and Llama-3 (moe: Qwen3-30B-A3B and Mixtral-8x7B; m ="
            " tokens, batch for attention):"
        )
        parts.append(_kernel_means([row for row in rows if row["op"] not in _WHOLE and row.get("m")]))
    return "\n\n".join(parts) or "No measurements yet."


def _kernel_means(rows: list[dict[str, Any]]) -> str:
    ranges: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        line = ranges.setdefault((row["op"], row["peer"]), {f"m {name}": [] for _, name in _M_RANGES})
        line[f"m {_m_range(row['m'])}"].append(row["ratio"])
    shown = [
        {"op": op, "peer": peer, **{name: _geometric_mean(ratios) for name, ratios in line.items()}}
        for (op, peer), line in ranges.items()
    ]
    return table(shown, ("op", "peer", *(f"m {name}" for _, name in _M_RANGES)))
