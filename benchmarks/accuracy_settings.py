"""The accuracy experiments: what each setting rotates and quantises. Names are those of the results file."""

from __future__ import annotations

from typing import Any, NamedTuple

_OFF: dict[str, Any] = {"w_bits": 16, "a_bits": 16, "k_bits": 16, "v_bits": 16}
_RTN: dict[str, Any] = {"w_method": "rtn"}


class Setting(NamedTuple):
    """``table`` groups settings in reports; ``rotate`` None leaves the model as it is; ``seeds`` counts the runs."""

    table: str
    rotate: dict[str, Any] | None
    quantize: dict[str, Any] | None
    seeds: int = 1


def _bits(w: int, a: int, kv: int, **fields: Any) -> dict[str, Any]:
    return {"w_bits": w, "a_bits": a, "k_bits": kv, "v_bits": kv, **fields}


HEADS: dict[str, Any] = {"o_proj_online": "none"}
FULL: dict[str, Any] = {"o_proj_online": "full"}

SETTINGS: dict[str, Setting] = {
    "full": Setting("baseline", None, None),
    "rotated": Setting("baseline", HEADS, None),
    "w4a4kv4-gptq": Setting("main", HEADS, _bits(4, 4, 4), seeds=3),
    "w4a4kv4-gptq-o_full": Setting("main", FULL, _bits(4, 4, 4), seeds=3),
    "w4a4kv4-rtn": Setting("main", HEADS, _bits(4, 4, 4, **_RTN), seeds=3),
    "w4a4kv4-rtn-o_full": Setting("main", FULL, _bits(4, 4, 4, **_RTN), seeds=3),
    "w4a4kv4-gptq-unrotated": Setting("main", None, _bits(4, 4, 4)),
    "w4a4kv4-rtn-orthogonal": Setting("rotation", {**HEADS, "r1": "orthogonal"}, _bits(4, 4, 4, **_RTN)),
    "w4a4kv4-gptq-g64": Setting("groups", HEADS, _bits(4, 4, 4, w_group_size=64, a_group_size=64)),
    "w4a4kv4-gptq-g192": Setting("groups", HEADS, _bits(4, 4, 4, w_group_size=192, a_group_size=192)),
    "w4a8kv4-gptq": Setting("eight-bit activations", HEADS, _bits(4, 8, 4), seeds=3),
    "w4a8kv4-gptq-o_full": Setting("eight-bit activations", FULL, _bits(4, 8, 4)),
    "w4a8kv4-gptq-clip1": Setting("eight-bit activations", HEADS, _bits(4, 8, 4, a_clip=1.0)),
    "w8a8kv8-rtn": Setting("six and eight bits", HEADS, _bits(8, 8, 8, **_RTN)),
    "w8a8kv8-rtn-clip1": Setting("six and eight bits", HEADS, _bits(8, 8, 8, a_clip=1.0, kv_clip=1.0, **_RTN)),
    "w8a8kv8-gptq": Setting("six and eight bits", HEADS, _bits(8, 8, 8)),
    "w6a6kv6-rtn": Setting("six and eight bits", HEADS, _bits(6, 6, 8, **_RTN)),
    "w16a4": Setting("activations only", HEADS, _bits(16, 4, 16)),
    "w4a16-gptq": Setting("weights only", HEADS, _bits(4, 16, 16), seeds=3),
    "w4a16-gptq-o_full": Setting("weights only", FULL, _bits(4, 16, 16)),
    "w4a16-gptq-unrotated": Setting("weights only", None, _bits(4, 16, 16)),
    "w4a16-rtn": Setting("weights only", HEADS, _bits(4, 16, 16, **_RTN)),
    "w4a16-rtn-unrotated": Setting("weights only", None, _bits(4, 16, 16, **_RTN)),
    "w4a16-rtn-orthogonal": Setting("weights only", {**HEADS, "r1": "orthogonal"}, _bits(4, 16, 16, **_RTN)),
    "w3a16-gptq": Setting("weights only", HEADS, _bits(3, 16, 16)),
    "w2a16-gptq": Setting("weights only", HEADS, _bits(2, 16, 16)),
    "kv4": Setting("cache only", HEADS, _bits(16, 16, 4)),
    "kv4-unrotated": Setting("cache only", None, _bits(16, 16, 4)),
    "kv8": Setting("cache only", HEADS, _bits(16, 16, 8)),
    "kv3": Setting("cache only", HEADS, _bits(16, 16, 3)),
    "kv2": Setting("cache only", HEADS, _bits(16, 16, 2)),
    "k4v2": Setting("cache only", HEADS, {**_OFF, "k_bits": 4, "v_bits": 2}),
    "k2v4": Setting("cache only", HEADS, {**_OFF, "k_bits": 2, "v_bits": 4}),
}
