"""Models of random codes must behave like models, or what is timed on them says little."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from quarot.config import QuarotConfig
from quarot.runtime.synthetic import random_quantized_model


@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_have_no_part_in_common(bits):
    """Else it grows from layer to layer, until every gate is as negative as can be."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64)
    model = random_quantized_model(config, QuarotConfig(w_method="rtn", w_bits=bits), dtype=torch.float32, device="cpu")
    gate = model.model.layers[0].mlp.gate_proj.dequantize()
    out = gate @ torch.ones(256)
    assert abs(out.mean()) < 0.3 * out.std()
    assert 0.8 < gate.std() * 256**0.5 < 1.25  # as large as its input
