"""Named sets of :class:`~quarot.config.QuarotConfig` fields."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "best": {
        "gptq_quantized_inputs": True,
        "gptq_asymmetric": True,
        "gptq_act_order": True,
        "gptq_weighted_clip": True,
        "a_clip_search": True,
        "tune_steps": 300,
    },
}
"""``paper``: the defaults. ``best``: the options that cost nothing at run time and help; they cost calibration time."""


def preset_fields(name: str | None) -> dict[str, Any]:
    """The fields of a preset; none for None.

    Raises:
        ValueError: an unknown name.
    """
    if name is None:
        return {}
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is not known; choose from {list(PRESETS)}")
    return PRESETS[name]
