"""Settings that differ only in what happens at run time share their rounded weights: quantise once, measure often."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any

from quarot.config import QuarotConfig
from quarot.quantization.presets import with_preset
from quarot.rotation.planning import SWITCHES
from quarot.rotation.rotate import rotate_model

RUN_TIME = ("a_bits", "a_clip", "a_group_size", "k_bits", "v_bits", "kv_group_size", "k_clip", "v_clip", "kv_clip")
"""Fields that plain GPTQ and rounding do not see: activations and the cache are in full precision meanwhile."""

_SEES_ACTIVATIONS = (
    "gptq_quantized_inputs",
    "gptq_asymmetric",
    "a_clip_search",
    "tune_steps",
    "rotation_steps",
    "layer_steps",
    "w_bits_budget",
    "kv_bits_budget",
    "kv_bits_by_layer",
)


def shares_weights(quantize: dict[str, Any]) -> bool:
    """Whether the codes of a setting do not depend on its run-time fields."""
    return "preset" not in quantize and not any(quantize.get(name) for name in _SEES_ACTIVATIONS)


def weights_of(quantize: dict[str, Any]) -> dict[str, Any]:
    """The fields of a setting that its weights depend on."""
    if not shares_weights(quantize):
        return dict(quantize)
    kept = {name: value for name, value in quantize.items() if name not in RUN_TIME}
    if kept.get("w_bits") != 16 or kept.get("overrides") or kept.get("lm_head_bits", 16) < 16:
        return kept
    # No weight is rounded, so it does not matter how; which layers round their inputs does.
    return {"w_bits": 16, "w_method": "rtn"} | {name: kept[name] for name in ("ignore",) if name in kept}


def shareable(quantize: dict[str, Any]) -> dict[str, Any]:
    """What to quantise a model with so that `retarget` can follow: integer layers also where none would be needed."""
    return {**weights_of(quantize), "a_bits": 4} if shares_weights(quantize) else dict(quantize)


def weights_key(rotate: dict[str, Any] | None, quantize: dict[str, Any] | None, seed: int) -> str:
    """Equal for models with equal weights, whether fields are given or left at their defaults."""
    return json.dumps([rotate, resolved(None if quantize is None else weights_of(quantize)), seed], sort_keys=True)


def resolved(quantize: dict[str, Any] | None) -> dict[str, Any] | None:
    """Every field of a setting as it counts: the preset's, those given, and the defaults of the rest."""
    if quantize is None:
        return None
    fields = dict(quantize)
    return with_preset(None, fields.pop("preset", None), fields).to_dict()


def options_digest(rotate: dict[str, Any] | None, quantize: dict[str, Any] | None, *more: Any) -> str:
    """Equal for settings that do the same to a model, whether they say so or leave it to a default.

    What is off (None, False, 0, empty) does not count, so that an option added later, and left off, changes no digest.

    Args:
        rotate, quantize: keywords of :func:`quarot.rotate_model` and :func:`quarot.quantize_model`, or None.
        more: what else is done, as JSON has it.
    """
    defaults = inspect.signature(rotate_model).parameters
    switches = None if rotate is None else {**{name: defaults[name].default for name in SWITCHES}, **rotate}
    parts = json.dumps([_on(switches), _on(resolved(quantize)), *more], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:12]


def _on(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    if fields is None:
        return None
    return {name: value for name, value in fields.items() if value and name != "format_version"}


def run_time_of(quantize: dict[str, Any]) -> dict[str, Any]:
    """All run-time fields of a setting, those left at their defaults included."""
    config = QuarotConfig(**{name: value for name, value in quantize.items() if name in RUN_TIME})
    return {name: getattr(config, name) for name in RUN_TIME}


def retarget(model: Any, quantize: dict[str, Any]) -> None:
    """Give a quantised model the run-time fields of another setting with the same weights, in place.

    Raises:
        ValueError: activation groups that do not fit a layer, with its name, or activations to round without an integer
            layer to do it; the model is unchanged.
    """
    from quarot.integrations.transformers import attach
    from quarot.nn.quant_linear import QuantLinear
    from quarot.quantization.fit import check_fits

    config = model.config.quantization_config.replace(**run_time_of(quantize))
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    if config.a_bits < 16 and not layers:
        raise ValueError(f"no layer of this model can round to a_bits={config.a_bits}: quantise it with shareable(...)")
    for name, module in layers:
        check_fits(name, module.in_features, config.for_module(name))
    for name, module in layers:
        own = config.for_module(name)
        module.a_bits, module.a_clip, module.a_group_size = own.a_bits, own.a_clip, own.a_group_size
    attach(model, config)
