"""Every subcommand end to end on a tiny model: quantise, inspect, evaluate, generate, time."""

import json
import re

import pytest

import quarot
from quarot.cli import COMMANDS, main

QUICK = ["--samples", "2", "--length", "32", "--quiet", "--device", "cpu"]


@pytest.fixture(scope="module")
def quantized(model_folder, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "w4a4kv4"
    assert main(["quantize", str(model_folder), "--out", str(out), "--calibration", str(text_file), *QUICK]) == 0
    return out


@pytest.mark.parametrize("option", ["--in-memory", "--offload", "--resume"])
def test_streaming_is_the_default_and_changes_nothing(quantized, model_folder, text_file, tmp_path, option):
    from safetensors.torch import load_file

    assert len(list(quantized.glob("*.safetensors"))) == 3  # a shard for each of two layers, one for the rest
    out, extra = tmp_path / "out", [option] + [str(tmp_path / "finished")] * (option == "--resume")
    arguments = ["quantize", str(model_folder), "--out", str(out), "--calibration", str(text_file), *extra, *QUICK]
    assert main(arguments) == 0
    whole = load_file(out / "model.safetensors")
    streamed = {}
    for file in quantized.glob("*.safetensors"):
        streamed |= load_file(file)
    assert whole.keys() == streamed.keys()
    assert all(whole[name].equal(streamed[name]) for name in whole)
    assert (quantized / "tokenizer.json").is_file()


def test_an_override_alone_asks_for_calibration(model_folder, text_file, tmp_path):
    gptq = 'overrides={".*down_proj":{"w_method":"gptq","w_bits":4,"a_bits":8}}'
    sizes = ["--samples", "2", "--length", "32", "--quiet", "--calibration", str(text_file)]
    for index, method in enumerate((["--method", "rtn"], ["--w-bits", "16", "--a-bits", "16"])):
        out = tmp_path / str(index)
        assert main(["quantize", str(model_folder), "--out", str(out), *method, "--set", gptq, *sizes]) == 0
        assert quarot.load(out).model.layers[0].mlp.down_proj.w_bits == 4


def test_quantize_saves_the_papers_recipe_with_its_rotation(quantized):
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    assert (config["w_bits"], config["a_bits"], config["k_bits"], config["v_bits"]) == (4, 4, 4, 4)
    assert (config["w_method"], config["calibration_samples"], config["calibration_length"]) == ("gptq", 2, 32)
    assert config["rotation"]["family"] == "llama"


def test_info_names_bits_and_rotations(quantized, capsys):
    assert main(["info", str(quantized)]) == 0
    text = capsys.readouterr().out
    assert "w_bits = 4" in text
    assert "R4" in text
    assert main(["info", str(quantized), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"]["w_bits"] == 4


def test_eval_writes_the_perplexity(quantized, text_file, tmp_path, capsys):
    out = tmp_path / "result.json"
    arguments = ["--text", str(text_file), "--window", "64", "--windows", "3", "--json", str(out), "--quiet"]
    assert main(["eval", str(quantized), "--device", "cpu", *arguments]) == 0
    result = json.loads(out.read_text())
    assert (result["windows"], result["tokens"]) == (3, 192)
    assert f"perplexity {result['ppl']:.4f}" in capsys.readouterr().out


def test_unknown_options_are_told_beside_those_of_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "folder", "--batches", "3"])
    error = capsys.readouterr().err
    assert "usage: quarot eval" in error and "--batch-size N" in error
    assert "unrecognized arguments: --batches 3" in error


def test_generate_prints_prompt_and_continuation(quantized, capsys):
    assert main(["generate", str(quantized), "--prompt", "The fox", "--max-new-tokens", "5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("The fox")


def test_sampling_is_repeatable(quantized, capsys):
    arguments = [
        "generate",
        str(quantized),
        "--prompt",
        "The fox",
        "--temperature",
        "1",
        "--seed",
        "3",
        "--device",
        "cpu",
    ]
    texts = []
    for _ in range(2):
        assert main([*arguments, "--max-new-tokens", "8", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


SMALL = ["--batch", "1,2", "--prompt", "16", "--tokens", "2,3", "--contexts", "8,20", "--repeats", "1"]


@pytest.mark.parametrize("given", ["quantized", "plain"])
def test_bench_measures_every_table_beside_its_peer(given, quantized, model_folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = {"quantized": quantized, "plain": model_folder}[given]
    assert main(["bench", str(folder), "--out", str(tmp_path), "--device", "cpu", "--quiet", *SMALL]) == 0
    data = json.loads((tmp_path / "bench.json").read_text())
    lines = [(r["table"], r["batch"], r["prompt"], r["tokens"]) for r in data["rows"]]
    assert lines == [
        *(("block prefill", batch, 16, 0) for batch in (1, 2)),
        *(("block decode", batch, context, 1) for batch in (1, 2) for context in (8, 20)),
        *(("prefill", batch, 16, 0) for batch in (1, 2)),
        *(("decode", batch, 16, count) for batch in (1, 2) for count in (2, 3)),
    ]
    assert all(row["quarot_ms"] > 0 and row["eager_ms"] > 0 for row in data["rows"])
    text = capsys.readouterr().out
    assert text.count("**") == 8
    assert "| 2 | 16 | 3 |" in text
    assert (tmp_path / "bench.md").read_text().strip() in text
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_bench_knows_models_by_name(capsys):
    sizes = ["--batch", "1", "--prompt", "4", "--tokens", "1", "--layers", "1", "--repeats", "1", "--w-bits", "8"]
    arguments = ["bench", "smollm2-135m", "--no-peer", "--tables", "decode,prefill", "--device", "cpu", "--quiet"]
    assert main([*arguments, *sizes]) == 0
    assert "eager" not in capsys.readouterr().out


def test_bench_resizes_a_model_whose_cache_differs_by_layer(quantized, tmp_path, capsys):
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["kv_bits_by_layer"] = [[8, 4]] * config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ["--batch", "1", "--prompt", "4", "--tokens", "1", "--repeats", "1", "--tables", "decode"]
    layers = ["--layers", str(config["num_hidden_layers"] + 1)]
    assert main(["bench", str(tmp_path), "--no-peer", "--device", "cpu", "--quiet", *layers, *sizes]) == 0
    assert "| 1 | 4 |" in capsys.readouterr().out


def test_demo_saves_and_reloads(model_folder, text_file, tmp_path, capsys):
    out = tmp_path / "kept"
    arguments = ["--text", str(text_file), "--calibration", str(text_file), "--out", str(out), "--windows", "1", *QUICK]
    assert main(["demo", str(model_folder), "--w-bits", "8", "--a-bits", "8", *arguments]) == 0
    text = capsys.readouterr().out
    assert "full precision" in text
    assert "W8A8KV4 GPTQ" in text
    assert (out / "config.json").is_file()


def test_plot_draws_before_and_after(model_folder, text_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "outliers.png"
    assert (
        main(["plot", str(model_folder), "--out", str(out), "--text", str(text_file), "--tokens", "64", "--quiet"]) == 0
    )
    assert out.stat().st_size > 10_000
    assert capsys.readouterr().out.count("after rotation") == 4


def test_doctor_reports_every_required_package(capsys):
    status = main(["doctor"])
    text = capsys.readouterr().out
    assert status in (0, 1)
    assert "torch" in text
    assert "CUDA extension" in text
    assert ("problem" in text) == (status == 1)


def test_a_preset_is_a_start_that_options_override(model_folder, tmp_path):
    from quarot.cli import build_parser, recipe
    from quarot.quantization.presets import PRESETS

    arguments = ["quantize", str(model_folder), "--out", str(tmp_path / "out"), "--preset", "best"]
    config = recipe.config_of(build_parser().parse_args([*arguments, "--set", "tune_steps=7", "--a-bits", "6"]))
    assert (config.tune_steps, config.a_bits) == (7, 6)
    for name in set(PRESETS["best"]) - {"tune_steps", "a_bits"}:
        assert getattr(config, name) == PRESETS["best"][name], name
    gentle = recipe.config_of(build_parser().parse_args([*arguments, "--a-bits", "8"]))
    assert gentle.tune_learning_rate < config.tune_learning_rate
    assert gentle.gptq_quantized_inputs


def test_the_layerwise_preset_asks_for_nothing_that_cannot_be_streamed(model_folder, tmp_path):
    from quarot.cli import build_parser, recipe
    from quarot.streaming.quantize_checkpoint import _check_streamable

    arguments = ["quantize", str(model_folder), "--out", str(tmp_path / "out"), "--preset", "layerwise"]
    for bits in ("4", "8", "16"):
        config = recipe.config_of(build_parser().parse_args([*arguments, "--a-bits", bits]))
        _check_streamable(config)
        assert config.gptq_act_order
        assert config.gptq_asymmetric == (bits != "4")
        assert config.a_clip_search == (bits == "4")


def test_reproduce_writes_rows_and_a_table(model_folder, text_file, tmp_path, monkeypatch, capsys):
    from quarot.evaluation import paper

    few = paper.Table("Cache", (paper.TABLES["kv"].experiments[0], paper.TABLES["kv"].experiments[1]))
    monkeypatch.setitem(paper.TABLES, "kv", few)
    sizes = ["--window", "64", "--windows", "1", "--samples", "1", "--length", "32", "--device", "cpu", "--quiet"]
    texts = ["--text", str(text_file), "--calibration", str(text_file), "--out", str(tmp_path)]
    assert main(["reproduce", "kv", "--model", str(model_folder), *texts, *sizes]) == 0
    assert "| k4v4 |" in capsys.readouterr().out
    assert "| k4v4 |" in (tmp_path / "kv.md").read_text()
    assert [row["setting"] for row in json.loads((tmp_path / "kv.json").read_text())] == ["full precision", "k4v4"]


def test_reproduce_lists_every_table(capsys):
    assert main(["reproduce", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("main", "bits", "kv", "weights", "orthogonal", "clips", "zero-shot"))
    assert "hadamard-precision" in text and "residual" in text


def test_reproduce_all_measures_common_settings_once(model_folder, text_file, tmp_path, monkeypatch, capsys):
    from quarot.evaluation import paper

    kept = {name: paper.TABLES[name].experiments for name in ("kv", "clips", "zero-shot")}
    for name in paper.TABLES:
        few = paper.Table(name, kept.get(name, ())[:2], zero_shot=name == "zero-shot")
        monkeypatch.setitem(paper.TABLES, name, few)
    sizes = ["--window", "64", "--windows", "1", "--samples", "1", "--length", "32", "--device", "cpu", "--quiet"]
    texts = ["--text", str(text_file), "--calibration", str(text_file), "--out", str(tmp_path)]
    assert main(["reproduce", "all", "--model", str(model_folder), *texts, *sizes]) == 0
    shown = capsys.readouterr().out
    assert "zero-shot: skipped: a zero-shot table needs its questions" in shown
    rows = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("kv", "clips")}
    assert [row["setting"] for row in rows["kv"]] == ["full precision", "k4v4"]
    assert rows["kv"][0]["ppl"] == rows["clips"][0]["ppl"]
    assert rows["kv"][0]["date"] == rows["clips"][0]["date"]
    assert not (tmp_path / "zero-shot.json").exists()


def test_info_counts_what_layers_got(model_folder, text_file, tmp_path, capsys):
    out = tmp_path / "mixed"
    sizes = ["--samples", "1", "--length", "32", "--device", "cpu", "--quiet", "--calibration", str(text_file)]
    fields = ["--method", "rtn", "--set", "w_bits_budget=4.5", "--set", "w_bits_choices=[3, 8]"]
    assert main(["quantize", str(model_folder), "--out", str(out), *sizes, *fields]) == 0
    assert main(["info", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"overrides = \d+ modules: \d+ x {\"w_bits\": (3|8)}, \d+ x {\"w_bits\": (3|8)}", shown)
    assert "w_bits_budget = 4.5" in shown


def test_rotation_only(model_folder, tmp_path, capsys):
    out = tmp_path / "rotated"
    sixteen = ["--w-bits", "16", "--a-bits", "16", "--kv-bits", "16"]
    assert main(["quantize", str(model_folder), "--out", str(out), "--device", "cpu", "--quiet", *sixteen]) == 0
    assert "R1" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["w_bits"] == 16


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_argument(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: quarot {command}" in capsys.readouterr().out
