"""Every example runs on a tiny model, scripts as ``__main__`` and the notebook cell after cell."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama and a tokenizer with one token a character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)).save_pretrained(
        path
    )
    letters = Tokenizer(models.WordLevel({"<e>": 0} | {chr(32 + i): i + 1 for i in range(95)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<e>", eos_token="<e>").save_pretrained(path)
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """``run(script, *arguments)`` as ``python script arguments`` would, in this process; returns what it printed."""

    def call(script: Path, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_quantize_and_generate(run, folder, tmp_path):
    sizes = ["--samples", "2", "--length", "32"]
    out = run(EXAMPLES / "quantize_and_generate.py", "--model", folder, "--out", tmp_path / "out", *sizes)
    assert "QuantLinear" in out
    assert "The capital of France is" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_rotation_changes_nothing(run, folder):
    assert "relative difference of the logits" in run(EXAMPLES / "rotation_changes_nothing.py", "--model", folder)


def test_packed_kv_cache(run, folder):
    assert "bytes of pages" in run(EXAMPLES / "packed_kv_cache.py", "--model", folder, "--tokens", "8")


def test_the_notebook(run, folder, tmp_path, monkeypatch):
    """Its code cells, one after the other, as a script."""
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "tour.py"
    script.write_text(code, encoding="utf-8")
    monkeypatch.setenv("QUAROT_TOUR_MODEL", str(folder))
    monkeypatch.setenv("QUAROT_TOUR_WINDOWS", "1")
    out = run(script)
    assert out.count("perplexity") == 2
    assert "->" in out


def test_the_notebook_is_stored_without_outputs():
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert not [cell for cell in notebook["cells"] if cell.get("outputs")]


def test_every_example_is_listed_and_run():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tested = Path(__file__).read_text(encoding="utf-8")
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert f"`{file.name}`" in listed
            assert file.name in tested
