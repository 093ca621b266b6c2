"""``rope_decode_attention`` on the CPU: its reference is the two ops, and the decode step may take either way."""

from __future__ import annotations

import pytest
import torch

import quarot
from quarot.ops.decode_attention import decode_attention
from quarot.ops.kv_layout import KVLayout
from quarot.ops.rope_decode_attention import rope_decode_attention
from quarot.ops.rope_kv_append import rope_kv_append
from quarot.runtime import decode_step


def test_equals_the_two_ops():
    heads, kv_heads, dim, form = 4, 2, 64, (4, 4, 64, 64)
    pool = torch.randint(0, 60, KVLayout(dim, *form).pool_shape(6, kv_heads, 16), dtype=torch.uint8)
    qkv = torch.randn(2, (heads + 2 * kv_heads) * dim)
    angle = torch.randn(2, dim // 2).repeat(1, 2)
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    lengths, slots = torch.tensor([20, 33], dtype=torch.int32), torch.tensor([3, 48])
    start, rest = (qkv, angle.cos(), angle.sin()), (*form, 0.95, 1.0, 1, dim, None, None, 1e-6)
    ours, theirs = pool.clone(), pool.clone()
    out = rope_decode_attention(*start, ours, slots, table, lengths, heads, *rest, 0.125, 0)
    query = rope_kv_append(*start, theirs, slots, heads, *rest)
    expected, _ = decode_attention(query[:, None], theirs, table, lengths, *form, 0.125, 0, 0, 0)
    assert torch.equal(ours, theirs) and not torch.equal(ours, pool)
    assert torch.equal(out, expected.flatten(1))


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_the_decode_step_takes_either_way(tiny_model, token_ids, family, monkeypatch):
    model = tiny_model(family)
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    tokens = []
    for one_kernel in (False, True):
        monkeypatch.setattr(decode_step, "_ONE_KERNEL", one_kernel)
        tokens.append(quarot.generate(model, token_ids, max_new_tokens=8, eos_token_id=()))
    assert torch.equal(*tokens)
