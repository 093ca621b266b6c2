"""Benchmark rows: written to ``results/<gpu>.json``, read back as tables (`benchmarks.tables`) and plots.

``python -m benchmarks.report`` prints tables, ``--readme`` writes them into README.md, ``--plots DIR`` draws them.
"""

from __future__ import annotations

import argparse
import datetime
import json
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
    from benchmarks import tables  # which reads rows through this module

    text = fill(path.read_text(encoding="utf-8"), "accuracy", tables.accuracy_summary(results))
    path.write_text(fill(text, "summary", tables.speed_summary(results)), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md and docs/")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw one chart an op into DIR")
    options = parser.parse_args(arguments)
    from benchmarks import tables

    if options.readme:
        write_readme()
        pages = (
            ("benchmarks", "speed", tables.speed_tables()),
            ("accuracy", "accuracy", tables.accuracy_table()),
            ("accuracy", "options", tables.options_table()),
        )
        for name, marker, content in pages:
            page = ROOT / "docs" / f"{name}.md"
            page.write_text(fill(page.read_text(encoding="utf-8"), marker, content), encoding="utf-8")
        print("README.md, docs/benchmarks.md and docs/accuracy.md written")
    if options.plots:
        from benchmarks.plots import plots

        print("\n".join(map(str, plots(options.plots))) or "no rows to draw")
    if not options.readme and not options.plots:
        print(tables.speed_tables() + "\n\n**accuracy, SmolLM2-135M**\n\n" + tables.accuracy_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
