"""Every mode of generate() on the packed cache, against transformers' own attention on the same rounded numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from quarot import QuantKVCache

NEW = 10


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)


def plain(model):
    """The same weights and activations with transformers' attention, nothing injected."""
    other = copy.deepcopy(model)
    del other._prepare_cache_for_generation
    other.set_attn_implementation("sdpa")
    return other


def sequential(model, cache, ids, count=NEW, **options):
    """Logits of greedy decoding, one token at a time, and the tokens."""
    rows, tokens = [], ids
    with torch.no_grad():
        out = model(ids, past_key_values=cache, **options)
        for _ in range(count):
            rows.append(out.logits[:, -1])
            token = out.logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, token], 1)
            out = model(token, past_key_values=cache)
    return torch.stack(rows, 1), tokens


def test_greedy_equals_the_simulation(family, quantized_model, simulated_cache, token_ids):
    model = quantized_model(family)
    expected, tokens = sequential(plain(model), simulated_cache(model), token_ids)
    got, _ = sequential(model, QuantKVCache(model.config), token_ids)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert torch.equal(greedy(model, token_ids), tokens)
    assert torch.equal(greedy(model, token_ids, past_key_values=QuantKVCache(model.config, page_size=16)), tokens)


def test_generate_makes_a_packed_cache(quantized_model, token_ids):
    model = quantized_model()
    out = greedy(model, token_ids, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, QuantKVCache)
    assert out.past_key_values.get_seq_length() == token_ids.shape[1] + NEW - 1
    with torch.no_grad():
        assert isinstance(model(token_ids).past_key_values, QuantKVCache)
        assert model(token_ids, use_cache=False).past_key_values is None
        assert isinstance(model(token_ids, past_key_values=DynamicCache()).past_key_values, DynamicCache)


@torch.no_grad()
def test_a_forward_means_the_same_however_it_is_called(quantized_model, logits, token_ids):
    model = quantized_model()
    expected = logits(model, token_ids)
    torch.testing.assert_close(model(token_ids).logits, expected)
    torch.testing.assert_close(model(token_ids, torch.ones_like(token_ids)).logits, expected)
    inner = model.model(input_ids=token_ids, use_cache=True).last_hidden_state
    torch.testing.assert_close(model.lm_head(inner), expected)


@torch.no_grad()
def test_an_interrupt_leaves_the_cache_as_it_was(quantized_model, token_ids, monkeypatch):
    model = quantized_model()
    cache = QuantKVCache(model.config)
    model(token_ids, past_key_values=cache)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.layers[1], "store", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(token_ids, past_key_values=cache)
    assert cache.get_seq_length() == token_ids.shape[1]
    monkeypatch.undo()
    monkeypatch.setattr("quarot.runtime.decode_step.rope_kv_append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(token_ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == token_ids.shape[1]


def test_forward_without_cache_measures_the_rounded_cache(family, quantized_model, logits, token_ids):
    model = quantized_model(family, k_bits=2, v_bits=3)
    alone = logits(model, token_ids)
    with torch.no_grad():
        cached = model(token_ids).logits
        exact = model(token_ids, past_key_values=QuantKVCache(model.config)).logits
    torch.testing.assert_close(alone, cached)
    assert not torch.allclose(alone, exact, rtol=1e-3)


def test_left_padded_batch_equals_each_prompt_alone(family, quantized_model):
    # 8-bit activations: at 4 bits a rounding boundary crossed by 1e-7 changes tokens of random models
    model = quantized_model(family, w_bits=8, a_bits=16)
    prompts = [torch.randint(3, 128, (length,)) for length in (3, 9, 17)]
    longest = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0)) for p in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(p)).long() for p in prompts])
    together = greedy(model, ids, attention_mask=mask)
    for prompt, row in zip(prompts, together, strict=True):
        assert torch.equal(greedy(model, prompt[None])[0, -NEW:], row[-NEW:])


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=["beams", "return2"]
)
def test_beams_on_shared_pages(options, quantized_model, simulated_cache, token_ids):
    model = quantized_model()
    expected = greedy(plain(model), token_ids, past_key_values=simulated_cache(model), **options)
    assert torch.equal(greedy(model, token_ids, **options), expected)
    assert torch.equal(greedy(model, token_ids, cache_implementation="static", **options), expected)


def test_sampling_repeats_with_the_seed(quantized_model, simulated_cache, token_ids):
    model = quantized_model()
    options = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 3, "top_k": 20}
    torch.manual_seed(3)
    expected = plain(model).generate(token_ids, past_key_values=simulated_cache(model), **options)
    torch.manual_seed(3)
    assert torch.equal(model.generate(token_ids, **options), expected)


@pytest.mark.parametrize("chunk", [4, 9])
def test_chunked_prefill_of_few_tokens_equals_decoding_them(chunk, quantized_model, token_ids):
    model = quantized_model(a_bits=16)
    with torch.no_grad():
        cache, one = QuantKVCache(model.config), QuantKVCache(model.config)
        first = token_ids[:, :4]
        model(first, past_key_values=cache)
        model(first, past_key_values=one)
        together = model(token_ids[:, 4 : 4 + chunk], past_key_values=cache).logits
        apart = [model(token_ids[:, i : i + 1], past_key_values=one).logits for i in range(4, 4 + chunk)]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)


def test_chunked_prefill_of_many_tokens(family, tiny_model):
    model = tiny_model(family)
    ids = torch.randint(3, 128, (2, 60))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for options in ({"attention_mask": mask}, {}):
            place = {"position_ids": position} if options else {}
            whole = model(ids, use_cache=False, **options, **place).logits
            cache = QuantKVCache(model=model, key_bits=16, value_bits=16)
            parts = []
            for start, stop in ((0, 20), (20, 40), (40, 60)):
                cut = {name: x[:, :stop] for name, x in options.items()}
                cut |= {name: x[:, start:stop] for name, x in place.items()}
                parts.append(model(ids[:, start:stop], past_key_values=cache, **cut).logits)
            got = torch.cat(parts, 1)[mask.bool()] if options else torch.cat(parts, 1)
            whole = whole[mask.bool()] if options else whole
            torch.testing.assert_close(got, whole, rtol=0, atol=2e-3 * whole.abs().max().item())


def test_chunked_prefill_by_generate(quantized_model, token_ids):
    model = quantized_model(a_bits=16, k_bits=8, v_bits=8)
    ids = token_ids.repeat(1, 3)
    out = greedy(model, ids, prefill_chunk_size=20, return_dict_in_generate=True)
    assert out.past_key_values.get_seq_length() == ids.shape[1] + NEW - 1


def test_multi_turn_reuses_the_cache(quantized_model, token_ids):
    model = quantized_model(a_bits=16)
    cache = QuantKVCache(model.config)
    first = greedy(model, token_ids, past_key_values=cache)
    second = torch.cat([first, torch.randint(3, 128, (2, 30))], 1)
    out = greedy(model, second, past_key_values=cache)
    assert out.shape[1] == second.shape[1] + NEW
    assert cache.get_seq_length() == out.shape[1] - 1
    twin = QuantKVCache(model.config)
    greedy(model, token_ids, past_key_values=twin)
    assert torch.equal(greedy(model, second, past_key_values=twin), out)


def test_prompt_lookup_and_assistant_equal_greedy(quantized_model, token_ids):
    model = quantized_model(a_bits=16)
    prompt = token_ids[:1].repeat(1, 2)
    expected = greedy(model, prompt)
    assert torch.equal(greedy(model, prompt, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(greedy(model, prompt, assistant_model=copy.deepcopy(model)), expected)


def test_prefix_cached_once_for_many_continuations(quantized_model, token_ids):
    model = quantized_model(a_bits=16)
    prefix = QuantKVCache(model.config)
    with torch.no_grad():
        model(token_ids[:1], past_key_values=prefix)
    pages = prefix.table.num_pages
    prefix.batch_repeat_interleave(3)
    assert prefix.table.num_pages == pages
    asked = torch.cat([token_ids[:1].expand(3, -1), torch.randint(3, 128, (3, 2))], 1)
    together = greedy(model, asked, past_key_values=prefix)
    for row in range(3):
        alone = QuantKVCache(model.config)
        with torch.no_grad():
            model(token_ids[:1], past_key_values=alone)
        assert torch.equal(greedy(model, asked[row : row + 1], past_key_values=alone)[0], together[row])


@pytest.mark.parametrize("implementation", ["dynamic", "quantized", "offloaded", "static"])
def test_cache_implementations(implementation, quantized_model, token_ids):
    model = quantized_model()
    out = greedy(model, token_ids, cache_implementation=implementation, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, QuantKVCache)
    assert torch.equal(out.sequences, greedy(model, token_ids))


def test_first_token_alone_then_decode_equals_prefill(quantized_model, logits, token_ids):
    model = quantized_model(w_bits=8, a_bits=16, k_bits=8, v_bits=8)
    got, _ = sequential(model, QuantKVCache(model.config), token_ids[:, :1], 1)
    alone = logits(model, token_ids[:, :1])[:, -1]
    assert (got[:, 0] - alone).abs().max() < 0.02 * alone.abs().max()
    cache = QuantKVCache(model.config)
    with torch.no_grad():
        rows = [model(token_ids[:, i : i + 1], past_key_values=cache).logits for i in range(token_ids.shape[1])]
    whole = logits(model, token_ids)
    assert (torch.cat(rows, 1) - whole).abs().max() < 0.02 * whole.abs().max()


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_grouped_queries(kv_heads, quantized_model, simulated_cache, token_ids):
    model = quantized_model(model_options={"num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": 16})
    expected, _ = sequential(plain(model), simulated_cache(model), token_ids, 3)
    got, _ = sequential(model, QuantKVCache(model.config), token_ids, 3)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_no_mask_given_and_right_padding(quantized_model, token_ids):
    model = quantized_model(w_bits=8, a_bits=16)
    mask = torch.ones_like(token_ids)
    mask[1, 12:] = 0
    with torch.no_grad():
        cache = QuantKVCache(model.config)
        model(token_ids, attention_mask=mask, past_key_values=cache)
        assert cache.table.lengths.tolist() == [17, 12]
        position = torch.tensor([[17], [12]])
        grown = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        token = token_ids[:, :1]
        got = model(token, attention_mask=grown, position_ids=position, past_key_values=cache).logits
        alone = QuantKVCache(model.config)
        model(token_ids[1:, :12], past_key_values=alone)
        expected = model(token[1:], past_key_values=alone).logits
    torch.testing.assert_close(got[1:], expected, rtol=1e-4, atol=1e-4)
    assert greedy(model, token_ids).shape == (2, 17 + NEW)


def test_changing_the_mask_of_stored_tokens_is_refused(quantized_model, token_ids):
    model = quantized_model()
    cache = QuantKVCache(model.config)
    with torch.no_grad():
        model(token_ids, past_key_values=cache)
        mask = torch.ones(2, 22)
        mask[0, 5] = 0
        with pytest.raises(NotImplementedError, match="disagrees with the cache about 1 of its 17"):
            model(token_ids[:, :5], attention_mask=mask, past_key_values=cache)
        assert model(token_ids[:, :5], attention_mask=torch.ones(2, 22), past_key_values=cache).logits.shape[1] == 5


def test_what_cannot_be_computed_is_refused(quantized_model, tiny_model, token_ids):
    model = quantized_model()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention weights"):
        model(token_ids, output_attentions=True)
    attention = model.model.layers[0].self_attn
    from quarot.integrations.transformers.attention import quarot_attention

    x = torch.randn(1, 4, 3, 32)
    with pytest.raises(NotImplementedError, match="softcap"):
        quarot_attention(attention, x, x[:, :2], x[:, :2], None, softcap=30.0)
    with pytest.raises(NotImplementedError, match="sinks"):
        quarot_attention(attention, x, x[:, :2], x[:, :2], None, s_aux=torch.zeros(4))


def test_cache_on_an_unquantized_model(tiny_model, token_ids):
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    with pytest.raises(AttributeError, match="set_attn_implementation"):
        greedy(model, token_ids, past_key_values=QuantKVCache(model.config))
    reference = greedy(model, token_ids)
    cache = QuantKVCache(model=model, key_bits=16, value_bits=16)
    assert model.config._attn_implementation == "quarot"
    assert torch.equal(greedy(model, token_ids, past_key_values=cache), reference)


def test_continuous_batching_runs(quantized_model, logits):
    from transformers import GenerationConfig

    model = quantized_model(a_bits=16, k_bits=8, v_bits=8)
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    try:
        out = model.generate_batch(prompts, generation_config=config)
    except ValueError as error:  # 5.23
        if "not supported for continuous batching" not in str(error):
            raise
        pytest.skip("this transformers serves continuous batching with its own attention functions only")
    for result, prompt in zip(
        sorted(out.values(), key=lambda r: int(r.request_id.split("_")[-1])), prompts, strict=True
    ):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, use_cache=False)
        assert result.generated_tokens == expected[0, len(prompt) :].tolist()
