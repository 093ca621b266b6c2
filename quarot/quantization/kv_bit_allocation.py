"""Different bits for the keys and the values of each layer, under one budget of the cache.

As for weights (:mod:`quarot.quantization.bit_allocation`): the divergence with the keys, or the values, of one layer
alone in each width on offer, then the steps that save most for their bits. Keys of all layers and values of all layers
have one size, so the average over them is the size of the cache (scales and offsets, 32 bits a group, on top).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quarot.architectures import architecture_of, decoder_layers
from quarot.calibration.sensitivity import divergences, rounded_cache
from quarot.config import QuarotConfig
from quarot.nn.kv_format import KVFormat
from quarot.quantization.bit_allocation import allocate
from quarot.quantization.progress_store import ProgressStore, kept

logger = logging.getLogger("quarot")


def with_allocated_kv_bits(
    model: Any, config: QuarotConfig, windows: torch.Tensor, store: ProgressStore | None, progress: bool
) -> QuarotConfig:
    """``config`` with ``kv_bits_by_layer`` that meets its ``kv_bits_budget``.

    Args:
        model: rotated, its weights in place; unchanged afterwards.
        windows: int64 [W, T] calibration tokens.
        store: keeps the measured divergences for a resumed run.
    """
    budget = config.kv_bits_budget
    assert budget is not None

    def measured() -> dict[str, torch.Tensor]:
        return {"divergence": cache_divergences(model, config, windows, progress)}

    losses = kept(store, "kv_bit_allocation", measured)["divergence"].tolist()
    chosen = allocate(losses, [1] * len(losses), config.kv_bits_choices, budget)
    pairs = [chosen[index : index + 2] for index in range(0, len(chosen), 2)]
    shown = " ".join(f"{k}/{v}" for k, v in pairs)
    logger.info("kv_bits_budget=%g: key/value bits by layer %s", budget, shown)
    return config.replace(kv_bits_by_layer=pairs)


def cache_divergences(model: Any, config: QuarotConfig, windows: torch.Tensor, progress: bool) -> torch.Tensor:
    """fp32 [2 * layers, choices]: keys of layer 0, values of layer 0, keys of layer 1, ..."""
    attention = architecture_of(model).attention
    base = config.replace(kv_bits_by_layer=[])
    trials = []
    for index, (_, layer) in enumerate(decoder_layers(model)):
        for side in ("k_bits", "v_bits"):
            for bits in config.kv_bits_choices:
                kv_format = KVFormat.from_config(base.replace(**{"k_bits": 16, "v_bits": 16, side: bits}))
                trials.append((index, functools.partial(rounded_cache, layer.get_submodule(attention), kv_format)))
    with _attention_that_rounds(model):
        return divergences(model, trials, windows, progress).view(-1, len(config.kv_bits_choices))


@contextmanager
def _attention_that_rounds(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("quarot")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
