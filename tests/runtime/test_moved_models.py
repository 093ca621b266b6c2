"""Weights that move: their memory is free at once, what was made from them is made again, and noticing it is cheap."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import quarot
from quarot.nn import hooks, joint
from quarot.runtime import fused_decoder
from quarot.runtime.decode_graph import addresses, graph_for


@pytest.fixture
def model(tiny_model, token_ids):
    model = tiny_model("llama")
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    quarot.generate(model, token_ids, max_new_tokens=2)  # joins q, k, v and gate, up
    return model


def groups(model):
    layers = model.model.quarot_fused.layers
    return [group for layer in layers for group in layer.groups()]


def test_joined_weights_are_free_as_soon_as_the_model_has_moved(model):
    held = [weakref.ref(tensor) for group in groups(model) for tensor in group.tensors() if tensor is not None]
    assert len(held) >= 4 * 2 * model.config.num_hidden_layers
    model.to("meta")
    gc.collect()
    assert not any(ref() is not None for ref in held)


def test_a_move_to_where_it_is_joins_nothing_again(model):
    before = [group.tensors()[0] for group in groups(model)]
    model.to("cpu").eval()
    assert all(group.tensors()[0] is tensor for group, tensor in zip(groups(model), before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
@pytest.mark.parametrize("how", ["parameter", "state", "data"])
def test_one_exchanged_weight_is_noticed(model, token_ids, name, how):
    layer, fused = getattr(model.model.layers[1].self_attn, name), model.model.quarot_fused
    cache = fused.session.cache
    known, logits = addresses(fused, cache), model(token_ids).logits
    other = layer.qweight.data.flip(0).contiguous()
    if how == "parameter":
        layer.qweight = nn.Parameter(other, requires_grad=False)
    elif how == "state":
        layer.load_state_dict(layer.state_dict() | {"qweight": other}, assign=True)
    else:
        layer.qweight.data = other
    assert addresses(fused, cache) != known
    found = model(token_ids).logits
    assert not torch.equal(found, logits)
    quarot.runtime.fused_decoder.uninstall(model)
    assert (found - model(token_ids).logits).norm() <= 2e-3 * found.norm()


@torch.no_grad()
@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
@pytest.mark.parametrize("what", ["weight_scale", "bias"])
def test_an_exchanged_scale_or_bias_is_noticed(model, token_ids, name, what):
    layer, fused = getattr(model.model.layers[1].self_attn, name), model.model.quarot_fused
    if getattr(layer, what) is None:
        pytest.skip(f"{name} has no {what}")
    known, logits = addresses(fused, fused.session.cache), model(token_ids).logits
    setattr(layer, what, nn.Parameter(getattr(layer, what).data * 1.5, requires_grad=False))
    assert addresses(fused, fused.session.cache) != known
    found = model(token_ids).logits
    assert not torch.equal(found, logits)
    quarot.runtime.fused_decoder.uninstall(model)
    assert (found - model(token_ids).logits).norm() <= 2e-3 * found.norm()


def test_a_cache_does_not_replay_the_step_of_another_decoder(model, token_ids):
    """Attaching other settings with the same weights makes a new one, which finds every tensor where it was."""
    cache = quarot.QuantKVCache(model.config)
    model(token_ids, past_key_values=cache)
    step = cache.begin_step(2, 1, None)
    fused = model.model.quarot_fused
    assert graph_for(fused, cache, step, 2) is None  # the first step is eager
    graph = graph_for(fused, cache, step, 2)
    assert graph is graph_for(fused, cache, step, 2)
    fused_decoder.install(model)
    assert graph_for(model.model.quarot_fused, cache, step, 2) is not graph


def test_threads_join_once(model, monkeypatch):
    group, joins, join = model.model.quarot_fused.layers[0].qkv, [], joint._join
    for member in group.members:
        member._moved()
    monkeypatch.setattr(joint, "_join", lambda members: joins.append(time.sleep(0.05)) or join(members))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: group.tensors()[0], range(4)))
    assert len(joins) == 1
    assert all(tensor is found[0] for tensor in found)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight", "model.rotary_emb.inv_freq",
     "model.layers.1.self_attn.q_norm.weight", "lm_head.weight", "model.layers.0.mlp.gate.top_k"],
)  # fmt: skip
def test_whatever_a_recorded_step_reads_is_noticed(tiny_model, token_ids, name):
    model = tiny_model("qwen3_moe")
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    tokens = quarot.generate(model, token_ids, max_new_tokens=4, eos_token_id=())
    fused = model.model.quarot_fused
    session, known = fused.session, addresses(fused, fused.session.cache)
    assert known == addresses(fused, session.cache)
    module, _, last = name.rpartition(".")
    if last == "top_k":
        model.get_submodule(module).top_k = 1
    else:
        tensor = getattr(model.get_submodule(module), last)
        tensor.data = 1.5 * tensor.data
    assert (addresses(fused, session.cache) != known) == (name != "lm_head.weight")
    logits = model(token_ids).logits
    again = quarot.generate(model, token_ids, max_new_tokens=4, eos_token_id=())
    assert fused.session is not session
    fused_decoder.uninstall(model)
    assert (model(token_ids).logits - logits).norm() <= 2e-3 * logits.norm()
    assert again.shape == tokens.shape


@torch.no_grad()
@pytest.mark.parametrize("place", ["norm", "layers.0.input_layernorm", "layers.1.post_attention_layernorm"])
@pytest.mark.parametrize("how", ["written", "replaced", "cast"])
def test_gains_that_are_one_no_longer_count(model, token_ids, place, how):
    gain = model.model.get_submodule(place)
    before = model(token_ids).logits
    if how == "written":
        gain.weight.mul_(1.5)
    elif how == "replaced":
        gain.weight = nn.Parameter(1.5 * gain.weight)
    else:
        model.to(torch.float64).to(torch.float32)
        gain.weight.data = 1.5 * gain.weight.data
    found = model(token_ids).logits
    fused_decoder.uninstall(model)
    expected = model(token_ids).logits
    assert (found - expected).norm() <= 2e-3 * expected.norm()
    assert (found - before).norm() > 1e-2 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("name", ["layers.1.self_attn.k_proj", "layers.0.mlp.experts.down.1", "layers.0.mlp.down_proj"])
def test_a_clip_ratio_that_is_set_counts(tiny_model, token_ids, name):
    """Of q, k and v, which are one product, only one has it; a recorded step holds it as a number."""
    model = tiny_model("mixtral" if "experts" in name else "llama")
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    before, layer = model(token_ids).logits, model.model.get_submodule(name)
    layer.a_clip = 0.9
    assert model.model.quarot_fused.obstacle((), {}) is None
    layer.a_clip = 0.3
    assert "a_clip" in model.model.quarot_fused.obstacle((), {})
    assert "a_clip" in copy.deepcopy(model).model.quarot_fused.obstacle((), {})
    found = model(token_ids).logits
    with pytest.raises(NotImplementedError, match="a_clip"):
        quarot.generate(model, token_ids)
    fused_decoder.uninstall(model)
    assert torch.equal(found, model(token_ids).logits)
    assert (found - before).norm() > 1e-3 * before.norm()


def zero_linear(module):
    linear = nn.Linear(module.in_features, module.out_features, bias=False)
    linear.weight.data.zero_()
    return linear


@torch.no_grad()
@pytest.mark.parametrize("what", ["a projection", "an expert", "a layer", "a norm"])
def test_whatever_was_replaced_counts(tiny_model, token_ids, what):
    """An adapter around a layer, a layer kept as it was, a model cut short: the fused path has the old ones."""
    model = tiny_model("mixtral")
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    before, layer = model(token_ids).logits, model.model.layers[1]
    assert model.model.quarot_fused.obstacle((), {}) is None
    if what == "a projection":
        layer.self_attn.v_proj = zero_linear(layer.self_attn.v_proj)
    elif what == "an expert":
        layer.mlp.experts.down[0] = zero_linear(layer.mlp.experts.down[0])
    elif what == "a layer":
        del model.model.layers[1]
    else:
        layer.input_layernorm = nn.RMSNorm(128)
        layer.input_layernorm.weight.fill_(3)
    assert "was replaced" in model.model.quarot_fused.obstacle((), {})
    assert "was replaced" in copy.deepcopy(model).model.quarot_fused.obstacle((), {})
    found = model(token_ids, use_cache=False).logits
    assert (found - before).norm() > 1e-3 * before.norm()
    with pytest.raises(NotImplementedError, match="was replaced"):
        quarot.generate(model, token_ids)
    fused_decoder.uninstall(model)
    assert torch.equal(found, model(token_ids, use_cache=False).logits)


def test_joined_biases_follow_a_cast(model):
    group = model.model.quarot_fused.layers[0].qkv
    assert group.tensors()[2].dtype == torch.float32
    model.to(torch.bfloat16)
    assert group.tensors()[2].dtype == torch.bfloat16
    assert group.tensors()[1].dtype == torch.float32


def test_a_copied_layer_joins_nothing_of_the_original(model):
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.joint is not None
    assert copy.deepcopy(layer).joint is None


def test_a_token_looks_into_no_module_by_python_code(model, monkeypatch):
    """``Module.__getattr__`` runs for every parameter and every name that is not there: once milliseconds a token."""
    fused, calls, original = model.model.quarot_fused, [], nn.Module.__getattr__
    fused.obstacle((), {}), addresses(fused, fused.session.cache)
    monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: calls.append(name) or original(self, name))
    assert fused.obstacle((), {}) is None
    assert addresses(fused, fused.session.cache)
    assert len(calls) <= 4


def test_a_token_looks_at_experts_only_when_something_has_moved(tiny_model, token_ids, monkeypatch):
    model = tiny_model("mixtral")
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    fused, looked, look = model.model.quarot_fused, [], fused_decoder._addresses
    token, prompt = {"input_ids": token_ids[:, :1]}, {"input_ids": token_ids}
    experts = len(fused._of_experts)
    monkeypatch.setattr(fused_decoder, "_addresses", lambda some: looked.append(len(some)) or look(some))

    def looks(kwargs):
        looked.clear()
        assert fused.obstacle((), kwargs) is None
        known = fused.addresses()
        return looked.count(experts), known

    _, known = looks(token)
    assert looks(token) == (0, known)
    assert looks(prompt) == (1, known)
    layer = model.model.layers[1].mlp.experts.down[2]
    layer.weight_scale = nn.Parameter(2 * layer.weight_scale.data, requires_grad=False)
    assert looks(token)[0] == 1 and looks(token)[1] != known
    layer.weight_scale.data = layer.weight_scale.data / 2
    known = looks(token)[1]
    assert looks(prompt)[1] != known
    known = looks(token)[1]
    model(token_ids)  # joins nothing here, but would on a GPU
    for stack in fused.layers[1].mlp.groups():
        stack.tensors()
    assert looks(token)[1] != known


def test_hooks_are_looked_for_only_when_there_is_a_new_one(model, monkeypatch):
    fused, looked, waits = model.model.quarot_fused, [], hooks._waits
    monkeypatch.setattr(hooks, "_waits", lambda module: looked.append(module) or waits(module))
    other = nn.Linear(2, 2)
    handle = other.register_forward_hook(lambda *_: None)
    assert fused.obstacle((), {}) is None and len(looked) == len(fused.watch.modules)
    assert fused.obstacle((), {}) is None and len(looked) == len(fused.watch.modules)
    handle.remove()
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda *_: None)
    assert "has a hook" in fused.obstacle((), {})
    assert "has a hook" in copy.deepcopy(model).model.quarot_fused.obstacle((), {})


@pytest.mark.parametrize("place", ["model.norm", "model.embed_tokens", "lm_head", "model.layers.1.mlp", "model", ""])
def test_recorded_steps_are_refused_where_a_hook_waits(model, token_ids, place):
    """They would call it while recording, and then never again."""
    seen = []
    handle = model.get_submodule(place).register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(NotImplementedError, match=r"has a hook, or .*; use model\.generate"):
        quarot.generate(model, token_ids, max_new_tokens=4)
    model.generate(token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=4, eos_token_id=None)
    assert len(seen) == 4
    handle.remove()
    assert quarot.generate(model, token_ids, max_new_tokens=4).shape[0] == 2 and len(seen) == 4


def test_hooks_of_all_modules_are_called(model, token_ids):
    seen = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    model(token_ids)
    assert seen.count("QuantLinear") == 7 * model.config.num_hidden_layers
    with pytest.raises(NotImplementedError, match="has a hook"):
        quarot.generate(model, token_ids, max_new_tokens=4)
    handle.remove()
    assert model.model.quarot_fused.obstacle((), {}) is None


def test_a_hook_is_seen_whatever_happened_to_the_dictionary_of_hooks(model):
    module: Any = model.model.layers[1].mlp.down_proj
    fused = model.model.quarot_fused
    module._forward_hooks = OrderedDict()
    assert fused.obstacle((), {}) is None
    handle = module.register_forward_hook(lambda *_: None)
    assert "QuantLinear has a hook" in fused.obstacle((), {})
    handle.remove()
    assert fused.obstacle((), {}) is None
    module._hf_hook = object()
    assert "QuantLinear has a hook" in fused.obstacle((), {})
    del module._hf_hook
    module.forward = module.forward  # what accelerate leaves behind
    assert fused.obstacle((), {}) is None


@torch.no_grad()
@pytest.mark.parametrize(
    "place", ["layers.0.mlp", "layers.1.self_attn.q_proj", "layers.1", "norm", "layers.0.mlp.experts.down.1"]
)
def test_a_forward_of_ones_own_is_called(tiny_model, token_ids, place):
    model, calls = tiny_model("mixtral"), []
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    expected, module = model(token_ids).logits, model.model.get_submodule(place)
    own = module.forward
    module.forward = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    assert (model(token_ids).logits - expected).norm() <= 2e-3 * expected.norm()
    assert calls
    with pytest.raises(NotImplementedError, match="a forward of its own"):
        quarot.generate(model, token_ids, max_new_tokens=2)
