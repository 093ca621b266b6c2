"""Every record describes its class completely: paths resolve, parts add up, every weight is claimed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from quarot.architectures import ARCHITECTURES, architecture_of, decoder_layers, geometry, has_submodule, linear_modules


def test_record_is_found_by_class_and_for_subclasses(family: str, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(family)
    assert architecture_of(model).family == family
    subclass = type("MyModel", (type(model),), {})
    model.__class__ = subclass
    assert architecture_of(model).family == family


def test_paths_resolve_and_parts_sum_to_the_rows(family: str, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(family)
    record, sizes = architecture_of(model), geometry(model)
    for path in (record.embed, record.layers, record.final_norm, record.lm_head):
        model.get_submodule(path)
    for _, layer in decoder_layers(model):
        for path in (record.attention, record.mlp, record.attn_norm, record.mlp_norm, *record.head_norms):
            layer.get_submodule(path)
        for projection in record.projections:
            linear = layer.get_submodule(projection.path)
            assert sum(sizes.rows(part) for part in projection.parts) == linear.out_features
            last = sizes.row_slice(projection, projection.parts[-1])
            assert last.stop == linear.out_features


def test_every_linear_layer_appears_once_with_its_role(family: str, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(family)
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    listed = list(linear_modules(model))
    assert sorted(name for name, _ in named) == sorted(name for name, _, _ in listed)
    assert all(model.get_submodule(name) is module for name, module, _ in listed)
    roles = {role for _, _, role in listed}
    fused = {"qkv", "o", "gate_up", "down", "lm_head"}
    assert roles == (fused if family == "phi3" else {"q", "k", "v", "o", "gate", "up", "down", "lm_head"})


def test_records_work_on_meta_models(family: str, tiny_model: Callable[..., nn.Module]) -> None:
    with torch.device("meta"):
        model = type(tiny_model(family))(tiny_model(family).config)
    assert len(list(linear_modules(model))) == len(list(linear_modules(tiny_model(family))))


def test_moe_records(moe_family: str, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(moe_family)
    record = architecture_of(model)
    assert record.family == moe_family
    assert record.experts is not None
    layers = [layer for _, layer in decoder_layers(model)]
    sparse = [layer for layer in layers if has_submodule(layer, record.experts.module)]
    assert len(sparse) == (2 if moe_family == "mixtral" else 1)
    for layer in sparse:
        experts = layer.get_submodule(record.experts.module)
        count, rows, hidden = getattr(experts, record.experts.gate_up).shape
        assert getattr(experts, record.experts.down).shape == (count, hidden, rows // 2)
        assert layer.get_submodule(record.experts.router).weight.shape == (count, hidden)
    assert sum(role == "gate" for _, _, role in linear_modules(model)) == len(layers) - len(sparse)


def test_geometry_reads_head_dim_and_falls_back(tiny_model: Callable[..., nn.Module]) -> None:
    assert geometry(tiny_model("qwen3")) == (128, 4, 2, 64, 192, 2)
    assert geometry(tiny_model("qwen2")).head_dim == 32
    assert geometry(tiny_model("phi3").config).head_dim == 32


UNSUPPORTED = {
    "Gemma2": "normalises the output",
    "Olmo2": "normalises the output",
    "Cohere2": "removes the mean",
    "OPT": "removes the mean",
    "GPT2": "removes the mean",
    "Mamba": "no record of this class",
}


@pytest.mark.parametrize("stem", UNSUPPORTED)
def test_unsupported_families_are_named_with_a_reason(stem: str) -> None:
    config = getattr(transformers, f"{stem}Config")(num_hidden_layers=1)
    cls = getattr(transformers, f"{stem}LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM")
    with torch.device("meta"):
        model = cls(config)
    with pytest.raises(
        NotImplementedError, match=f"{cls.__name__} is not supported: .*{UNSUPPORTED[stem]}.*Llama"
    ) as error:
        architecture_of(model)
    assert all(name in str(error.value) for name in ARCHITECTURES)


def test_bare_and_foreign_modules_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="Linear is not supported"):
        architecture_of(nn.Linear(2, 2))
