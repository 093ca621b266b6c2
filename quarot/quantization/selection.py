"""Which linear layers of a model are quantised, and every refusal that needs no data."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quarot.architectures import Architecture, decoder_layers, geometry, linear_modules
from quarot.config import QuarotConfig
from quarot.nn.kv_format import check_cache
from quarot.nn.quant_linear import QuantLinear, linear_weight
from quarot.nn.rotated_linear import RotatedLinear
from quarot.quantization.fit import check_fits

logger = logging.getLogger("quarot")


def selected(
    model: nn.Module, record: Architecture, config: QuarotConfig, in_memory: bool = True
) -> dict[str, QuarotConfig]:
    """The settings of every linear layer to quantise, by name in the model; ``in_memory``: their weights must be.

    Raises:
        NotImplementedError: a model with experts is to be tuned.
        ValueError: bits of the cache for another number of layers, or for heads that it cannot store; overrides for no
            layer; a layer is quantised already, is of a foreign kind, is offloaded, or does not fit its settings; or
            the head is to be quantised while it shares its weight with the embedding.
    """
    if record.experts is not None and config.tune_steps:
        raise NotImplementedError(f"{record.family}: a mixture of experts cannot be tuned; set tune_steps=0")
    count = sum(1 for _ in decoder_layers(model))
    check_cache(config, count, geometry(model).head_dim)
    if names := all_names(model, record):
        check_overrides(names, config)
    chosen = {}
    for name, module, role in linear_modules(model):
        own = config.for_module(name)
        if role.startswith("expert"):
            own = own.replace(a_clip_search=False)  # too few tokens for some experts; all take a_clip
        if isinstance(module, QuantLinear):
            raise ValueError(f"{name} is quantised already; quantize_model needs the full-precision model")
        if config.ignores(name) or own.w_bits == own.a_bits == 16:
            continue
        if not isinstance(module, (nn.Linear, RotatedLinear)):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which cannot be quantised; load the model unquantised"
            )
        weight = linear_weight(module)
        if in_memory and weight.is_meta:
            raise ValueError(f"{name} is offloaded (a meta tensor); load the whole model into memory, and use device=")
        check_fits(name, weight.shape[1], own)
        chosen[name] = own
    if record.lm_head in chosen and linear_weight(model.get_submodule(record.lm_head)) is linear_weight(
        model.get_submodule(record.embed)
    ):
        raise ValueError(
            f"{record.lm_head} shares its weight with the embedding; rotate_model unties them, or ignore it"
        )
    return chosen


def all_names(model: nn.Module, record: Architecture) -> list[str]:
    """Of every linear layer; none while those of experts are missing, which are not split into layers yet."""
    names = {name: role for name, _, role in linear_modules(model)}
    whole = record.experts is None or any(role.startswith("expert") for role in names.values())
    return list(names) if whole else []


def check_overrides(names: Sequence[str], config: QuarotConfig) -> None:
    """Raise ValueError for an override that matches none of these layers: the model would not be what was asked for."""
    for pattern in config.overrides:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"overrides[{pattern!r}] matches no linear layer; patterns are matched with whole names, such as "
                f"{names[0]!r}: write for instance {'.*' + pattern!r}"
            )


def tell_unused(
    model: nn.Module, record: Architecture, configs: Mapping[str, QuarotConfig], config: QuarotConfig
) -> None:
    """Warn of what was asked for and changes nothing: ``ignore`` without such a layer, ``gptq_*`` without GPTQ."""
    names = all_names(model, record)
    for entry in config.ignore if names else ():
        alone = config.replace(ignore=[entry], overrides={}, lm_head_bits=16)
        if not any(map(alone.ignores, names)):
            logger.warning("ignore: %r matches no linear layer of this model, whose names are like %s", entry, names[0])
    by_gptq = any(own.w_bits < 16 and own.w_method == "gptq" for own in configs.values())
    asked = {} if by_gptq else {name: value for own in configs.values() for name, value in _gptq_fields(own).items()}
    if asked:
        shown = ", ".join(f"{name}={value}" for name, value in asked.items())
        recipe = f"w_method={config.w_method!r} and w_bits={config.w_bits}"
        logger.warning("%s: no effect, since GPTQ rounds no weight with %s", shown, recipe)


def _gptq_fields(config: QuarotConfig) -> dict[str, Any]:
    """Those that are not at their defaults."""
    fields = [field.name for field in dataclasses.fields(QuarotConfig) if field.name.startswith("gptq_")]
    defaults = QuarotConfig()
    return {name: getattr(config, name) for name in fields if getattr(config, name) != getattr(defaults, name)}
