"""Marking models that are in memory: what is recorded, what is switched on, and which foreign marks are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.utils.quantization_config import BitsAndBytesConfig, GgufConfig

import quarot
from quarot.integrations.transformers import attach, detach
from quarot.integrations.transformers.quantizer import QuarotHfQuantizer

ONLY_KV = quarot.QuarotConfig(w_bits=16, a_bits=16, k_bits=4, v_bits=4)


def test_attach_twice_and_detach(tiny_model, logits, token_ids):
    model = tiny_model("llama")
    expected = logits(model, token_ids)
    attach(model, ONLY_KV)
    attach(model, ONLY_KV)
    assert model.config._attn_implementation == "quarot"
    assert len(model._forward_pre_hooks) == 1
    assert not torch.equal(logits(model, token_ids), expected)
    detach(model)
    assert torch.equal(logits(model, token_ids), expected)
    assert not model._forward_pre_hooks
    assert not {"save_pretrained", "_prepare_cache_for_generation", "hf_quantizer"} & set(vars(model))
    assert getattr(model.config, "quantization_config", None) is None
    assert type(model.generate(token_ids, max_new_tokens=2, return_dict_in_generate=True).past_key_values).__name__ == (
        "DynamicCache"
    )


def test_sixteen_bit_keys_and_values_leave_attention_alone(tiny_model, token_ids):
    model = tiny_model("llama")
    attach(model, ONLY_KV.replace(k_bits=16, v_bits=16))
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    attach(model, ONLY_KV)
    assert model.config._attn_implementation == "quarot"
    attach(model, ONLY_KV.replace(k_bits=16, v_bits=16))
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_only_the_cache_quantized_saves_and_loads(tiny_model, logits, token_ids, tmp_path):
    model = tiny_model("llama")
    attach(model, ONLY_KV)
    model.save_pretrained(tmp_path)
    loaded = quarot.load(tmp_path)
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))
    assert "import quarot" in (tmp_path / "README.md").read_text()


def test_gguf_marks_are_replaced_where_the_weights_are_plain(tiny_model, logits, token_ids, tmp_path):
    model = tiny_model("llama")
    config = GgufConfig()
    model.config.quantization_config = config
    model.hf_quantizer = GgufHfQuantizer(config)
    model.is_quantized = True
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)
    attach(model, ONLY_KV)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))


def test_other_quantizers_are_refused(tiny_model):
    model = tiny_model("llama")

    class Other(QuarotHfQuantizer.__mro__[1]):
        def is_serializable(self):
            return True

        @property
        def is_trainable(self):
            return False

    model.hf_quantizer = Other(BitsAndBytesConfig(load_in_4bit=True))
    with pytest.raises(ValueError, match="bitsandbytes"):
        attach(model, ONLY_KV)


def test_unknown_family_is_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 32}
    model = Gemma2ForCausalLM(Gemma2Config(num_attention_heads=2, num_key_value_heads=2, **small))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotImplementedError, match="Gemma2ForCausalLM"):
        attach(model, ONLY_KV)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_training_is_refused_by_the_quantizer(quantized_model):
    model = quantized_model()
    assert not model.hf_quantizer.is_trainable
    assert model.hf_quantizer.is_compileable
    assert model.hf_quantizer.is_serializable()
    assert model.quantization_method == "quarot"
