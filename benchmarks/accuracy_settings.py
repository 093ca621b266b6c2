"""The accuracy experiments: what each setting rotates and quantises. Names are those of the results file.

``-o_none`` rotates the input of o_proj per head only, as the figures of the original simulation were measured; without
it the library's default holds (across heads, or the full width where the number of heads has no Hadamard matrix).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Setting(NamedTuple):
    """``table`` groups settings in reports; ``rotate`` None leaves the model as it is; ``seeds`` counts the runs."""

    table: str
    rotate: dict[str, Any] | None
    quantize: dict[str, Any] | None
    seeds: int = 1


def _bits(w: int, a: int, k: int, v: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"w_bits": w, "a_bits": a, "k_bits": k, "v_bits": k if v is None else v, **fields}


_RTN: dict[str, Any] = {"w_method": "rtn"}
_BEST: dict[str, Any] = {"preset": "best"}
_DEFAULT: dict[str, Any] = {}
_NONE: dict[str, Any] = {"o_proj_online": "none"}
_ORTHOGONAL: dict[str, Any] = {"r1": "orthogonal"}

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
    "best-w4a8kv4": Setting("best", _DEFAULT, _bits(4, 8, 4, **_BEST)),
    "best-w4a16": Setting("best", _DEFAULT, _bits(4, 16, 16, **_BEST)),
    "w4a4kv4-gptq-o_none": Setting("agreement", _NONE, _bits(4, 4, 4), seeds=3),
    "w4a8kv4-gptq-o_none": Setting("agreement", _NONE, _bits(4, 8, 4)),
    "w4a16-gptq-o_none": Setting("agreement", _NONE, _bits(4, 16, 16)),
    "w4a4kv4-rtn-o_none": Setting("agreement", _NONE, _bits(4, 4, 4, **_RTN), seeds=3),
    "w8a8kv8-rtn-o_none": Setting("agreement", _NONE, _bits(8, 8, 8, **_RTN)),
    "w4a4kv4-gptq-unrotated": Setting("agreement", None, _bits(4, 4, 4)),
    "w4a16-gptq-unrotated": Setting("agreement", None, _bits(4, 16, 16)),
    "w4a16-rtn-unrotated": Setting("agreement", None, _bits(4, 16, 16, **_RTN)),
    "w4a4kv4-rtn-orthogonal": Setting("rotation", _ORTHOGONAL, _bits(4, 4, 4, **_RTN)),
    "w4a16-rtn-orthogonal": Setting("rotation", _ORTHOGONAL, _bits(4, 16, 16, **_RTN)),
    "w4a4kv4-gptq-g64": Setting("groups", _DEFAULT, _bits(4, 4, 4, w_group_size=64, a_group_size=64)),
    "w4a4kv4-gptq-g192": Setting("groups", _DEFAULT, _bits(4, 4, 4, w_group_size=192, a_group_size=192)),
    "w4a8kv4-gptq-clip1": Setting("clip ratios", _DEFAULT, _bits(4, 8, 4, a_clip=1.0)),
    "w8a8kv8-rtn-clip1": Setting("clip ratios", _DEFAULT, _bits(8, 8, 8, a_clip=1.0, kv_clip=1.0, **_RTN)),
    "w8a8kv8-gptq": Setting("six and eight bits", _DEFAULT, _bits(8, 8, 8)),
    "w6a6kv8-rtn": Setting("six and eight bits", _DEFAULT, _bits(6, 6, 8, **_RTN)),
    "w16a4": Setting("activations only", _DEFAULT, _bits(16, 4, 16)),
    "w4a16-rtn": Setting("weights only", _DEFAULT, _bits(4, 16, 16, **_RTN)),
    "w3a16-gptq": Setting("weights only", _DEFAULT, _bits(3, 16, 16)),
    "w2a16-gptq": Setting("weights only", _DEFAULT, _bits(2, 16, 16)),
    "kv4-unrotated": Setting("cache only", None, _bits(16, 16, 4)),
    "kv8": Setting("cache only", _DEFAULT, _bits(16, 16, 8)),
    "kv3": Setting("cache only", _DEFAULT, _bits(16, 16, 3)),
    "kv2": Setting("cache only", _DEFAULT, _bits(16, 16, 2)),
    "k4v2": Setting("cache only", _DEFAULT, _bits(16, 16, 4, 2)),
    "k2v4": Setting("cache only", _DEFAULT, _bits(16, 16, 2, 4)),
}
