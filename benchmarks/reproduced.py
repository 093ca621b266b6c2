"""Keeps what ``quarot reproduce`` measured, and writes its tables into docs/reproduction.md.

``python -m benchmarks.reproduced FOLDER --model smollm2 --device "NVIDIA H200" --commit 0123abc`` takes the rows of a
folder that ``quarot reproduce ... --out FOLDER`` wrote into ``results/reproduce/MODEL.json``; without FOLDER it only
writes the tables again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, commit, fill, read
from quarot.evaluation.paper import TABLES, paper_model
from quarot.evaluation.reproduced_table import markdown

Row = dict[str, Any]
_IDENTITY = ("table", "setting", "seed", "windows_asked", "samples", "limit")


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """All rows; of the same measurement the new one, in the old one's place."""
    rows = {tuple(row.get(name) for name in _IDENTITY): row for row in old}
    rows.update({tuple(row.get(name) for name in _IDENTITY): row for row in new})
    return list(rows.values())


def tables(model: str, rows: list[Row]) -> str:
    """Markdown of every table that has rows, each with what its rows were measured on."""
    parts = []
    for name, table in TABLES.items():
        mine = [row for row in rows if row["table"] == name]
        if mine:
            parts.append("#" + markdown(name, table, mine, paper_model(model)) + "\n\n" + _stamps(mine))
    return "\n\n".join(parts) or "No measurements yet."


def _stamps(rows: list[Row]) -> str:
    def named(key: str, length: int | None = None) -> str:
        return ", ".join(sorted({str(row[key])[:length] for row in rows if row.get(key) is not None}))

    commits = named("commit", 7)
    calibration = f"calibrated on {named('samples')} windows of {named('length')} tokens"
    limit = f"; first {named('limit')} questions of each task" if named("limit") else ""
    return f"{named('device')}, commit{'s' * (', ' in commits)} {commits}; {calibration}{limit}."


def main() -> int:
    """Merge, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", help="that measured the rows of FOLDER, e.g. NVIDIA H200")
    parser.add_argument("--commit", default=commit(), help="that they were measured at (default: this tree's)")
    options = parser.parse_args()
    path = RESULTS / "reproduce" / f"{options.model}.json"
    rows = read(path)
    if options.folder is not None:
        stamps = {"model": options.model, "device": options.device, "commit": options.commit}
        files = sorted(options.folder.glob("*.json"))
        rows = merged(rows, [{**row, **stamps} for file in files for row in read(file)])
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
        os.replace(temporary, path)
    page = ROOT / "docs" / "reproduction.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(fill(text, "reproduce", tables(options.model, rows)), encoding="utf-8")
    print(f"{len(rows)} rows; {page.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
