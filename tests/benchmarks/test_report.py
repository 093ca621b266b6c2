"""Benchmark rows: the format, atomic appends, and the tables made from them."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import plots, report, run_all, tables, timing  # noqa: E402
from benchmarks.report import Row  # noqa: E402
from benchmarks.shapes import SHAPES, Options  # noqa: E402


def a_row(**fields):
    return Row("hadamard", "llama-2-7b", "qkv", **{"m": 16, "us": 2.0, "peer": "copy_floor", "peer_us": 3.0, **fields})


def test_a_row_has_every_field_and_absent_ones_are_null():
    row = report.stamp(a_row(context=4096), gpu="NVIDIA H200")
    wanted = "op model layer m n k dtype us roof_us peer peer_us ratio gpu commit torch date"
    assert set(wanted.split(" ")) <= set(row)
    assert (row["n"], row["ratio"], row["context"], row["gpu"]) == (None, 1.5, 4096, "NVIDIA H200")


def test_a_row_without_a_peer_has_no_ratio():
    assert Row("e2e_memory", "llama-2-7b", bytes=5)["ratio"] is None


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")],
)
def test_results_are_named_after_the_gpu(name, slug):
    assert report.gpu_slug(name) == slug


def test_appending_keeps_what_is_there_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "results" / "h200.json"
    report.append([a_row(m=1)], path)
    report.append([a_row(m=2), a_row(m=3)], path)
    assert [row["m"] for row in json.loads(path.read_text())] == [1, 2, 3]
    assert [p.name for p in path.parent.iterdir()] == ["h200.json"]


def test_an_append_that_fails_loses_nothing(tmp_path):
    path = tmp_path / "h200.json"
    report.append([a_row(m=1)], path)
    with pytest.raises(TypeError):
        report.append([a_row(m=object())], path)
    assert [row["m"] for row in report.read(path)] == [1]
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a JSON list"):
        report.append([a_row()], path)


def test_the_newest_row_of_a_measurement_counts():
    rows = [a_row(us=9.0), a_row(m=1), a_row(us=4.0)]
    assert [(row["m"], row["us"]) for row in report.newest(rows)] == [(16, 4.0), (1, 2.0)]


def test_tables_and_readme(tmp_path):
    results = tmp_path / "results"
    report.append([{**report.stamp(a_row(m=m), gpu="NVIDIA H200")} for m in (1, 16)], results / "h200.json")
    accuracy = [
        {"table": "main", "setting": "w4a4kv4-gptq", "seed": seed, "ppl": ppl, "windows": 147, "text": "a.txt"}
        for seed, ppl in ((0, 50.0), (1, 48.0))
    ]
    report.append(accuracy, results / "accuracy-smollm2.json")
    assert "| llama-2-7b | qkv | 1 | 2 | copy_floor | 3 | 1.5 |" in tables.speed_tables(results)
    assert "| main | w4a4kv4-gptq | 49 | 2 | 48 to 50 | 147 |" in tables.accuracy_table(results)
    readme = tmp_path / "README.md"
    readme.write_text("a <!-- accuracy:begin -->old<!-- accuracy:end --> <!-- summary:begin --><!-- summary:end --> c")
    report.write_readme(readme, results)
    report.write_readme(readme, results)  # idempotent
    text = readme.read_text()
    assert "old" not in text
    assert text.count("W4A4KV4, GPTQ") == 1
    assert text.startswith("a ")
    assert text.endswith(" c")


def test_seeds_of_different_commits_are_not_averaged(tmp_path):
    rows = [
        {"table": "main", "setting": "rtn", "seed": seed, "ppl": ppl, "windows": 147, "commit": commit}
        for seed, ppl, commit in ((0, 90.0, "aaaaaaa"), (1, 80.0, "aaaaaaa"), (0, 50.0, "bbbbbbb12345"))
    ]
    report.append(rows, tmp_path / "accuracy-smollm2.json")
    text = tables.accuracy_table(tmp_path)
    assert "| main | rtn | 50 | 1 |  | 147 |  | bbbbbbb |" in text
    assert "newest commit" in text


def test_tables_say_which_commits_they_are_of(tmp_path):
    rows = [{**report.stamp(a_row(m=m), gpu="NVIDIA H200"), "commit": c} for m, c in ((1, "aaaaaaa"), (2, "bbbbbbb1"))]
    report.append(rows, tmp_path / "h200.json")
    assert "commits aaaaaaa, bbbbbbb)" in tables.speed_tables(tmp_path)
    assert "commits aaaaaaa, bbbbbbb." in tables.speed_summary(tmp_path)


def test_missing_markers_are_named():
    with pytest.raises(ValueError, match="<!-- speed:begin -->"):
        report.fill("nothing here", "speed", "table")


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [a_row(m=1), a_row(m=2), {**a_row(), "op": "single"}]
    report.append([report.stamp(row, gpu="NVIDIA H200") for row in rows], tmp_path / "results" / "h200.json")
    (picture,) = plots.plots(tmp_path / "plots", tmp_path / "results")
    assert picture.name == "h200-hadamard.png"
    assert picture.stat().st_size > 3000


def test_shapes_are_what_the_models_have():
    assert SHAPES["llama-2-7b"].linears["qkv"] == (3 * 4096, 4096)
    assert SHAPES["llama-2-70b"].linears == {
        "qkv": (8192 + 2 * 1024, 8192),
        "o_proj": (8192, 8192),
        "gate_up": (2 * 28672, 8192),
        "down_proj": (8192, 28672),
    }
    with pytest.raises(ValueError, match="no shapes for model 'gpt'"):
        Options(models=("gpt",))


def test_inputs_overflow_the_cache_but_not_the_memory():
    megabyte = 1 << 20
    assert timing.copies_for(10 * megabyte, 50 * megabyte) == 15
    assert timing.copies_for(1000 * megabyte, 50 * megabyte) == 2
    assert timing.copies_for(1, 50 * megabyte) == 100


def test_every_benchmark_has_rows_and_run_all_needs_a_gpu(capsys, monkeypatch):
    import torch

    assert not {"timing", "report", "tables", "accuracy_settings"} & set(run_all.names())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_all.main(["--ops", "hadamard"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_rows_with_options_of_their_own_are_not_averaged(tmp_path):
    plain = {"table": "main", "setting": "rtn", "ppl": 90.0, "windows": 147, "commit": "aaaaaaa"}
    rows = [{**plain, "seed": 0}, {**plain, "seed": 1, "ppl": 10.0, "fields": {"a_clip": 0.8}}]
    report.append(rows, tmp_path / "accuracy-smollm2.json")
    text = tables.accuracy_table(tmp_path)
    assert "| main | rtn | 90 | 1 |  | 147 |  | aaaaaaa |  |" in text
    assert "| aaaaaaa | a_clip=0.8 |" in text


def test_rows_calibrated_on_fewer_windows_are_not_averaged_with_others(tmp_path):
    plain = {"table": "main", "setting": "gptq", "ppl": 50.0, "windows": 147, "commit": "aaaaaaa"}
    rows = [{**plain, "seed": 0}, {**plain, "seed": 1, "ppl": 52.0, "samples": 32}]
    report.append(rows, tmp_path / "accuracy-smollm2.json")
    text = tables.accuracy_table(tmp_path)
    assert "| main | gptq | 50 | 1 |  | 147 |  | aaaaaaa |  |" in text
    assert "| main | gptq | 52 | 1 |  | 147 |  | aaaaaaa | 32 |" in text


def test_the_readme_shows_a_setting_a_row_and_a_text_a_column(tmp_path):
    def row(table, setting, seed, ppl, windows=147, text="wikitext2-raw-test.txt"):
        stamps = {"windows": windows, "text": text, "commit": "aaaaaaa1"}
        return {"table": table, "setting": setting, "seed": seed, "ppl": ppl, **stamps}

    rows = [row("baseline", "full", 0, 22.0)]
    rows += [row("main", "w4a4kv4-gptq", 0, 50.0), row("main", "w4a4kv4-gptq", 1, 48.0)]
    rows += [row("main", "w4a4kv4-gptq", 0, 70.0, 40, "lambada.txt"), row("agreement", "w4a4kv4-gptq-o_none", 0, 9.0)]
    rows += [row("main", "w4a4kv4-gptq", 0, 7.0, 5), row("cache only", "kv4", 0, 8.0, 5)]
    report.append(rows, tmp_path / "accuracy-smollm2.json")
    text = tables.accuracy_summary(tmp_path)
    assert "| perplexity | wikitext2 (147 windows) | lambada.txt (40 windows) | seeds | their range |" in text
    assert "| full precision | 22 |  | 1 |  |" in text
    assert "| W4A4KV4, GPTQ (the paper's recipe) | 49 | 70 | 2 | 48 to 50 |" in text
    assert "o_none" not in text and "alone" not in text and "commit aaaaaaa" in text


def test_whole_models_are_a_row_with_their_peers_beside_them(tmp_path):
    shape = {"m": 16, "n": 2048}
    decode = {**shape, "us": 1000.0, "tokens_per_s": 16000.0}
    rows = [
        Row("e2e_decode", "llama-2-7b", **decode, peer="transformers_fp16_graph", peer_us=4000.0),
        Row("e2e_decode", "llama-2-7b", **decode, peer="transformers_fp16_eager", peer_us=20000.0),
        Row("e2e_memory", "llama-2-7b", **shape, bytes=2**30, peer="transformers_fp16_eager", ratio=3.0),
    ]
    report.append([report.stamp(row, gpu="NVIDIA H200") for row in rows], tmp_path / "h200.json")
    text = tables.speed_summary(tmp_path)
    assert "| decode step | llama-2-7b | 16 | 2048 | 1 ms | 16000 | 4x | 20x |" in text
    assert "| peak memory | llama-2-7b | 16 | 2048 | 1 GiB |  |  | 3x |" in text


def test_cache_shapes_are_told_once():
    from benchmarks.shapes import Options

    shapes = list(Options(("llama-2-7b", "llama-3-8b", "llama-2-7b"), (1,)).cache_shapes())
    assert [shape.model for shape in shapes] == ["llama-2-7b", "llama-3-8b"]


def test_options_are_compared_with_nothing_at_equal_seeds(tmp_path):
    def row(setting, seed, ppl, seconds):
        stamps = {"windows": 40, "text": "wikitext2-raw-test.txt", "samples": 32, "commit": "abcdef0"}
        return {"table": "options", "setting": setting, "seed": seed, "ppl": ppl, "quantize_s": seconds, **stamps}

    rows = [row("w4a8kv4+nothing", 0, 20.0, 8.0), row("w4a8kv4+nothing", 1, 40.0, 9.0)]
    rows += [row("w4a16+nothing", 0, 10.0, 0.0), row("w4a8kv4+act_order", 0, 19.0, 12.0)]
    report.append(rows, tmp_path / "accuracy-smollm2.json")
    text = tables.options_table(tmp_path)
    assert "| nothing | 30 | 10 | 2 | 8 s |" in text
    assert "| act_order | 19 (-5.0 %) |  | 1 | 12 s |" in text
    assert "40 windows of wikitext2-raw-test.txt; 32 GPTQ windows; commit abcdef0" in text
    assert "act_order" not in tables.accuracy_table(tmp_path)
