"""The fused decoder path against the model's own layers, on the CPU through the reference ops."""

from __future__ import annotations

import copy

import pytest
import torch

import quarot
from quarot.runtime.fused_decoder import FAMILIES, install, uninstall
from quarot.runtime.linear_group import LinearGroup


def quantized(tiny_model, family, **fields):
    model = tiny_model(family)
    quarot.rotate_model(model, progress=False)
    fields = {"w_method": "rtn", "progress": False} | fields
    quarot.quantize_model(model, **fields)
    return model


def is_fused(model) -> bool:
    return "quarot_fused" in vars(model.model)


@pytest.fixture(params=FAMILIES)
def fused_family(request):
    return request.param


@torch.no_grad()
def test_fused_equals_unfused(tiny_model, fused_family, token_ids):
    model = quantized(tiny_model, fused_family)
    assert is_fused(model)
    mask = torch.ones_like(token_ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    fused = [model(token_ids).logits, model(token_ids, use_cache=False).logits, model.generate(token_ids, **options)]
    uninstall(model)
    assert not is_fused(model)
    plain = [model(token_ids).logits, model(token_ids, use_cache=False).logits, model.generate(token_ids, **options)]
    for ours, theirs in zip(fused[:2], plain[:2], strict=True):
        # Codes on a rounding edge may flip, since the norm is not rounded to the model's dtype in between.
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm()
    assert torch.equal(fused[2], plain[2])


@pytest.mark.parametrize(("family", "word"), [("granite", "family granite"), ("gemma", "family gemma")])
def test_other_families_keep_their_layers(tiny_model, family, word):
    model = quantized(tiny_model, family)
    assert not is_fused(model)
    assert word in install(model)


def test_reasons_are_named(tiny_model):
    model = quantized(tiny_model, "llama", overrides={".*k_proj": {"w_bits": 8}})
    assert "quantised differently" in install(model)
    assert "not quantised" in install(quantized(tiny_model, "llama", ignore=["lm_head", "k_proj"]))
    asymmetric = quantized(tiny_model, "llama", w_symmetric=False)
    assert "no integer GEMM" in install(asymmetric)


def test_unfolded_norm_is_refused(tiny_model):
    model = tiny_model("llama")
    quarot.quantize_model(model, w_method="rtn", progress=False)
    assert not is_fused(model)
    assert "not folded" in install(model)


@torch.no_grad()
def test_hooks_and_recorded_states_still_work(tiny_model, token_ids):
    model = quantized(tiny_model, "llama")
    expected = model(token_ids).logits
    states = model(token_ids, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    seen = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *a: seen.append(a[2].shape))
    hooked = model(token_ids).logits
    assert seen and (hooked - expected).norm() <= 2e-3 * expected.norm()
    handle.remove()
    seen.clear()
    assert torch.equal(model(token_ids).logits, expected) and not seen


@torch.no_grad()
@torch.no_grad()
@pytest.mark.parametrize("recorded", ["output_hidden_states", "output_attentions"])
def test_recording_once_does_not_end_the_fused_path(tiny_model, token_ids, recorded):
    model = quantized(tiny_model, "llama", k_bits=16, v_bits=16)
    expected = model(token_ids, use_cache=False).logits
    if recorded == "output_attentions":
        model.set_attn_implementation("eager")
    assert len(model(token_ids, use_cache=False, **{recorded: True})[recorded.removeprefix("output_")]) > 1
    model.set_attn_implementation("sdpa")
    assert model.model.quarot_fused.obstacle((), {}) is None
    assert torch.equal(model(token_ids, use_cache=False).logits, expected)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert "has a hook" in model.model.quarot_fused.obstacle((), {})


@torch.no_grad()
def test_eager_attention_runs_the_models_own_layers(tiny_model, token_ids):
    """transformers keeps eager attention in each model file, out of the table that the fused path looks in."""
    model = quantized(tiny_model, "llama", k_bits=16, v_bits=16)
    expected = model(token_ids, use_cache=False).logits
    model.set_attn_implementation("eager")
    logits = model(token_ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
    out = model(token_ids, use_cache=False, output_attentions=True)
    assert [weights.shape for weights in out.attentions] == [(2, 4, 17, 17)] * 2
    assert torch.equal(out.logits, logits)
    assert model.generate(token_ids, max_new_tokens=3, do_sample=False).shape == (2, 20)


def test_joined_weights_do_not_change_what_is_saved(tiny_model, token_ids, tmp_path):
    model = quantized(tiny_model, "llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = model(token_ids).logits  # joins q, k, v and gate, up
    q, k = model.model.layers[0].self_attn.q_proj.qweight, model.model.layers[0].self_attn.k_proj.qweight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    model.save_pretrained(tmp_path / "saved")
    size = sum(f.stat().st_size for f in (tmp_path / "saved").glob("*.safetensors"))
    assert size < 1.05 * sum(t.numel() * t.element_size() for t in before.values()) + 50_000
    assert torch.equal(quarot.load(tmp_path / "saved")(token_ids).logits, logits)


@torch.no_grad()
def test_a_copy_and_changed_weights_are_noticed(tiny_model, token_ids):
    model = quantized(tiny_model, "llama")
    logits = model(token_ids).logits
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if name.endswith("weight_scale"):
            parameter.data = parameter.data * 1.5
    assert torch.equal(model(token_ids).logits, logits)
    changed = other(token_ids).logits
    uninstall(other)
    reference = other(token_ids).logits
    assert (changed - reference).norm() <= 2e-3 * reference.norm()
    assert not torch.allclose(changed, logits)


def test_an_error_leaves_the_cache_usable(tiny_model, token_ids, monkeypatch):
    model = quantized(tiny_model, "llama")
    with torch.no_grad():
        cache = quarot.QuantKVCache(model.config)
        model(token_ids[:1], past_key_values=cache)
        again = copy.deepcopy(cache)
        layer = vars(model.model)["quarot_fused"].layers[1]
        monkeypatch.setattr(layer, "positions", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
        with pytest.raises(RuntimeError, match="no"):
            model(token_ids[:1, :1], past_key_values=cache)
        monkeypatch.undo()
        assert int(cache.get_seq_length()) == token_ids.shape[1]
        ours, theirs = (model(token_ids[:1, :1], past_key_values=c).logits for c in (cache, again))
    assert torch.equal(ours, theirs)


@torch.no_grad()
def test_long_prompts_pass_the_mlp_in_parts(tiny_model, token_ids, monkeypatch):
    from quarot.runtime import fused_layer

    model = quantized(tiny_model, "llama")
    whole = model(token_ids, use_cache=False).logits
    rows = []
    original = LinearGroup.after_gate
    monkeypatch.setattr(LinearGroup, "after_gate", lambda self, x, *a: rows.append(x.shape[0]) or original(self, x, *a))
    monkeypatch.setattr(fused_layer, "MLP_TOKENS", 8)
    assert torch.equal(model(token_ids, use_cache=False).logits, whole)
    assert max(rows) <= 8
    assert max(rows) - min(rows) <= 1  # no part of a few rows, which go another way
    assert sum(rows) == token_ids.numel() * model.config.num_hidden_layers
