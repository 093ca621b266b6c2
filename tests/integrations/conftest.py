"""Rotated and quantised tiny models, and an oracle for the packed cache that shares no attention code with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import quarot
from quarot.nn.kv_format import KVFormat


class SimulatedCache(DynamicCache):
    """What the packed cache must compute, with plain tensors and transformers' own attention.

    The first tokens are returned as they are, later ones rounded; what is kept is rounded by ``KVFormat.simulate`` and
    rotated back (a power-of-two Hadamard matrix is its own inverse).
    """

    def __init__(self, kv_format: KVFormat) -> None:
        super().__init__()
        self.format = kv_format

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        first = self.get_seq_length(layer_idx) == 0
        key, value = self.format.simulate(key_states, value_states)
        stored = super().update(self.format.rotate_heads(key), value, layer_idx)
        return (key_states, value_states) if first else stored


@pytest.fixture
def simulated_cache() -> Callable[[Any], SimulatedCache]:
    """``simulated_cache(model)``: an oracle for the cache of a quantised model."""
    return lambda model: SimulatedCache(KVFormat.from_config(model.config.quantization_config))


@pytest.fixture
def quantized_model(tiny_model) -> Callable[..., nn.Module]:
    """``quantized_model(family, w_bits=.., ..)``: rotated and rounded to nearest; the paper's bits unless given."""

    def build(family: str = "llama", *, model_options: dict[str, Any] | None = None, **fields: Any) -> nn.Module:
        model = tiny_model(family, **(model_options or {}))
        quarot.rotate_model(model, progress=False)
        quarot.quantize_model(model, **({"w_method": "rtn", "progress": False} | fields))
        model.generation_config.eos_token_id = None
        return model

    return build


@pytest.fixture
def logits() -> Callable[..., torch.Tensor]:
    """``logits(model, ids, **kwargs)`` without a cache."""

    def run(model: nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False, **kwargs).logits

    return run
