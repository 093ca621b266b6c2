"""A checkpoint that does not fit its config.json is refused, where transformers would cast, drop or make up tensors."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import quarot
from quarot.integrations.safetensors_header import StoredTensor, read_header


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("weight_scale", torch.float16, "weight_scale in F16, which must be F32"),
        ("qweight", torch.float32, "qweight in F32, which must be U8"),
        ("qweight", torch.int8, "qweight in I8, which must be U8"),
    ],
)
def test_cast_codes_and_scales_are_refused(name, dtype, message, quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    full = f"model.layers.1.mlp.up_proj.{name}"
    rewrite(tmp_path, lambda tensors: tensors.update({full: tensors[full].to(dtype)}))
    with pytest.raises(ValueError, match=message):
        quarot.load(tmp_path)


@pytest.mark.parametrize("bits", [8, 16])
def test_other_tensors_may_have_another_float_dtype(bits, quantized_model, token_ids, tmp_path):
    quantized_model(w_bits=bits).save_pretrained(tmp_path)
    kept = (".weight_scale",)

    def halve(tensors):
        floats = {k: t for k, t in tensors.items() if t.is_floating_point() and not k.endswith(kept)}
        tensors.update({k: t.half() for k, t in floats.items()})

    rewrite(tmp_path, halve)
    model = quarot.load(tmp_path)
    with torch.no_grad():
        assert model(token_ids).logits.isfinite().all()


@pytest.mark.parametrize("change", ["fewer layers", "family without biases", "extra tensor"])
def test_tensors_without_a_place_are_refused(change, quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if change == "fewer layers":
        config["num_hidden_layers"] = 1
    elif change == "family without biases":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    else:
        rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(192, 128)}))
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json has no place for, \d+ tensors?: model.layers"):
        quarot.load(tmp_path)


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\nsize 123\n",
        header(b"[]"),
        header(b"{"),
        header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        header(b'{"a": 3}'),
    ],
)
def test_damaged_headers(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is corrupt or truncated: .*; copy or save"):
        read_header(path)


def test_whole_header(tmp_path):
    save_file({"a": torch.zeros(2, 3, dtype=torch.float16), "b": torch.zeros(())}, tmp_path / "x", metadata={"c": "d"})
    assert read_header(tmp_path / "x") == {"a": StoredTensor("F16", (2, 3)), "b": StoredTensor("F32", ())}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mlp.up_proj.weight_scale", float("nan"), "holds NaN or infinity"),
        ("self_attn.q_proj.weight_scale", float("-inf"), "holds NaN or infinity"),
        ("mlp.down_proj.weight_scale", -1e-3, r"is negative \(-0.001\)"),
        ("self_attn.o_proj.weight_scale", 0.0, "is zero where there are weights"),
        ("input_layernorm.weight", float("inf"), "holds NaN or infinity"),
        ("self_attn.k_proj.bias", float("nan"), "holds NaN or infinity"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(name, value, message, symmetric, quantized_model, tmp_path):
    options = {"attention_bias": True}
    quantized_model(w_symmetric=symmetric, w_group_size=32, model_options=options).save_pretrained(tmp_path)
    full = f"model.layers.1.{name}"
    rewrite(tmp_path, lambda tensors: tensors[full].view(-1)[3:4].fill_(value))
    with pytest.raises(ValueError, match=f"{full} {message}: .* quantise the model again"):
        quarot.load(tmp_path)


def test_zero_points_are_looked_at_too(quantized_model, tmp_path):
    quantized_model(w_symmetric=False).save_pretrained(tmp_path)
    full = "model.layers.0.mlp.down_proj.weight_zero"
    rewrite(tmp_path, lambda tensors: tensors[full][3:4].fill_(float("nan")))
    with pytest.raises(ValueError, match=f"{full} holds NaN or infinity"):
        quarot.load(tmp_path)


@pytest.mark.parametrize("fields", [{}, {"w_symmetric": False}, {"w_method": "gptq", "w_group_size": 32}], ids=str)
def test_rows_of_zeros_have_scales_of_zero(fields, tiny_model, token_ids, tmp_path):
    model = tiny_model("llama")
    quarot.rotate_model(model, progress=False)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5:9] = 0
        model.model.layers[0].mlp.gate_proj.weight[7, 32:64] = 0
    windows = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    quarot.quantize_model(model, **({"w_method": "rtn"} | fields), calibration=windows, progress=False)
    assert model.model.layers[0].mlp.up_proj.weight_scale.min() == 0
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = [one(token_ids, use_cache=False).logits for one in (model, quarot.load(tmp_path))]
    assert torch.equal(*logits)
