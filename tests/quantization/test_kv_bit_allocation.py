"""Key and value bits by layer: measured, allocated under a budget, saved, and used by cache and attention alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

import quarot
from quarot.config import QuarotConfig
from quarot.quantization.kv_bit_allocation import cache_divergences
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

WINDOWS = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(5))
CACHE_ONLY: dict[str, Any] = {"w_bits": 16, "a_bits": 16, "calibration": WINDOWS, "progress": False}
MIXED = [[2, 8], [4, 3]]


def _divergence(model: Any, target: torch.Tensor) -> float:
    with torch.no_grad():
        own = F.log_softmax(model(WINDOWS, use_cache=False).logits, -1)
    return (target.exp() * (target - own)).sum(-1).mean().item()


def test_each_measurement_is_that_of_one_layers_keys_or_values(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    with torch.no_grad():
        target = F.log_softmax(model(WINDOWS, use_cache=False).logits, -1)
    config = QuarotConfig(**{k: v for k, v in CACHE_ONLY.items() if k in ("w_bits", "a_bits")}, kv_bits_choices=[2, 4])
    # Clip ratios are those of the bits on offer, not of the configuration's own.
    config = config.replace(k_bits=8, v_bits=8, rotation=model.config.quantization_config.rotation)
    found = cache_divergences(model, config, WINDOWS, progress=False)
    assert model.config._attn_implementation == "sdpa"
    assert found.shape == (4, 2)
    for row, pairs in enumerate(([[2, 16], [16, 16]], [[16, 2], [16, 16]], [[16, 16], [2, 16]], [[16, 16], [16, 2]])):
        alone = quantize_model(copy.deepcopy(model), kv_bits_by_layer=pairs, **CACHE_ONLY)
        # Sixteen bits in the cache are half precision, which the unrounded layers of a measurement are not.
        assert found[row, 0].item() == pytest.approx(_divergence(alone, target), rel=0.02)
        assert found[row, 0] > found[row, 1]


def test_a_budget_is_met_and_beats_equal_bits(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    rotate_model(model, progress=False)
    with torch.no_grad():
        target = F.log_softmax(model(WINDOWS, use_cache=False).logits, -1)
    mixed = quantize_model(copy.deepcopy(model), kv_bits_budget=3.0, **CACHE_ONLY)
    pairs = mixed.config.quantization_config.kv_bits_by_layer
    assert len(pairs) == 4
    assert len({tuple(pair) for pair in pairs}) > 1
    assert sum(map(sum, pairs)) <= 3.0 * 8
    equal = quantize_model(model, k_bits=3, v_bits=3, **CACHE_ONLY)
    assert _divergence(mixed, target) < _divergence(equal, target)


def test_cache_and_attention_use_the_bits_of_each_layer(
    family: str, tiny_model: Callable[..., Any], token_ids: torch.Tensor, tmp_path: Any
) -> None:
    """Prefill on codes equals the attention without a cache; pages have the size of their bits; a reload is equal."""
    model = tiny_model(family)
    rotate_model(model, progress=False)
    quantize_model(model, kv_bits_by_layer=MIXED, w_method="rtn", progress=False)
    cache = quarot.QuantKVCache(model.config, prefill="quantized")
    with torch.no_grad():
        without = model(token_ids, use_cache=False).logits
        with_cache = model(token_ids, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(with_cache, without, rtol=1e-3, atol=1e-3)
    formats = [(layer.format.key_bits, layer.format.value_bits) for layer in cache.layers]
    assert formats == [(2, 8), (4, 3)]
    sizes = [layer.pool[0].numel() for layer in cache.layers]
    assert sizes[0] > sizes[1]
    assert "by layer" in repr(cache)
    tokens = model.generate(token_ids[:1, :5], max_new_tokens=4, do_sample=False, eos_token_id=None)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(token_ids, use_cache=False).logits, without)
    assert torch.equal(again.generate(token_ids[:1, :5], max_new_tokens=4, do_sample=False, eos_token_id=None), tokens)


def test_bits_that_were_found_are_kept(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of a checkpoint makes the same model again: its budget is spent."""
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    first = quantize_model(copy.deepcopy(model), **{**CACHE_ONLY, "kv_bits_budget": 3.5})
    config = first.config.quantization_config
    monkeypatch.setattr("quarot.quantization.kv_bit_allocation.cache_divergences", None)
    assert quantize_model(model, config, progress=False).config.quantization_config == config


@pytest.mark.parametrize("fields", [{"kv_bits_by_layer": [[2, 3], [4, 2]]}, {"kv_bits_budget": 3.0}], ids=str)
def test_training_knows_the_bits_of_each_layer(fields: dict[str, Any], tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    windows = torch.randint(3, 128, (48, 48), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        target = F.log_softmax(model(WINDOWS, use_cache=False).logits, -1)
    common: dict[str, Any] = {"w_method": "rtn", "calibration": windows, "progress": False, **fields}
    plain = quantize_model(copy.deepcopy(model), **common)
    trained = quantize_model(copy.deepcopy(model), rotation_steps=10, tune_steps=40, tune_learning_rate=0.01, **common)
    assert trained.config.quantization_config.kv_bits_by_layer == plain.config.quantization_config.kv_bits_by_layer
    assert _divergence(trained, target) < 0.9 * _divergence(plain, target)


def test_a_resumed_run_does_not_measure_again(
    tiny_model: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    fields: dict[str, Any] = {**CACHE_ONLY, "kv_bits_budget": 3.5, "resume_dir": tmp_path}
    first = quantize_model(copy.deepcopy(model), **fields)
    monkeypatch.setattr("quarot.quantization.kv_bit_allocation.cache_divergences", None)
    assert quantize_model(model, **fields).config.quantization_config == first.config.quantization_config


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kv_bits_budget": 1.5}, ValueError, "kv_bits_budget=1.5 is below"),
        ({"kv_bits_budget": 4.0, "kv_bits_choices": [5]}, ValueError, r"kv_bits_choices=\[5\]"),
        ({"kv_bits_by_layer": [[4, 4]]}, ValueError, "1 pairs for 2 decoder layers"),
        ({"kv_bits_by_layer": [[4, 5], [4, 4]]}, ValueError, "must hold a pair"),
        ({"kv_bits_budget": 4.0, "calibration": None}, ValueError, "calibration text is needed for kv_bits_budget"),
        ({"kv_bits_budget": 4.0, "kv_bits_by_layer": [[4, 4], [8, 8]]}, ValueError, "6 bits on average, more than kv"),
    ],
)
def test_what_cannot_be_done_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    with pytest.raises(error, match=message):
        quantize_model(model, **{**CACHE_ONLY, **fields})
