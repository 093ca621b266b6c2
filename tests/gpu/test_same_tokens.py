"""Greedy generation through the kernels takes the tokens of the reference backend wherever the logits leave no doubt.

Everything runs in float32, so that only the order of sums and the fp16 operands of the attention kernel differ, which
flip a code of the cache or of an activation now and then. With 4-bit activations one flip moves the logits of a tiny
model by up to half of their standard deviation, more than most gaps, so activations have 8 or 16 bits here (16 in
SmolLM2, whose thirty layers make 0.26 of a flipped 8-bit code).

The references follow the tokens that the kernels took, one decode step each. A token may differ from their best one
only where the two are tied: their logits lie within ``TIE`` of the standard deviation of that position's logits.

SmolLM2 (or any other model) takes part where ``QUAROT_TEST_MODEL`` names its folder.
"""

from __future__ import annotations

import os

import pytest
import torch

import quarot
from quarot import QuantKVCache
from quarot.ops.registry import reference_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DENSE = ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "gemma"]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TIE = 0.1
TOKENS = 16
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. A small town in the mountains"


def prepared(model, **recipe):
    """Rotated, rounded to nearest, on the GPU; it never stops early."""
    model = model.to("cuda", torch.float32).eval()
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False, **recipe)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def reference_logits(model, ids, tokens):
    """[B, N, vocab]: what the references say before each of ``tokens`` [B, N], given those before it."""
    cache = QuantKVCache(model.config)
    with reference_backend():
        rows = [model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]]
        rows += [model(token[:, None], past_key_values=cache).logits[:, -1] for token in tokens[:, :-1].unbind(1)]
    return torch.stack(rows, dim=1).float()


def check(model, ids, tokens, name):
    """Report where tokens differ from the references' choice; fail where that is no tie."""
    logits = reference_logits(model, ids, tokens)
    lead = (logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]) / logits.std(-1)  # 0: the same choice
    top = logits.topk(2, dim=-1).values
    clear = int(((top[..., 0] - top[..., 1]) / logits.std(-1) > TIE).sum())
    where = (lead > 0).nonzero().tolist()
    told = f"{len(where)} of {lead.numel()} tokens differ, {clear} are no ties"
    if where:
        told += f"; first at row and position {where[0]}, {lead[tuple(where[0])]:.3f} behind, at most {lead.max():.3f}"
    print(f"{name}: {told}")
    assert clear >= lead.numel() / 3, f"{name}: most positions are ties, which shows nothing: {told}"
    assert (lead <= TIE).all(), f"{name}: {told}"


def compare(model, ids, name):
    options = {"max_new_tokens": TOKENS, "do_sample": False, "disable_compile": True}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :]
    check(model, ids, tokens, f"{name}, generate")
    if "quarot_fused" in vars(model.get_decoder()):
        tokens = quarot.generate(model, ids, max_new_tokens=TOKENS, eos_token_id=())[:, ids.shape[1] :]
        check(model, ids, tokens, f"{name}, quarot.generate")


@pytest.mark.parametrize("a_bits", [8, 16])
@pytest.mark.parametrize("family", [*DENSE, "mixtral", "qwen3_moe"])
def test_tiny_models(family, a_bits, tiny_model, token_ids):
    compare(prepared(tiny_model(family, **SHAPE), a_bits=a_bits), token_ids.cuda(), f"{family}, a_bits={a_bits}")


@pytest.mark.skipif("QUAROT_TEST_MODEL" not in os.environ, reason="QUAROT_TEST_MODEL names no model folder")
def test_real_model():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = os.environ["QUAROT_TEST_MODEL"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt").input_ids.cuda()
    compare(prepared(model, a_bits=16), ids, os.path.basename(path))
