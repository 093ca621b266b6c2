"""The ops at both ends of a decode step, on the CPU: references against loops and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from quarot.ops.add_rms_norm import add_rms_norm
from quarot.ops.argmax_rows import argmax_rows
from quarot.ops.begin_step import begin_step

PAGE = 16


def inputs(batch: int = 4, dtype: torch.dtype = torch.float32):
    embedding = torch.randn(50, 24, dtype=dtype)
    ids, before = torch.randint(50, (batch, 1)), torch.randint(3 * PAGE, (batch,), dtype=torch.int32)
    table = torch.randperm(3 * batch).int().view(batch, 3)
    return ids, embedding, before, torch.randint(1000, (batch, 1)), table


@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_begin_step(dtype, advance):
    config = LlamaConfig(hidden_size=64, num_attention_heads=2)
    rotary = LlamaRotaryEmbedding(config)
    ids, embedding, before, positions, table = inputs(dtype=dtype)
    held, places = before.clone(), positions.clone()
    out = begin_step(ids, embedding, before, positions, table, rotary.inv_freq, 1.5, PAGE, advance)
    hidden, lengths, slots, cos, sin = out
    assert torch.equal(hidden, embedding[ids[:, 0]])
    assert torch.equal(lengths, held + 1)
    assert slots.tolist() == [int(table[b, n // PAGE]) * PAGE + n % PAGE for b, n in enumerate(held.tolist())]
    rotary.attention_scaling = 1.5
    for got, expected in zip((cos, sin), rotary(hidden, places), strict=True):
        assert torch.equal(got, expected[:, 0])
    assert torch.equal(before, held + advance) and torch.equal(positions, places + advance)


def test_begin_step_writes_no_token_that_has_no_page_and_no_vector_that_is_none():
    ids, embedding, before, positions, table = inputs()
    before[1], ids[2], ids[3] = 3 * PAGE, 50, -1
    hidden, _, slots, *_ = begin_step(ids, embedding, before, positions, table, torch.ones(4), 1.0, PAGE, False)
    assert slots[1] == -1 and (slots[[0, 2, 3]] >= 0).all()
    assert hidden[2:].isnan().all() and hidden[:2].isfinite().all()


def test_begin_step_refuses_what_does_not_fit():
    ids, embedding, before, positions, table = inputs()
    with pytest.raises(ValueError, match="4 ids do not fit before"):
        begin_step(ids, embedding, before[:3], positions, table, torch.ones(4), 1.0, PAGE, False)
    with pytest.raises(ValueError, match="int32"):
        begin_step(ids, embedding, before.long(), positions, table, torch.ones(4), 1.0, PAGE, False)


def test_argmax_takes_the_first_of_equals():
    x = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 5.0, torch.nan], [-1.0, -torch.inf, -1.0]])
    assert argmax_rows(x).tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_add_rms_norm_is_the_models_norm(dtype):
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    x, residual = torch.randn(2, 5, 96).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(add_rms_norm(x, residual, 1e-5), norm(x + residual))
        torch.testing.assert_close(add_rms_norm(x, None, 1e-5), norm(x))
