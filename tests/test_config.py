"""Every wrong value of a configuration is refused when it is made, by name, whatever field it is for."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from quarot import HadamardSpec, QuarotConfig, RotationPlan

FIELDS = {field.name: str(field.type) for field in dataclasses.fields(QuarotConfig)}
STRANGE = [4.0, "no", True, torch.tensor(4), np.int64(4), object(), float("nan"), [[3]], {3: 4}]


def is_right(kind: str, value: Any) -> bool:
    """Whether a strange value is just what a field of this kind takes (a lone name to ignore counts as a list)."""
    if isinstance(value, str):
        return kind in ("str", "list[str]")
    return {True: "bool", 4.0: "float"}.get(value, "-") in kind if isinstance(value, (bool, float)) else False


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, kind in FIELDS.items() for value in STRANGE if not is_right(kind, value)],
)
def test_values_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        QuarotConfig(**{name: value})


def test_every_field_survives_json_and_pickle() -> None:
    config = QuarotConfig(
        w_bits_choices=(8, 4), kv_bits_by_layer=((4, 2), (8, 8)), ignore={"lm_head"}, overrides={"a": {"w_bits": 8}}
    )
    assert QuarotConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.kv_bits_by_layer == [[4, 2], [8, 8]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ignore": [3]}, r"ignore=\[3\] must be a list\[str\]"),
        ({"ignore": ["re:("]}, "not a regular expression"),
        ({"overrides": {"a": 3}}, r"overrides=.* must be a dict\[str, dict\[str, Any\]\]"),
        ({"overrides": {"a": {"w_bits": 4.0}}}, r"w_bits=4\.0 must be an int"),
        ({"overrides": {"a": {"seed": 1}}}, "cannot be overridden"),
        ({"overrides": ["a"]}, r"overrides=\['a'\] must be a dict"),
        ({"overrides": {5: {"w_bits": 8}}}, r"overrides=.* must be a dict\[str"),
        ({"rotation": "hadamard"}, "rotation='hadamard' must be a dict"),
        ({"format_version": 2}, "format_version=2"),
        ({"tune_seconds": 0}, "must be positive"),
        ({"kv_bits_by_layer": [[4]]}, "a pair"),
        ({"rotation": {}}, "names its family"),
        ({"rotation": {"family": "llama", "seed": "x"}}, "seed='x' must be an int"),
        ({"rotation": {"family": "llama", "r1": "spin"}}, "r1='spin' is not one of"),
        ({"rotation": {"family": "llama", "r3": {"size": 64}}}, "must hold size, order, pow2 and inner"),
        ({"rotation": {"family": "llama", "r3": 64}}, "must hold size, order, pow2 and inner"),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuarotConfig(**fields)


def test_unknown_fields_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"has no wbits; its fields are a_bits, .* w_bits"):
        QuarotConfig().replace(wbits=4)


def test_plans_come_back_from_json() -> None:
    plan = RotationPlan("llama", seed=3, r1="hadamard", r1_hadamard=HadamardSpec(64, 1, 64), notes=("a", "b"))
    assert RotationPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_the_exponent_of_the_clip_search_follows_the_method():
    assert (QuarotConfig().w_clip_norm, QuarotConfig(w_method="rtn").w_clip_norm) == (2.0, 2.4)
    assert QuarotConfig().replace(w_method="rtn").w_clip_norm == 2.4
    assert QuarotConfig(w_clip_norm=3.0).replace(w_method="rtn").w_clip_norm == 3.0
    assert QuarotConfig(overrides={"a": {"w_method": "rtn"}}).for_module("a").w_clip_norm == 2.4
    stored = QuarotConfig(w_method="rtn", w_clip_norm=2.0)
    assert QuarotConfig.from_dict(stored.to_dict()).w_clip_norm == 2.0
