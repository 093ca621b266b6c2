"""Rows of ``quarot reproduce`` kept in the repository, and their tables in the docs."""

from __future__ import annotations

from benchmarks.reproduced import merged, tables


def _row(setting: str, ppl: float | None, **fields: object) -> dict[str, object]:
    row = {"table": "kv", "setting": setting, "seed": 0, "windows_asked": 20, "samples": 32, "length": 2048}
    return {**row, "windows": 20, "ppl": ppl, "device": "a GPU", "commit": "0123456789ab", **fields}


def test_a_new_measurement_replaces_the_old_one_in_its_place() -> None:
    old = [_row("k4v4", 1.0), _row("k3v3", 2.0)]
    rows = merged(old, [_row("k2v2", 9.0), _row("k4v4", 3.0), _row("k4v4", 4.0, seed=1)])
    assert [(row["setting"], row["ppl"]) for row in rows] == [
        ("k4v4", 3.0),
        ("k3v3", 2.0),
        ("k2v2", 9.0),
        ("k4v4", 4.0),
    ]


def test_tables_say_what_they_were_measured_on() -> None:
    shown = tables("Llama-2-7b-hf", [_row("k4v4", 5.5), _row("k3v3", None, skipped="too small")])
    assert shown.startswith("#### Table 6: bits of keys and values")
    assert "| k4v4 | 5.5 | 1 |  | 20 | 5.51 |" in shown
    assert "| k3v3 | skipped: too small |" in shown
    assert "a GPU, commit 0123456; calibrated on 32 windows of 2048 tokens." in shown
    both = tables("smollm2", [_row("k4v4", 5.5), _row("k3v3", 6.5, commit="abcdef012345")])
    assert "a GPU, commits 0123456, abcdef0; calibrated" in both
    assert tables("smollm2", []) == "No measurements yet."
