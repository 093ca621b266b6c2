"""What goes wrong on the command line: one line, the right exit status, nothing written, no traceback."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from quarot.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "{missing}", "--text", "{text}"], "no such folder"),
        (["eval", "{missing}", "--text", "{missing}"], "no such folder"),
        (["eval", "{missing}", "--tasks", "piqa={missing}"], "no such folder"),
        (["quantize", "{missing}", "--out", "{out}", "--calibration", "{missing}"], "no such folder"),
        (["eval", "{empty}", "--text", "{text}"], "without config.json"),
        (["eval", "{model}", "--text", "{missing}"], "neither a text file"),
        (["eval", "{model}", "--text", "{text}", "--window", "100000"], "fewer than one window"),
        (["eval", "{model}", "--text", "{text}", "--device", "cuda:99"], "CUDA devices"),
        (["eval", "{model}", "--text", "{text}", "--device", "abacus"], "not a torch device"),
        (["eval", "{model}", "--tasks", "piqa={missing}"], "task 'piqa': no file"),
        (["generate", "{model}", "--prompt", ""], "prompt is empty"),
        (["generate", "{model}", "--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "{model}", "--prompt", "x", "--top-p", "2"], "top_p=2.0 must be above 0"),
        (["generate", "{model}", "--prompt", "x", "--temperature", "1e-40"], "temperature=1e-40 must be 0"),
        (["generate", "{model}", "--prompt", "x", "--seed", str(1 << 70)], "must be a number of 64 bits"),
        (["eval", "{model}", "--text", "{text}", "--limit", "3"], "--limit goes with --tasks"),
        (["quantize", "{model}", "--out", "{out}", "--method", "rtn", "--no-rotate", "--no-r3"], "--no-r3 says how to"),
        (["quantize", "{model}", "--out", "{out}", "--set", "=3"], "write FIELD=VALUE"),
        (["quantize", "{model}", "--out", "{out}", "--w-bits", "9"], "w_bits=9 is not supported"),
        (["quantize", "{model}", "--out", "{out}", "--set", "nonsense"], "write FIELD=VALUE"),
        (["quantize", "{model}", "--out", "{out}", "--set", "nonsense=1"], "nonsense"),
        (["quantize", "{model}", "--out", "{out}", "--calibration", "{missing}"], "neither a text file"),
        (["quantize", "{model}", "--out", "{model}", "--method", "rtn"], "exists; choose another folder"),
        (["quantize", "{model}", "--out", "{text}", "--method", "rtn"], "is a file"),
        (["quantize", "{model}", "--out", "{out}", "--method", "rtn", "--group-size", "100"], "100"),
        (["quantize", "{model}", "--out", "{out}", "--calibration", "{text}", "--length", "90000"], "calibration"),
        (["quantize", "{model}", "--out", "{model}", "--method", "rtn", "--overwrite"], "folder of the original model"),
        (["quantize", "{model}", "--out", "{model}", "--in-memory", "--overwrite"], "folder of the original model"),
        (["reproduce", "nonsense"], "no table 'nonsense'; choose from main"),
        (["reproduce", "zero-shot", "--model", "{model}"], "needs its questions"),
        (["info", "{empty}"], "no config.json"),
        (["quantize", "{model}", "--out", "{text}/out", "--method", "rtn"], "cannot write to"),
        (["quantize", "{model}", "--out", "/proc/out", "--method", "rtn"], "cannot write to /proc"),
        (["quantize", "{model}", "--out", "/dev/full", "--method", "rtn"], "--out /dev/full is a file"),
        (["quantize", "{model}", "--out", "{out}", "--calibration", "{blank}"], "blank is empty"),
        (["eval", "{text}", "--text", "{text}"], "is a file; give the folder"),
        (["eval", "{model}", "--text", "{text}", "--json", "{empty}"], "is a folder; name a file"),
        (["eval", "{model}", "--text", "{text}", "--json", "/proc/result.json"], "cannot write to /proc"),
        (["eval", "{missing}", "--text", "{text}", "--json", "/proc/result.json"], "cannot write to /proc"),
        (["eval", "{model}", "--text", "{text}", "--window", "1"], "window=1 must be"),
        (["eval", "{model}", "--text", "{text}", "--max-windows", "0"], "max_windows=0 must be"),
        (["generate", "{model}", "--prompt", "x", "--temperature", "nan"], "must be a finite"),
        (["generate", "{model}", "--prompt", "x", "--temperature", "inf"], "must be a finite"),
        (["plot", "{model}", "--out", "{out}", "--tokens", "0"], "at least 1"),
        (["plot", "{model}", "--out", "/proc/plot.png"], "cannot write to /proc"),
        (["reproduce", "main", "--model", "{model}", "--out", "/proc/out"], "cannot write to /proc"),
        (["bench", "{model}", "--quick", "--out", "/proc/out"], "cannot write to /proc"),
        (["bench", "{model}", "--batch", "0"], "--batch must be at least 1"),
        (["bench", "{model}", "--tables", ""], "no ''; choose from block prefill"),
        (["bench", "{model}", "--tables", "speed"], "no 'speed'; choose from block prefill"),
        (["bench", "{model}", "--tokens", "many"], "write whole numbers"),
    ],
)
def test_one_line_and_status_1(arguments, message, model_folder, text_file, tmp_path, capsys):
    places = {"model": model_folder, "text": text_file, "out": tmp_path / "out", "missing": tmp_path / "missing"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").write_text(" \n")
    filled = [argument.format(empty=tmp_path / "empty", blank=tmp_path / "blank", **places) for argument in arguments]
    assert main([*filled, "--quiet"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


def test_experiments_start_from_the_original_model(model_folder, text_file, tmp_path, capsys):
    quantized = str(tmp_path / "q")
    assert main(["quantize", str(model_folder), "--out", quantized, "--method", "rtn", "--quiet"]) == 0
    texts = ["--text", str(text_file), "--calibration", str(text_file), "--out", str(tmp_path / "results"), "--quiet"]
    assert main(["reproduce", "main", "--model", quantized, *texts]) == 1
    assert "start from the original model" in capsys.readouterr().err
    assert main(["bench", quantized, "--quick", "--w-bits", "8", "--quiet"]) == 1
    assert "--w-bits 8: " in capsys.readouterr().err
    assert (
        main(["reproduce", "main", "--model", str(model_folder), *texts, "--window", "100000", "--length", "32"]) == 1
    )
    assert "no setting could be measured: " in capsys.readouterr().err


def test_truncated_weights_are_named(model_folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["info", str(copy)]) == 1
    assert "model.safetensors is corrupt or truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["{", "[]", "3", '{"quantization_config": "quarot"}', '{"quantization_config": []}']
)
@pytest.mark.parametrize("command", [["info"], ["eval", "--text", "{text}"], ["generate", "--prompt", "x"]])
def test_a_damaged_config_is_named(content, command, model_folder, text_file, tmp_path, capsys):
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    (copy / "config.json").write_text(content)
    assert main([command[0], str(copy), *(part.format(text=text_file) for part in command[1:])]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {copy / 'config.json'}")
    assert "not" in error


@pytest.mark.parametrize("command", [["eval", "--text", "{text}"], ["quantize", "--out", "{out}", "--method", "rtn"]])
def test_missing_tensors_are_not_made_up(command, model_folder, text_file, tmp_path, capsys):
    """transformers fills what it misses with random numbers, and says so in a log that is off."""
    copy, norm = shutil.copytree(model_folder, tmp_path / "copy"), "model.norm.weight"
    tensors = load_file(copy / "model.safetensors")
    del tensors[norm]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    places = {"text": text_file, "out": tmp_path / "out"}
    assert main([command[0], str(copy), *(part.format(**places) for part in command[1:]), "--quiet"]) == 1
    assert f"lacks 1 tensors of a LlamaForCausalLM: {norm}; it is incomplete" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [["eval", "--text", "{text}"], ["quantize", "--out", "{out}", "--method", "rtn"]])
def test_a_missing_shard_is_named(command, model_folder, text_file, tmp_path, capsys):
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    names = list(load_file(copy / "model.safetensors"))
    (copy / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    places = {"text": text_file, "out": tmp_path / "out"}
    assert main([command[0], str(copy), *(part.format(**places) for part in command[1:]), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "model-00001-of-00001.safetensors" in error
    assert "copy or save the checkpoint again" in error


def test_quiet_ends_with_the_command(tmp_path, monkeypatch):
    monkeypatch.delenv("QUAROT_PROGRESS", raising=False)
    assert main(["info", str(tmp_path), "--quiet"]) == 1
    assert "QUAROT_PROGRESS" not in os.environ


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(ValueError, match="not a saved model"):
        main(["info", str(tmp_path), "--debug"])


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["quantize", "smollm2"], ["eval", "m", "--dtype", "int4"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: quarot" in capsys.readouterr().err


def test_help_and_import_need_no_torch():
    """``quarot --help`` answers at once: neither it nor ``import quarot`` loads torch or an optional package."""
    code = (
        "import sys, quarot\n"
        "from quarot.cli import build_parser\n"
        "build_parser()\n"
        "heavy = {'torch', 'transformers', 'datasets', 'lm_eval', 'matplotlib', 'flashinfer', 'compressed_tensors'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
