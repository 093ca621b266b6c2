"""Benchmark rows: written to ``results/<gpu>.json``, read back as tables and plots.

``python -m benchmarks.report`` prints tables, ``--readme`` writes them into README.md, ``--plots DIR`` draws them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = ("op", "model", "layer", "m", "n", "k", "dtype", "us", "roof_us", "peer", "peer_us", "ratio")
STAMPS = ("gpu", "commit", "torch", "date")
_IDENTITY = ("op", "model", "layer", "m", "n", "k", "dtype", "peer", "gpu")


class Row(dict[str, Any]):
    """One measurement, with every field of the format; absent ones are None, extra ones are kept.

    ``ratio`` is computed: peer_us / us, so above 1 is faster than the peer.
    """

    def __init__(self, op: str, model: str, layer: str | None = None, **fields: Any) -> None:
        super().__init__(dict.fromkeys(FIELDS))
        self.update(op=op, model=model, layer=layer, **fields)
        for name in ("us", "roof_us", "peer_us"):
            if self[name] is not None:
                self[name] = round(float(self[name]), 4)
        if self["us"] and self["peer_us"]:
            self["ratio"] = round(self["peer_us"] / self["us"], 4)


def commit() -> str | None:
    """The commit this tree is at, ``+`` appended when files differ from it; $QUAROT_COMMIT where there is no git."""
    if os.environ.get("QUAROT_COMMIT"):
        return os.environ["QUAROT_COMMIT"]
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        if head.returncode:
            return None
        # -uno: results and build outputs lying about do not make the code another one.
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "quarot", "csrc"], cwd=ROOT)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")


def gpu_slug(name: str) -> str:
    """``"NVIDIA H200"`` -> ``"h200"``: the stem of the results file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "").replace("geforce", "")).strip("-")


def stamp(row: dict[str, Any], gpu: str | None = None) -> dict[str, Any]:
    """Add where and when: gpu, commit, torch, date."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    return {**row, "gpu": name, "commit": commit(), "torch": torch.__version__, "date": now}


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of one results file; an absent file has none."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a JSON list of rows")
    return rows


def append(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Append rows; the file is replaced in one step, so a reader or a crash never sees half of it."""
    everything = read(path) + list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(json.dumps(row) for row in everything) + "\n]\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each measurement (same op, model, layer, sizes, dtype, peer and GPU), in first-seen order.

    They may be of different commits, since an op is measured when it changes: whoever shows them says which.
    """
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        latest[tuple(row.get(name) for name in _IDENTITY)] = row
    return list(latest.values())


def _commits(rows: Iterable[dict[str, Any]]) -> str:
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
            where = f"{mine[-1]['gpu']} (torch {mine[-1]['torch']}, {_commits(mine)})"
            parts.append(f"**{op}** on {where}\n\n{table(mine, used + extra)}")
    return "\n\n".join(parts) or "No measurements yet."


_FEW_WINDOWS = 40


def accuracy_table(results: Path = RESULTS, brief: bool = False) -> str:
    """The Markdown table of ``results/accuracy-smollm2.json``: mean over seeds, and their range.

    ``brief`` leaves out the settings that are there to agree with the original code, and rows of a few windows.

    Seeds of one row are all of one commit, the newest that a setting was measured at; older measurements do not count.
    """
    groups: dict[tuple[Any, ...], dict[Any, dict[str, Any]]] = {}
    for row in read(results / "accuracy-smollm2.json"):
        if (
            row.get("ppl") is None
            or row["table"] == "options"
            or (brief and (row["table"] == "agreement" or row["windows"] < _FEW_WINDOWS))
        ):
            continue
        fields = ", ".join(f"{name}={value}" for name, value in sorted((row.get("fields") or {}).items()))
        key = (*(row.get(name) for name in ("table", "setting", "windows", "text")), fields)
        seeds = groups.setdefault(key, {})
        if seeds and next(iter(seeds.values())).get("commit") != row.get("commit"):
            seeds.clear()
        seeds[row.get("seed")] = row
    if not groups:
        return "No measurements yet."
    shown = []
    for (name, setting, windows, text, fields), seeds in groups.items():
        values = [row["ppl"] for row in seeds.values()]
        spread = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""
        mean = sum(values) / len(values)
        shown.append({"table": name, "setting": setting, "options": fields, "ppl": f"{mean:.4g}", "seeds": len(values)})
        commit = next(iter(seeds.values())).get("commit")
        shown[-1].update(range=spread, windows=windows, text=text, commit=commit and commit[:7])
    columns = ("table", "setting", "ppl", "seeds", "range", "windows", "text", "commit")
    columns += ("options",) if any(row["options"] for row in shown) else ()
    return "Each row is of the newest commit that its setting was measured at.\n\n" + table(shown, columns)


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
    note = f"Perplexity on {windows}; {samples} GPTQ windows; {_commits(rows)}."
    return table(shown, ("option", *columns, "seeds", "quantising")) + "\n\n" + note


def _beside(own: dict[int, float], plain: dict[int, float], alone: bool) -> str:
    """``"43.9 (-2.2 %)"``: the mean over seeds, and the geometric mean of the changes at equal seeds."""
    if not own:
        return ""
    mean = f"{sum(own.values()) / len(own):.4g}"
    ratios = [own[seed] / plain[seed] for seed in own if seed in plain]
    change = math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1 if ratios and not alone else None
    return mean if change is None else f"{mean} ({100 * change:+.1f} %)"


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Raises:
        ValueError: the markers are missing.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in text or end not in text:
        raise ValueError(f"markers {begin} and {end} are missing")
    head, tail = text.split(begin)[0], text.split(end)[1]
    return f"{head}{begin}\n{content}\n{end}{tail}"


def write_readme(path: Path = ROOT / "README.md", results: Path = RESULTS) -> None:
    """Write the measured tables into the README."""
    text = path.read_text(encoding="utf-8")
    text = fill(text, "accuracy", accuracy_table(results, brief=True))
    path.write_text(fill(text, "summary", summary(results)), encoding="utf-8")


_WHOLE = ("e2e_decode", "e2e_prefill", "e2e_memory", "block_prefill")
_M_RANGES = ((16, "1-16"), (64, "17-64"), (1024, "65-1024"), (None, "over 1024"))


def _m_range(m: int) -> str:
    return next(name for most, name in _M_RANGES if most is None or m <= most)


def _mean(ratios: list[float]) -> float | None:
    """Geometric; None of none."""
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 2) if ratios else None


def summary(results: Path = RESULTS) -> str:
    """The README's speed tables: whole models row by row, kernels as geometric means (all in docs/benchmarks.md)."""
    every = [row for path in sorted(results.glob("*.json")) for row in newest(read(path))]
    whole = [row for row in every if row.get("op") in _WHOLE]
    rows = [row for row in every if row.get("ratio") is not None]
    if not rows:
        return "No measurements yet."
    kernels: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        if row["op"] not in _WHOLE and row.get("m"):
            ranges = kernels.setdefault((row["op"], row["peer"], row["gpu"]), {name: [] for _, name in _M_RANGES})
            ranges[_m_range(row["m"])].append(row["ratio"])
    means = [
        {"op": op, "peer": peer, **{f"m {name}": _mean(ratios) for name, ratios in ranges.items()}, "gpu": gpu}
        for (op, peer, gpu), ranges in kernels.items()
    ]
    parts = [f"Ratio = time (or memory) of the peer / ours; {_commits(rows)}. Whole models (m = batch, n = context):"]
    layer = ("layer",) if any(row.get("layer") for row in whole) else ()
    columns = ("op", "model", *layer, "m", "n", "us", "tokens_per_s", "peer", "peer_us", "ratio", "gpu")
    parts.append(table(whole, columns))
    parts.append("Kernels, geometric mean over shapes (m = tokens; batch for attention):")
    parts.append(table(means, ("op", "peer", *(f"m {name}" for _, name in _M_RANGES), "gpu")))
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md and docs/")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw one chart an op into DIR")
    options = parser.parse_args(arguments)
    if options.readme:
        write_readme()
        tables = (
            ("benchmarks", "speed", speed_tables()),
            ("accuracy", "accuracy", accuracy_table()),
            ("accuracy", "options", options_table()),
        )
        for name, marker, content in tables:
            page = ROOT / "docs" / f"{name}.md"
            page.write_text(fill(page.read_text(encoding="utf-8"), marker, content), encoding="utf-8")
        print("README.md, docs/benchmarks.md and docs/accuracy.md written")
    if options.plots:
        from benchmarks.plots import plots  # which reads rows through this module

        print("\n".join(map(str, plots(options.plots))) or "no rows to draw")
    if not options.readme and not options.plots:
        print(speed_tables() + "\n\n**accuracy, SmolLM2-135M**\n\n" + accuracy_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
