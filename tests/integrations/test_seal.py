"""Settings that fit any weights, and make them mean something else, are compared with what the weight files note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quarot
from quarot.integrations.safetensors_header import read_metadata
from quarot.integrations.seal import KEY
from quarot.integrations.transformers import attach


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of the quantization config; ``rotation__r3=None`` is a part of the rotation."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        field, _, part = name.partition("__")
        place = config["quantization_config"][field] if part else config["quantization_config"]
        place[part or field] = value
    path.write_text(json.dumps(config))


OTHERS = [
    {"rotation__mlp_out_input": {"size": 192, "order": 1, "pow2": 64, "inner": 1}},
    {"rotation__mlp_out_input": {"size": 192, "order": 12, "pow2": 4, "inner": 4}},
    {"rotation__attn_out_input": {"size": 128, "order": 1, "pow2": 128, "inner": 1}},
    {"rotation__r3": None},
    {"rotation__seed": 5},
    {"a_bits": 8},
    {"a_clip": 0.8},
    {"k_bits": 3},
    {"v_clip": 0.5},
    {"kv_group_size": 16},
    {"kv_bits_by_layer": [[8, 8], [4, 4]]},
    {"overrides": {r".*\.up_proj": {"a_clip": 0.5}}},
]


@pytest.mark.parametrize("change", OTHERS, ids=str)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "40KB"}], ids=["one file", "sharded"])
def test_other_settings_of_equal_shapes_are_refused(change, options, quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path, **options)
    (name,) = change
    edit(tmp_path, **change)
    named = name.replace("__", r"\.")
    with pytest.raises(
        ValueError, match=rf"safetensors was written for other settings .*: {named}=.*, not .*Bring back"
    ):
        quarot.load(tmp_path)


def test_the_error_names_both_values(quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    edit(tmp_path, a_clip=0.8, k_clip=0.7)
    with pytest.raises(ValueError, match=r"a_clip=0\.9, not 0\.8; k_clip=0\.95, not 0\.7"):
        quarot.load(tmp_path)


def test_a_long_setting_is_compared_by_its_hash(quantized_model, logits, token_ids, tmp_path):
    names = [f"{layer}\\.mlp\\.{path}_proj" for layer in (0, 1) for path in ("gate", "up", "down")]
    overrides = {rf"model\.layers\.{name}": {"a_clip": 0.8 + i / 100} for i, name in enumerate(names)}
    model = quantized_model(overrides=overrides)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))
    edit(tmp_path, overrides=overrides | {r"model\.layers\.1\.mlp\.down_proj": {"a_clip": 0.1}})
    with pytest.raises(ValueError, match=r"overrides='\w{16} \(a hash\)', not '\w{16} \(a hash\)'"):
        quarot.load(tmp_path)


def test_rotated_models_are_sealed_as_well(tiny_model, tmp_path):
    model = tiny_model("llama")
    quarot.rotate_model(model, progress=False)
    model.save_pretrained(tmp_path)
    edit(tmp_path, rotation__mlp_out_input=None)
    with pytest.raises(ValueError, match=r"rotation\.mlp_out_input=\{.*\}, not None"):
        quarot.load(tmp_path)


@pytest.mark.parametrize("change", [{"notes": ["another"]}, {"w_method": "gptq"}, {"seed": 9}], ids=str)
def test_what_does_not_change_the_arithmetic_may_differ(change, quantized_model, logits, token_ids, tmp_path):
    model = quantized_model()
    model.save_pretrained(tmp_path)
    edit(tmp_path, **{("rotation__notes" if name == "notes" else name): value for name, value in change.items()})
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))


def test_files_without_the_note_load(quantized_model, logits, token_ids, tmp_path):
    """Those of before, and those that another tool has rewritten; their configuration has one clip ratio."""
    model = quantized_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["k_clip"], config["quantization_config"]["v_clip"]
    config["quantization_config"]["kv_clip"] = 0.95
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))


def test_a_model_changed_in_memory_is_saved_as_what_it_is(quantized_model, logits, token_ids, tmp_path):
    model = quantized_model()
    attach(model, model.config.quantization_config.replace(k_bits=8, v_bits=8))
    model.save_pretrained(tmp_path / "a")
    loaded = quarot.load(tmp_path / "a")
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))
    loaded.save_pretrained(tmp_path / "b", max_shard_size="40KB")
    settings = {path.name: json.loads(read_metadata(path)[KEY]) for path in tmp_path.rglob("*.safetensors")}
    assert len(settings) > 3
    assert all((one["k_bits"], one["k_clip"]) == (8, 1.0) for one in settings.values())
    loaded.dequantize().save_pretrained(tmp_path / "c")
    assert KEY not in read_metadata(tmp_path / "c" / "model.safetensors")


@pytest.mark.parametrize("fields", [{}, {"a_clip_search": True}], ids=["plain", "with findings"])
def test_streamed_checkpoints_are_sealed(fields, tiny_model, logits, token_ids, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "fp")
    windows = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    quarot.quantize_checkpoint(
        tmp_path / "fp", tmp_path / "q", w_method="rtn", calibration=windows, progress=False, **fields
    )
    loaded = quarot.load(tmp_path / "q")
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(quarot.load(tmp_path / "again"), token_ids), logits(loaded, token_ids))
    edit(tmp_path / "q", rotation__r3=None)
    with pytest.raises(ValueError, match=r"rotation\.r3=\{.*\}, not None"):
        quarot.load(tmp_path / "q")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_damaged_note_is_refused(text, quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", KEY: text})
    with pytest.raises(ValueError, match=rf"{path.name} is corrupt: its {KEY} are no JSON object"):
        quarot.load(tmp_path)
