"""The accuracy experiments: what each setting rotates and quantises. Names are those of the results file.

``-o_none`` rotates the input of o_proj per head only, as the figures of the original simulation were measured; without
it the library's default holds (across heads, or the full width where the number of heads has no Hadamard matrix).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One experiment.

    Attributes:
        table: groups settings in reports.
        rotate: None leaves the model as it is.
        quantize: None leaves it in full precision.
        seeds: counts the runs.
        candidates: seeds that `quarot.search_seed` chooses the rotation's from; 1: it is the run's.
    """

    table: str
    rotate: dict[str, Any] | None
    quantize: dict[str, Any] | None
    seeds: int = 1
    candidates: int = 1


def _bits(w: int, a: int, k: int, v: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"w_bits": w, "a_bits": a, "k_bits": k, "v_bits": k if v is None else v, **fields}


_RTN: dict[str, Any] = {"w_method": "rtn"}
_BEST: dict[str, Any] = {"preset": "best"}
_LAYERWISE: dict[str, Any] = {"preset": "layerwise"}
_DEFAULT: dict[str, Any] = {}
_NONE: dict[str, Any] = {"o_proj_online": "none"}
_ORTHOGONAL: dict[str, Any] = {"r1": "orthogonal"}

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "act_order": {"gptq_act_order": True},
    "damping-0.001": {"gptq_damping": 0.001},
    "damping-0.1": {"gptq_damping": 0.1},
    "clip_norm-2.4": {"w_clip_norm": 2.4},
    "clip_norm-3": {"w_clip_norm": 3.0},
    "weighted_clip": {"gptq_weighted_clip": True},
    "clip_search": {"gptq_clip_search": True},
    "clip_search-act_order": {"gptq_clip_search": True, "gptq_act_order": True},
    "relative_error": {"gptq_relative_error": True},
    "bias_correction": {"gptq_bias_correction": True},
    "quantized_inputs": {"gptq_quantized_inputs": True},
    "asymmetric": {"gptq_quantized_inputs": True, "gptq_asymmetric": True},
    "asymmetric-damping-0.1": {"gptq_quantized_inputs": True, "gptq_asymmetric": True, "gptq_damping": 0.1},
    "a_clip_search": {"a_clip_search": True},
    "a_clip_search-quantized_inputs": {"a_clip_search": True, "gptq_quantized_inputs": True},
    "a_clip_search-asymmetric": {"a_clip_search": True, "gptq_quantized_inputs": True, "gptq_asymmetric": True},
    "a_clip_search-quantized_inputs-relative_error": {
        "a_clip_search": True,
        "gptq_quantized_inputs": True,
        "gptq_relative_error": True,
    },
    "w_bits_budget": {"w_bits_budget": 4.0},
    "kv_bits_budget": {"kv_bits_budget": 4.0},
    "layers": {"gptq_quantized_inputs": True, "layer_steps": 200, "tune_learning_rate": 0.003, "tune_batch_size": 4},
    "rotation": {"gptq_quantized_inputs": True, "rotation_steps": 200, "tune_batch_size": 4},
    "tuning": {
        "gptq_quantized_inputs": True,
        "tune_steps": 200,
        "tune_batch_size": 4,
        "tune_learning_rate": 0.003,
    },
}
"""What each accuracy option adds to plain GPTQ, alone; ``nothing`` is what they are compared with."""

_BASES = {"w4a4kv4": _bits(4, 4, 4), "w4a8kv4": _bits(4, 8, 4), "w4a16": _bits(4, 16, 16)}
_SEED_SEARCH = 6

SETTINGS: dict[str, Setting] = {
    "full": Setting("baseline", None, None),
    "rotated": Setting("baseline", _DEFAULT, None),
    "w4a4kv4-gptq": Setting("main", _DEFAULT, _bits(4, 4, 4), seeds=3),
    "w4a4kv4-rtn": Setting("main", _DEFAULT, _bits(4, 4, 4, **_RTN), seeds=3),
    "w4a8kv4-gptq": Setting("main", _DEFAULT, _bits(4, 8, 4)),
    "w4a16-gptq": Setting("weights only", _DEFAULT, _bits(4, 16, 16)),
    "w8a8kv8-rtn": Setting("six and eight bits", _DEFAULT, _bits(8, 8, 8, **_RTN)),
    "kv4": Setting("cache only", _DEFAULT, _bits(16, 16, 4)),
    "best": Setting("best", _DEFAULT, _bits(4, 4, 4, **_BEST), seeds=3),
    "best-w4a8kv4": Setting("best", _DEFAULT, _bits(4, 8, 4, **_BEST), seeds=3),
    "best-w4a16": Setting("best", _DEFAULT, _bits(4, 16, 16, **_BEST), seeds=3),
    "layerwise": Setting("layerwise", _DEFAULT, _bits(4, 4, 4, **_LAYERWISE), seeds=3),
    "layerwise-w4a8kv4": Setting("layerwise", _DEFAULT, _bits(4, 8, 4, **_LAYERWISE), seeds=3),
    "layerwise-w4a16": Setting("layerwise", _DEFAULT, _bits(4, 16, 16, **_LAYERWISE), seeds=3),
    "w4a4kv4-gptq-o_none": Setting("agreement", _NONE, _bits(4, 4, 4), seeds=3),
    "w4a8kv4-gptq-o_none": Setting("agreement", _NONE, _bits(4, 8, 4)),
    "w4a16-gptq-o_none": Setting("agreement", _NONE, _bits(4, 16, 16)),
    "w4a4kv4-rtn-o_none": Setting("agreement", _NONE, _bits(4, 4, 4, **_RTN), seeds=3),
    "w8a8kv8-rtn-o_none": Setting("agreement", _NONE, _bits(8, 8, 8, **_RTN)),
    "w4a4kv4-gptq-unrotated": Setting("agreement", None, _bits(4, 4, 4)),
    "w4a16-gptq-unrotated": Setting("agreement", None, _bits(4, 16, 16)),
    "w4a16-rtn-unrotated": Setting("agreement", None, _bits(4, 16, 16, **_RTN)),
    "w4a16-gptq-unrotated-norm2.4": Setting("agreement", None, _bits(4, 16, 16, w_clip_norm=2.4)),
    "w4a4kv4-rtn-orthogonal": Setting("rotation", _ORTHOGONAL, _bits(4, 4, 4, **_RTN)),
    "w4a16-rtn-orthogonal": Setting("rotation", _ORTHOGONAL, _bits(4, 16, 16, **_RTN)),
    "w4a4kv4-gptq-g64": Setting("groups", _DEFAULT, _bits(4, 4, 4, w_group_size=64, a_group_size=64)),
    "w4a4kv4-gptq-g192": Setting("groups", _DEFAULT, _bits(4, 4, 4, w_group_size=192, a_group_size=192)),
    "w4a8kv4-gptq-clip1": Setting("clip ratios", _DEFAULT, _bits(4, 8, 4, a_clip=1.0)),
    "w8a8kv8-rtn-clip1": Setting("clip ratios", _DEFAULT, _bits(8, 8, 8, a_clip=1.0, kv_clip=1.0, **_RTN)),
    "w8a8kv8-gptq": Setting("six and eight bits", _DEFAULT, _bits(8, 8, 8)),
    "w6a6kv8-rtn": Setting("six and eight bits", _DEFAULT, _bits(6, 6, 8, **_RTN)),
    "w16a4": Setting("activations only", _DEFAULT, _bits(16, 4, 16)),
    "w4a16-rtn": Setting("weights only", _DEFAULT, _bits(4, 16, 16, **_RTN), seeds=3),
    "w3a16-gptq": Setting("weights only", _DEFAULT, _bits(3, 16, 16)),
    "w2a16-gptq": Setting("weights only", _DEFAULT, _bits(2, 16, 16)),
    "kv4-unrotated": Setting("cache only", None, _bits(16, 16, 4)),
    "kv8": Setting("cache only", _DEFAULT, _bits(16, 16, 8)),
    "kv3": Setting("cache only", _DEFAULT, _bits(16, 16, 3)),
    "kv2": Setting("cache only", _DEFAULT, _bits(16, 16, 2)),
    "k4v2": Setting("cache only", _DEFAULT, _bits(16, 16, 4, 2)),
    "k2v4": Setting("cache only", _DEFAULT, _bits(16, 16, 2, 4)),
    **{
        f"{base}+{option}": Setting("options", _DEFAULT, {**bits, **fields})
        for option, fields in OPTIONS.items()
        for base, bits in _BASES.items()
    },
    **{
        f"{base}+search_seed": Setting("options", _DEFAULT, bits, candidates=_SEED_SEARCH)
        for base, bits in _BASES.items()
    },
}
