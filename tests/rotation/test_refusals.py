"""What cannot be rotated is refused by name, with a reason and a way out, and is left exactly as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import quarot.rotation.rotate
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Nothing of the model changes inside the block: weights, modules, config."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = {name: type(module) for name, module in model.named_modules()}
    config = model.config.to_dict()
    yield
    after = model.state_dict()
    assert set(after) == set(weights)
    assert all(torch.equal(after[name], weights[name]) or weights[name].isnan().any() for name in weights)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert model.config.to_dict() == config


@pytest.mark.parametrize(
    ("stem", "reason"),
    [
        ("Gemma2", "normalises the output"),
        ("Olmo2", "normalises the output"),
        ("Cohere2", "removes the mean"),
        ("OPT", "removes the mean"),
    ],
)
def test_unsupported_family(stem: str, reason: str) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    if stem == "OPT":
        sizes = {
            "vocab_size": 64,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    model = getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, f"{stem}Config")(**sizes, pad_token_id=0))
    with (
        untouched(model),
        pytest.raises(NotImplementedError, match=f"{stem}ForCausalLM is not supported: .*{reason}.*Supported: Llama"),
    ):
        rotate_model(model)


def test_rotating_twice(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    with untouched(model), pytest.raises(ValueError, match="already rotated by quarot; load the original"):
        rotate_model(model)
    plain = tiny_model("llama")
    rotate_model(plain, r3=False, r4=False, o_proj_online="none", record=False, progress=False)
    with untouched(plain), pytest.raises(ValueError, match="already rotated"):
        rotate_model(plain)


def test_quantised_by_another_method(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ValueError, match="quantised by 'bitsandbytes'; rotation needs the original weights"):
        rotate_model(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_damaged_weights_are_named(name: str, value: float, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", dtype=torch.float16)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[7] = value
    with untouched(model), pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        rotate_model(model)


def test_weights_that_are_not_in_memory(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama").to("meta")
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on the meta device .*device_map='cpu'"):
        rotate_model(model)


def test_offloaded_weights(tiny_model: Callable[..., Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny_model("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="offloaded by accelerate"):
        rotate_model(model)


def test_a_weight_that_the_record_does_not_know(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.adapter = nn.Linear(4, 4)
    with untouched(model), pytest.raises(NotImplementedError, match=r"layers.1.mlp.adapter.bias.*merge adapters first"):
        rotate_model(model)


def test_a_linear_layer_that_is_something_else(tiny_model: Callable[..., Any]) -> None:
    class Linear4bit(nn.Linear):
        pass

    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj = Linear4bit(128, 192)
    with untouched(model), pytest.raises(ValueError, match=r"layers.0.mlp.up_proj is a Linear4bit, not a plain"):
        rotate_model(model)


def test_a_shape_that_the_config_does_not_give(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    model.model.layers[0].self_attn.k_proj = nn.Linear(128, 32)
    with (
        untouched(model),
        pytest.raises(NotImplementedError, match=r"k_proj: weight \(32, 128\), but .* says \(64, 128\)"),
    ):
        rotate_model(model)


def test_layers_that_share_a_weight(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with untouched(model), pytest.raises(NotImplementedError, match="share one weight"):
        rotate_model(model)


BAD_SWITCHES = [
    ({"r1": "spin"}, "r1='spin' is not one of"),
    ({"r1": torch.eye(4)}, r"r1 must be \[128, 128\], got \(4, 4\)"),
    ({"r1": torch.ones(128, 128)}, "r1 is not orthogonal"),
    ({"o_proj_online": "some"}, "o_proj_online='some' is not one of"),
    ({"down_proj_block": 36}, "does not divide a width of 192"),
    ({"down_proj_block": 3}, "a width of 3 has no Hadamard transform"),
    ({"down_proj_block": 32, "r4": False}, "which r4=False switches off"),
    ({"r2": "no"}, "r2='no' must be True or False"),
    ({"seed": "x"}, "seed='x' must be an int"),
    ({"device": "abacus"}, "device='abacus' cannot be used here"),
    ({"device": "cuda:99"}, "device='cuda:99' cannot be used here"),
    ({"record": False}, "record=False would lose the online rotations"),
]


@pytest.mark.parametrize(("switches", "message"), BAD_SWITCHES, ids=[message for _, message in BAD_SWITCHES])
def test_bad_switches(switches: dict[str, Any], message: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with untouched(model), pytest.raises(ValueError, match=message):
        rotate_model(model, **switches)


def test_a_wrong_device_is_no_interrupted_rotation(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="cannot be used here"):
        rotate_model(model, device="cuda:99")
    rotate_model(model, progress=False)
    with pytest.raises(ValueError, match="cannot be used here"):
        quantize_model(model, device="cuda:99", w_method="rtn")
    quantize_model(model, w_method="rtn", progress=False)


def test_an_interrupted_rotation_is_neither_rotated_further_nor_quantised(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model = tiny_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(quarot.rotation.rotate, "insert_online", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rotate_model(model, progress=False)
    for act in (rotate_model, lambda model: quantize_model(model, w_method="rtn", progress=False)):
        with pytest.raises(ValueError, match=r"rotation of this model was interrupted.*load the original"):
            act(copy.deepcopy(model))
