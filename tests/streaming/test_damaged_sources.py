"""A source that is damaged, incomplete or of another kind is refused by name before anything is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quarot

RTN: dict[str, Any] = {"w_method": "rtn", "progress": False}
NORM = "model.norm.weight"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def source(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "truncated":
        os.truncate(weights, weights.stat().st_size - 10)
    elif how == "garbage":
        weights.write_bytes(b"x" * 99)
    elif how == "index":
        (folder / "model.safetensors.index.json").write_text("{}")
    elif how == "configuration":
        (folder / "config.json").write_text("[]")
    elif how == "no configuration":
        (folder / "config.json").unlink()
    else:
        kind = {"float8": torch.float8_e4m3fn, "int8": torch.int8}[how]
        rewrite(folder, lambda tensors: tensors.update({NORM: tensors[NORM].to(kind)}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"model\.safetensors is corrupt or truncated"),
        ("garbage", r"model\.safetensors is corrupt or truncated"),
        ("index", r"index\.json is corrupt or truncated: KeyError\('weight_map'\)"),
        ("configuration", r"config\.json holds a list"),
        ("no configuration", r"is a folder without config\.json"),
        ("float8", r"holds model\.norm\.weight in F8_E4M3; convert"),
        ("int8", r"holds model\.norm\.weight in I8; convert"),
    ],
)
def test_a_damaged_source_is_named(how: str, message: str, source: Path, tmp_path: Path) -> None:
    damage(source, how)
    with pytest.raises(ValueError, match=message):
        quarot.quantize_checkpoint(source, tmp_path / "out", **RTN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_tensors_without_a_place_are_told(source: Path, tmp_path: Path, caplog: Any) -> None:
    extra = ("model.layers.0.mlp.adapter.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    rewrite(source, lambda tensors: tensors.update({name: torch.ones(3) for name in extra}))
    quarot.quantize_checkpoint(source, tmp_path / "out", **RTN)
    assert (
        f"holds 1 tensors that a LlamaForCausalLM with its config.json does not have; they are left out: {extra[0]}"
        in (caplog.text)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": "source/config.json"}, "out .* is a file, not a folder"),
        ({"out": "/proc/out"}, "cannot write to /proc"),
        ({"dtype": "float8"}, "dtype='float8' is neither 'auto' nor"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / arguments.pop("out", "out")
    with pytest.raises((ValueError, FileExistsError), match=message):
        quarot.quantize_checkpoint(source, out, **arguments, **RTN)


def test_a_missing_source(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        quarot.quantize_checkpoint(tmp_path / "missing", tmp_path / "out", **RTN)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_bits_by_layer", [[4, 4]], "1 pairs for 2 decoder layers"),
        ("r3", {"size": 64, "order": 1, "pow2": 64, "inner": 1}, "R3 is for a head_dim of 64, the model has 32"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_when_loaded(
    field: str, value: Any, message: str, source: Path, tmp_path: Path
) -> None:
    quarot.quantize_checkpoint(source, tmp_path / "out", **RTN)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    quantization = config["quantization_config"]
    (quantization if field in quantization else quantization["rotation"])[field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="written for other settings"):
        quarot.load(tmp_path / "out")
    for shard in path.parent.glob("*.safetensors"):  # as from before the weight files noted their settings
        save_file(load_file(shard), shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        quarot.load(tmp_path / "out")
