"""Rotated models through transformers: saving without complaints, generation, GGUF leftovers, and R3 in the scores."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quarot.ops.hadamard import hadamard_transform
from quarot.rotation.rotate import rotate_model


def test_saved_and_loaded_is_bit_equal(
    family: str,
    tiny_model: Callable[..., Any],
    token_ids: torch.Tensor,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model(family, tie_word_embeddings=True)
    rotate_model(model, progress=False)
    with caplog.at_level(logging.WARNING):
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert not [record for record in caplog.records if "shared" in record.message.lower()]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings is False
    assert again.lm_head.weight.data_ptr() != again.get_input_embeddings().weight.data_ptr()
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)
    with pytest.raises(ValueError, match="already rotated"):
        rotate_model(again)


def test_greedy_generation_is_unchanged(family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(family, dtype=torch.float64)
    prompt = torch.tensor([[5, 9, 11, 7]])
    before = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    rotate_model(model, progress=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None), before)


def test_a_model_left_by_a_gguf_file_is_taken_over(tiny_model: Callable[..., Any], token_ids: torch.Tensor) -> None:
    """Loading a GGUF file leaves dense weights, but a quantizer and flags that forbid casting and saving."""
    model = tiny_model("llama")
    config = transformers.GgufConfig(dequantize=True) if hasattr(transformers, "GgufConfig") else SimpleNamespace()
    config.quant_method = "gguf"
    model.hf_quantizer = SimpleNamespace(quantization_config=config)
    model.config.quantization_config = config
    model.is_quantized = True
    model.quantization_method = "gguf"
    rotate_model(model, progress=False)
    assert model.config.quantization_config.quant_method == "quarot"
    model.half()
    assert torch.isfinite(model(token_ids).logits).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_r3_cancels_in_the_scores_after_rope(head_dim: int) -> None:
    """q k^T of rotated queries and keys equals the unrotated one, also with RoPE on a part of the head only."""
    q, k = torch.randn(2, 4, 7, head_dim).double(), torch.randn(2, 4, 7, head_dim).double()
    angle = torch.rand(2, 7, head_dim).double()
    rotated_q, rotated_k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    rotated_q, rotated_k = (
        torch.cat((rotated_q[..., :32], q[..., 32:]), -1),
        torch.cat((rotated_k[..., :32], k[..., 32:]), -1),
    )
    scores = rotated_q @ rotated_k.mT
    torch.testing.assert_close(hadamard_transform(rotated_q) @ hadamard_transform(rotated_k).mT, scores)


def test_models_are_found_by_class_not_by_name(tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    model = tiny_model("llama")
    model.config._name_or_path = "some/gpt2-opt-mystery"
    model.save_pretrained(tmp_path / "no-hint-in-this-name")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "no-hint-in-this-name")
    assert rotate_model(again, progress=False).family == "llama"


def test_rotation_leaves_the_original_of_a_deepcopy_alone(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rotate_model(copy.deepcopy(model), progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert getattr(model, "quarot_rotation", None) is None
