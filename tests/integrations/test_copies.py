"""Copies of a quantised model, by pickle or deepcopy, are whole: they generate, cache and save as it does."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import quarot
from quarot.nn.quant_kv_cache import QuantKVCache


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [pickled, copy.deepcopy])
def test_a_copy_is_the_same_model(duplicate, quantized_model, logits, token_ids, tmp_path):
    model = quantized_model()
    expected = logits(model, token_ids)
    tokens = model.generate(token_ids, max_new_tokens=4)
    twin = duplicate(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    assert torch.equal(logits(twin, token_ids), expected)
    out = twin.generate(token_ids, max_new_tokens=4, return_dict_in_generate=True)
    assert torch.equal(out.sequences, tokens)
    assert isinstance(out.past_key_values, QuantKVCache)
    twin.save_pretrained(tmp_path)
    assert "quarot" in (tmp_path / "README.md").read_text()  # written by quarot's save_pretrained only
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), expected)


def test_a_copy_leaves_the_cache_and_the_graphs_of_generate_behind(quantized_model, token_ids):
    model = quantized_model()
    tokens = quarot.generate(model, token_ids, max_new_tokens=4)
    assert model.model.quarot_fused.session is not None
    twin = pickle.loads(pickle.dumps(model))
    assert twin.model.quarot_fused.session is None
    assert torch.equal(quarot.generate(twin, token_ids, max_new_tokens=4), tokens)
