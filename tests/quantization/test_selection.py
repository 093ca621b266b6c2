"""What cannot work is refused before anything is calibrated: heads the cache cannot store, overrides for no layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quarot import quantize_model, rotate_model

RTN: dict[str, Any] = {"w_method": "rtn", "progress": False}
NO_CACHE = {"k_bits": 16, "v_bits": 16}


@pytest.mark.parametrize("head_dim", [40, 512])
def test_heads_that_the_cache_cannot_store(head_dim: int, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", head_dim=head_dim)
    rotate_model(model, progress=False)
    for bits in ({}, {"k_bits": 16, "v_bits": 4}, {**NO_CACHE, "kv_bits_by_layer": [[4, 4], [16, 16]]}):
        with pytest.raises(ValueError, match=f"head_dim {head_dim} is not .*k_bits=16, v_bits=16"):
            quantize_model(model, **RTN, **bits)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    quantize_model(model, **RTN, **NO_CACHE)


def test_a_group_of_the_cache_that_does_not_fit(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="key_group 7 must be a multiple of 16"):
        quantize_model(tiny_model("llama"), kv_group_size=7, **RTN)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_override_for_no_layer(family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(family)
    with pytest.raises(ValueError, match=r"'o_proj'\] matches no linear layer.*model.layers.0.*'\.\*o_proj'"):
        quantize_model(model, overrides={"o_proj": {"w_bits": 8}}, **RTN)
    quantize_model(model, overrides={".*o_proj": {"w_bits": 8}}, **RTN)
    assert model.model.layers[0].self_attn.o_proj.w_bits == 8


def test_an_override_for_experts(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral")
    quantize_model(model, overrides={r".*\.experts\.down\.\d": {"w_bits": 8}}, **RTN)
    assert model.model.layers[1].mlp.experts.down[0].w_bits == 8


def test_an_ignored_name_without_a_layer_is_told(tiny_model: Callable[..., Any], caplog: Any) -> None:
    for _ in range(2):  # models of one process, each of which is told
        caplog.clear()
        quantize_model(tiny_model("llama"), ignore=["lm_head", "dwon_proj"], **RTN)
        assert caplog.text.count("'dwon_proj' matches no linear layer") == 1
    assert "'lm_head' matches" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"preset": "layerwise", "layer_steps": 0, "w_method": "rtn"}, "act_order=True, .*relative_error=True"),
        ({"gptq_damping": 0.1, "w_bits": 16}, "gptq_damping=0.1"),
        ({"gptq_act_order": True, "w_method": "rtn", "overrides": {".*q_proj": {"w_method": "gptq"}}}, None),
        ({"w_method": "rtn"}, None),
    ],
    ids=str,
)
def test_fields_of_gptq_without_gptq_are_told(
    fields: dict[str, Any], told: str | None, tiny_model: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    windows = torch.randint(3, 128, (4, 24))
    quantize_model(tiny_model("llama"), calibration=windows, progress=False, **fields)
    found = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    if told is None:
        assert not found
    else:
        assert len(found) == 1
        assert re.search(told, found[0])
        assert f"GPTQ rounds no weight with w_method={fields.get('w_method', 'gptq')!r}" in found[0]
