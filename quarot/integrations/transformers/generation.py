"""Gives a model its :class:`~quarot.nn.quant_kv_cache.QuantKVCache` when the caller brings no cache.

``generate`` picks its cache in ``_prepare_cache_for_generation`` (private to transformers: only this file knows it, and
tests check it); a plain forward makes one inside the decoder, so a forward pre-hook passes one in before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from quarot.nn.quant_kv_cache import QuantKVCache

_METHOD = "_prepare_cache_for_generation"


def install(model: Any) -> None:
    """Make ``model.generate`` and forwards with ``use_cache`` use a packed cache. Idempotent; survives copies."""
    if _METHOD in vars(model):
        return
    model._prepare_cache_for_generation = functools.partial(prepare_cache, model)
    handle = model.register_forward_pre_hook(pass_cache, with_kwargs=True)
    model._quarot_cache_hook = handle.id


def uninstall(model: Any) -> None:
    """Undo :func:`install`."""
    if _METHOD in vars(model):
        del model._prepare_cache_for_generation
        model._forward_pre_hooks.pop(model._quarot_cache_hook, None)
        model._forward_pre_hooks_with_kwargs.pop(model._quarot_cache_hook, None)
        del model._quarot_cache_hook


def prepare_cache(
    self: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Takes the place of ``GenerationMixin._prepare_cache_for_generation``.

    ``cache_implementation`` keeps its meaning: None, "dynamic" and "quantized" give a growing packed cache, "offloaded"
    one that lives on the CPU between uses, "static" one of fixed size that generate() may compile.
    """
    wanted = generation_config.cache_implementation
    ours = (None, "dynamic", "dynamic_full", "quantized", "offloaded", "static", "offloaded_static")
    if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False or wanted not in ours:
        type(self)._prepare_cache_for_generation(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        return
    static = wanted is not None and "static" in wanted
    length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
    repeats = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    cache = QuantKVCache(
        self.config,
        reserve=0 if static else max_cache_length,
        max_batch=batch_size * repeats if static else None,
        max_length=length if static else None,
        offloading=wanted is not None and "offloaded" in wanted,
    )
    cache._expect_repeats(repeats)
    model_kwargs["past_key_values"] = cache


def pass_cache(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: put a packed cache in the place of the one the decoder would make.

    Outside generate() nobody says whether the logits or the cache are wanted, so its prefill reads codes: logits are
    then those of the quantised model, as with ``use_cache=False``.
    """
    cache = kwargs.get("past_key_values")
    if isinstance(cache, QuantKVCache):
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not torch.compiler.is_compiling():
            cache.check_mask(mask)
        return None
    use_cache = kwargs.get("use_cache")
    use_cache = model.config.use_cache if use_cache is None else use_cache
    if cache is not None or len(args) > 1 or not use_cache or model.training or torch.compiler.is_compiling():
        return None
    return args, {**kwargs, "past_key_values": QuantKVCache(model.config, prefill="quantized")}
