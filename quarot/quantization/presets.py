"""Named sets of :class:`~quarot.config.QuarotConfig` fields."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "best": {
        "gptq_quantized_inputs": True,
        "rotation_steps": 150,
        "tune_steps": 150,
        "tune_learning_rate": 0.003,
    },
}
"""``paper``: the defaults. ``best``: the options that cost nothing at run time and help; they cost calibration time.

Left out of ``best``: targets that correct the error made upstream (``gptq_asymmetric``) fitted the calibration text and
cost on another text; clip ratios need no search where they are learned; longer training learns the calibration text by
heart. Figures: docs/accuracy.md.
"""


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
