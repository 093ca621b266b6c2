"""torch.compile without graph breaks: linear layers, whole forwards, decoding on a cache of fixed size."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig

from quarot import QuantKVCache

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 8


def test_quant_linear_with_any_number_of_tokens(quantized_model):
    model = quantized_model(a_bits=8)
    for layer in (model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for count in (1, 2, 5, 33):
            x = torch.randn(count, layer.in_features)
            assert torch.equal(compiled(x), layer(x))


def test_forward_without_cache(quantized_model, logits, token_ids):
    model = quantized_model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(token_ids, use_cache=False).logits
    torch.testing.assert_close(got, logits(model, token_ids))


def test_decoding_on_the_static_cache(family, quantized_model, token_ids):
    model = quantized_model(family, a_bits=16)
    eager = QuantKVCache(model.config, max_batch=2, max_length=48)
    cache = QuantKVCache(model.config, max_batch=2, max_length=48)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for one in (eager, cache):
            token = model(token_ids, past_key_values=one).logits[:, -1:].argmax(-1)
        compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(6):
            expected = model(token, past_key_values=eager).logits
            got = step(token, past_key_values=cache).logits
            torch.testing.assert_close(got, expected)
            token = expected[:, -1:].argmax(-1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiles <= 2
    assert int(cache.get_seq_length()) == token_ids.shape[1] + 6


def test_generate_compiles_by_itself(quantized_model, token_ids):
    model = quantized_model(a_bits=16)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    mask = torch.ones_like(token_ids)
    mask[1, :6] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    expected = model.generate(token_ids, **options)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    got = model.generate(token_ids, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
