"""Named sets of :class:`~quarot.config.QuarotConfig` fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quarot.config import QuarotConfig

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "layerwise": {
        "gptq_quantized_inputs": True,
        "gptq_act_order": True,
        "gptq_relative_error": True,
        "a_clip_search": True,
        "layer_steps": 200,
        "tune_learning_rate": 0.003,
        "tune_batch_size": 4,
    },
    "best": {
        "gptq_quantized_inputs": True,
        "rotation_steps": 200,
        "tune_steps": 200,
        "tune_learning_rate": 0.003,
        "tune_batch_size": 4,
    },
}
"""``paper``: the defaults. The others cost calibration time and nothing at run time. ``layerwise``: what helps with one
decoder layer at a time at work, so for models of any size; with 4- and 6-bit activations it trains each layer, which on
a CPU takes hours (``layer_steps=0`` does without). ``best``: training of the whole model on one device.

Left out of ``best``: targets that correct the error made upstream (``gptq_asymmetric``) gain nothing where codes are
trained afterwards, layers that are trained one by one before (``layer_steps``) nothing on other texts; clip ratios need
no search where they are learned. Figures: docs/accuracy.md.
"""

_GENTLE: dict[str, dict[str, Any]] = {
    "layerwise": {"a_clip_search": False, "gptq_asymmetric": True, "layer_steps": 0},
    "best": {"rotation_steps": 60, "tune_steps": 100, "tune_learning_rate": 0.001},
}
"""Instead, where activations keep 8 bits or more: there is less to win back, and less to lose on other texts. The error
made upstream is small enough then to be corrected; at 4 bits that fits the calibration text only. Training layers
gains on text of the calibration's kind only there."""


def with_preset(config: QuarotConfig | None, name: str | None, fields: Mapping[str, Any]) -> QuarotConfig:
    """``config`` (None: the defaults) with the fields of a preset (None: none), and single ``fields`` on top of them.

    Raises:
        TypeError: ``config`` is something else.
        ValueError: an unknown preset, or fields that do not fit.
    """
    if not (config is None or isinstance(config, QuarotConfig)):
        raise TypeError(f"config must be a QuarotConfig, not {config!r}; QuarotConfig.from_dict makes one of a dict")
    config = config or QuarotConfig()
    if name is not None and name not in list(PRESETS):  # not hashed: it may be anything
        raise ValueError(f"preset={name!r} is not known; choose from {list(PRESETS)}")
    chosen = dict(PRESETS.get(name or "", {}))
    bits = fields.get("a_bits", config.a_bits)
    if isinstance(bits, int) and bits >= 8:
        chosen |= _GENTLE.get(name or "", {})
    return config.replace(**{**chosen, **fields})
