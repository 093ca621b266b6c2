"""Which linear layers of a model are quantised, and every refusal that needs no data."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping, Sequence

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
    linears = list(linear_modules(model))
    if record.experts is None or any(role.startswith("expert") for _, _, role in linears):  # else names are missing
        check_patterns([name for name, _, _ in linears], config)
    chosen = {}
    for name, module, role in linears:
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


def check_patterns(names: Sequence[str], config: QuarotConfig) -> None:
    """Warn of entries of ``ignore`` that match none of the linear layers ``names``.

    Raises:
        ValueError: an override that matches none: the model would not be what was asked for.
    """
    for pattern in config.overrides:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"overrides[{pattern!r}] matches no linear layer; patterns are matched with whole names, such as "
                f"{names[0]!r}: write for instance {'.*' + pattern!r}"
            )
    for entry in config.ignore:
        if not any(config.replace(ignore=[entry], overrides={}, lm_head_bits=16).ignores(name) for name in names):
            _warn_once(f"ignore: {entry!r} matches no linear layer of this model, whose names are like {names[0]}")


def tell_unused(configs: Mapping[str, QuarotConfig]) -> None:
    """Warn of ``gptq_*`` fields that somebody asked for while nothing is rounded by GPTQ."""
    if any(c.w_bits < 16 and c.w_method == "gptq" for c in configs.values()):
        return
    defaults = QuarotConfig()
    names = [field.name for field in dataclasses.fields(QuarotConfig) if field.name.startswith("gptq_")]
    asked = {n: getattr(c, n) for c in configs.values() for n in names if getattr(c, n) != getattr(defaults, n)}
    if asked:
        fields = ", ".join(f"{name}={value}" for name, value in asked.items())
        logger.warning("%s: no effect, since no weight is rounded by GPTQ (w_method='gptq')", fields)


@functools.cache  # a run selects its layers more than once
def _warn_once(message: str) -> None:
    logger.warning(message)
