"""``residual_bits``: the stream is rounded where it rests, in every family, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quarot.architectures import architecture_of, decoder_layers
from quarot.calibration.fake_quantize import fake_quantize
from quarot.evaluation.residual_stream import residual_bits
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model


def _by_hand(model: Any, ids: torch.Tensor, bits: int) -> torch.Tensor:
    """A pre-norm decoder written out: x is the stored stream, rounded after every sum."""
    record = architecture_of(model)
    body = model.model
    scale = getattr(model.config, "embedding_multiplier", 1.0)
    x = fake_quantize(body.embed_tokens(ids) * scale, bits, 0.9)
    positions = torch.arange(ids.shape[1])[None]
    rope = body.rotary_emb(x, position_ids=positions)
    for _, layer in decoder_layers(model):
        multiplier = getattr(layer, "residual_multiplier", 1.0)
        out = layer.self_attn(layer.input_layernorm(x), position_embeddings=rope, attention_mask=None)[0]
        x = fake_quantize(x + out * multiplier, bits, 0.9)
        out = layer.get_submodule(record.mlp)(layer.post_attention_layernorm(x))
        x = fake_quantize(x + out * multiplier, bits, 0.9)
    return model.lm_head(body.norm(x)) / getattr(model.config, "logits_scaling", 1.0)


@pytest.mark.parametrize("family", ["llama", "granite", "mixtral"])
def test_it_is_the_formula(family: str, tiny_model: Callable[..., Any], token_ids: torch.Tensor) -> None:
    model = tiny_model(family, dtype=torch.float64)
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        plain = model(token_ids).logits
        with residual_bits(model, 4):
            found = model(token_ids).logits
        expected = _by_hand(model, token_ids, 4)
        assert (found - expected).norm() < 1e-2 * (plain - expected).norm()
        assert torch.equal(model(token_ids).logits, plain)


def test_more_bits_cost_less_and_16_nothing(
    family: str, tiny_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    model = tiny_model(family)
    rotate_model(model, progress=False)
    with torch.no_grad():
        exact = model(token_ids).logits
        errors = []
        for bits in (4, 6, 8, 16):
            with residual_bits(model, bits):
                errors.append((model(token_ids).logits - exact).norm().item())
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[3] == 0


def test_a_quantised_model_leaves_its_fused_path_meanwhile(
    tiny_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False)
    with torch.no_grad():
        before = model(token_ids).logits
        with residual_bits(model, 4):
            assert not torch.allclose(model(token_ids).logits, before, rtol=1e-3)
        assert torch.equal(model(token_ids).logits, before)


@pytest.mark.parametrize("bits", [0, 1, 9, 2.5, "4", None, True])
def test_wrong_bits_are_told_before_anything_is_hooked(bits: Any, tiny_model: Callable[..., Any]) -> None:
    with (
        pytest.raises(ValueError, match=f"residual_bits={bits!r} must be from 2 to 8"),
        residual_bits(tiny_model("llama"), bits),
    ):
        pass
