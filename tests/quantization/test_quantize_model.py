"""``quantize_model`` on tiny models: what it must reach, respect and refuse."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quarot
from quarot.architectures import decoder_layers, linear_modules
from quarot.calibration.decoder import LayerInputs
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear
from quarot.nn.rotated_linear import RotatedLinear
from quarot.ops.hadamard import hadamard
from quarot.quantization.gptq import SCALE_FACTORS
from quarot.quantization.layer import LayerQuantizer
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

TOKENS = torch.randint(3, 128, (2000,), generator=torch.Generator().manual_seed(5))
CALIBRATION: dict[str, Any] = {
    "calibration": TOKENS,
    "calibration_samples": 6,
    "calibration_length": 48,
    "progress": False,
}
NO_CACHE = {"k_bits": 16, "v_bits": 16}


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def distance(model: nn.Module, reference: torch.Tensor, ids: torch.Tensor) -> float:
    return float((logits(model, ids) - reference).norm() / reference.norm())


def rotated(model: nn.Module) -> nn.Module:
    rotate_model(model, progress=False)
    return model


def test_every_family_ends_as_integers(
    tiny_model: Callable[..., nn.Module], family: str, token_ids: torch.Tensor
) -> None:
    model = rotated(tiny_model(family))
    reference = logits(model, token_ids)
    rtn = quantize_model(copy.deepcopy(model), w_method="rtn", a_bits=8, **NO_CACHE, **CALIBRATION)
    gptq = quantize_model(copy.deepcopy(model), a_bits=8, **NO_CACHE, **CALIBRATION)
    for name, module, role in linear_modules(gptq):
        assert isinstance(module, QuantLinear) == (role != "lm_head"), name
    assert distance(gptq, reference, token_ids) < distance(rtn, reference, token_ids) < 0.6


def test_the_clip_search_of_gptq_asks_for_factors(tiny_model: Callable[..., nn.Module]) -> None:
    """Of the first layer both see the same inputs: scales differ by one of the factors, and some do."""
    model = rotated(tiny_model("llama"))
    plain, searched = (
        quantize_model(copy.deepcopy(model), gptq_clip_search=on, **NO_CACHE, **CALIBRATION) for on in (False, True)
    )
    scales = (m.get_submodule("model.layers.0.self_attn.q_proj").weight_scale for m in (searched, plain))
    ratios = next(scales) / next(scales)
    assert (ratios[:, None] - torch.tensor(SCALE_FACTORS)).abs().amin(1).max() < 1e-5
    assert len(ratios.round(decimals=2).unique()) > 1


def test_defaults_are_the_papers(tiny_model: Callable[..., nn.Module]) -> None:
    model = quantize_model(rotated(tiny_model("llama")), **CALIBRATION)
    config = model.config.quantization_config
    paper = {
        "w_bits": 4,
        "w_method": "gptq",
        "w_symmetric": True,
        "w_clip": True,
        "w_group_size": None,
        "a_bits": 4,
        "a_clip": 0.9,
        "a_group_size": None,
        "k_bits": 4,
        "v_bits": 4,
        "k_clip": 0.95,
        "v_clip": 0.95,
        "kv_group_size": 128,
        "gptq_damping": 0.01,
        "gptq_act_order": False,
        "gptq_quantized_inputs": False,
        "ignore": ["lm_head"],
    }
    assert {key: getattr(config, key) for key in paper} == paper
    assert QuarotConfig().calibration_samples == 128
    assert QuarotConfig().calibration_length == 2048
    assert config.rotation is not None


def test_the_options_beyond_the_paper_help(tiny_model: Callable[..., nn.Module], token_ids: torch.Tensor) -> None:
    model = rotated(tiny_model("llama"))
    reference = logits(model, token_ids)
    paper = quantize_model(copy.deepcopy(model), **NO_CACHE, **CALIBRATION)
    options = dict.fromkeys(("gptq_quantized_inputs", "gptq_asymmetric", "gptq_weighted_clip", "a_clip_search"), True)
    beyond = quantize_model(copy.deepcopy(model), **options, **NO_CACHE, **CALIBRATION)
    assert distance(beyond, reference, token_ids) < distance(paper, reference, token_ids)
    config = beyond.config.quantization_config
    for name, module, role in linear_modules(beyond):
        if role != "lm_head":
            assert module.a_clip == config.for_module(name).a_clip  # a reload builds the same layer


def test_bias_correction_removes_the_mean_error(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = rotated(tiny_model("qwen2"))
    name, layer = next(iter(decoder_layers(model)))
    windows = TOKENS[:512].view(8, 64)

    def mean_error(**fields: Any) -> float:
        clean = copy.deepcopy(layer)
        errors: list[torch.Tensor] = []
        quantised = quantize_model(
            copy.deepcopy(model), w_bits=3, a_bits=16, **NO_CACHE, **{**CALIBRATION, "calibration": windows}, **fields
        )

        def compare(module: nn.Module, args: tuple[torch.Tensor]) -> None:
            wrong = quantised.get_submodule(name).self_attn.q_proj(args[0]) - module(args[0])
            errors.append(wrong.flatten(0, 1).mean(0))

        handle = clean.input_layernorm.register_forward_hook(lambda _, __, out: compare(clean.self_attn.q_proj, (out,)))
        inputs = LayerInputs(model, windows, None)
        for hidden in inputs.steps:
            inputs.run(0, clean, hidden)
        handle.remove()
        return float(torch.stack(errors).mean(0).norm())

    plain, corrected = mean_error(), mean_error(gptq_bias_correction=True, resume_dir=tmp_path)
    assert corrected < 0.01 * plain
    assert mean_error(gptq_bias_correction=True, resume_dir=tmp_path) == corrected


def test_same_seed_same_codes(tiny_model: Callable[..., nn.Module]) -> None:
    first, second = (quantize_model(rotated(tiny_model("qwen2")), **NO_CACHE, **CALIBRATION) for _ in range(2))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_hessians_see_rotated_inputs(tiny_model: Callable[..., nn.Module]) -> None:
    """The Hessian of down_proj is that of its input after the online Hadamard."""
    model = rotated(tiny_model("llama"))
    name, layer = next(iter(decoder_layers(model)))
    down = layer.get_submodule("mlp.down_proj")
    assert isinstance(down, RotatedLinear)
    seen: list[torch.Tensor] = []
    handle = down.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    windows = TOKENS[:128].view(2, 64)
    logits(model, windows)
    handle.remove()
    spec = down.input_rotation
    x = hadamard(torch.cat([s.flatten(0, -2) for s in seen]), spec.order, spec.pow2, spec.inner)
    work = LayerQuantizer(
        name, layer, _record(model), {"mlp.down_proj": QuarotConfig()}, 0, LayerInputs(model, windows, None)
    )
    assert work._moments(("mlp.down_proj",)).hessian == pytest.approx(x.T @ x / x.shape[0], rel=1e-4, abs=1e-5)


def _record(model: nn.Module) -> Any:
    from quarot.architectures import architecture_of

    return architecture_of(model)


@pytest.mark.parametrize("bits", [(4, 4), (4, 16), (8, 8), (3, 8), (16, 4)], ids=str)
def test_simulated_and_packed_are_the_same_integers(
    tiny_model: Callable[..., nn.Module], token_ids: torch.Tensor, bits: tuple[int, int]
) -> None:
    """Dequantised weights and fake-quantised activations in plain layers give what the packed model gives."""
    from quarot.calibration.observed_linear import ObservedLinear

    packed = rotated(tiny_model("qwen3"))
    plain = copy.deepcopy(packed)
    fields = {"w_bits": bits[0], "a_bits": bits[1]}
    quantize_model(packed, w_method="rtn", progress=False, **fields, **NO_CACHE)
    for (name, module, role), (_, integer, _) in zip(
        list(linear_modules(plain)), list(linear_modules(packed)), strict=True
    ):
        if role != "lm_head":
            observed = ObservedLinear(module, QuarotConfig(**fields), quantized_inputs=True)
            observed.matrix = integer.dequantize()
            plain.set_submodule(name, observed)
    # Sums in another order move single values across a rounding edge; layer by layer the integers are equal.
    assert distance(plain, logits(packed, token_ids), token_ids) < 1e-3


def test_ignore_and_overrides(tiny_model: Callable[..., nn.Module]) -> None:
    model = quantize_model(
        rotated(tiny_model("llama")),
        w_method="rtn",
        progress=False,
        ignore=["lm_head", r"re:model\.layers\.1\..*"],
        overrides={r".*\.down_proj": {"w_bits": 8, "a_bits": 8}},
    )
    assert not any(isinstance(m, QuantLinear) for m in model.model.layers[1].modules())
    assert model.model.layers[0].mlp.down_proj.w_bits == model.model.layers[0].mlp.down_proj.a_bits == 8
    assert model.model.layers[0].mlp.up_proj.w_bits == 4


def test_one_name_to_ignore_is_a_name() -> None:
    assert QuarotConfig(ignore="lm_head").ignores("lm_head")  # type: ignore[arg-type]


def test_a_config_does_not_change_with_what_it_was_made_of() -> None:
    overrides, rotation = {"a": {"w_bits": 8}}, {"family": "llama", "notes": ["one"]}
    config = QuarotConfig(overrides=overrides, rotation=rotation)
    other = config.replace(w_bits=8)
    overrides["a"]["w_bits"] = 3
    rotation["notes"].append("two")
    other.overrides["a"]["w_bits"] = 2
    assert config.overrides == {"a": {"w_bits": 8}}
    assert config.rotation == {"family": "llama", "notes": ["one"]}


def test_lm_head_when_asked_for(tiny_model: Callable[..., nn.Module], token_ids: torch.Tensor) -> None:
    model = rotated(tiny_model("llama"))
    reference = logits(model, token_ids)
    quantize_model(model, w_bits=8, a_bits=8, ignore=[], **NO_CACHE, **CALIBRATION)
    assert isinstance(model.lm_head, QuantLinear)
    assert distance(model, reference, token_ids) < 0.1


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_lm_head(
    tiny_model: Callable[..., nn.Module], token_ids: torch.Tensor, tmp_path: Path, bits: int
) -> None:
    model = rotated(tiny_model("llama"))
    reference = logits(model, token_ids)
    quantize_model(model, w_bits=16, a_bits=16, lm_head_bits=bits, **NO_CACHE, progress=False)
    head = model.lm_head
    assert (head.w_bits, head.a_bits, head.a_clip, head.w_group_size) == (bits, 8, 1.0, None)
    assert not any(isinstance(m, QuantLinear) for m in model.model.modules())
    assert distance(model, reference, token_ids) < (0.02 if bits == 8 else 0.15)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))
    with pytest.raises(ValueError, match="lm_head_bits=5"):
        QuarotConfig(lm_head_bits=5)


def test_an_unrotated_model_is_quantised_with_a_warning(
    tiny_model: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = quantize_model(tiny_model("llama"), w_method="rtn", progress=False)
    assert "rotate_model" in caplog.text
    assert model.config.quantization_config.rotation is None


def test_refused_and_untouched(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = rotated(tiny_model("llama"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"q_proj: weight groups of 100 do not divide its 128 inputs"):
        quantize_model(model, w_group_size=100, w_method="rtn")
    with pytest.raises(ValueError, match=r"weight groups of 16 do not fit integer GEMMs.*32"):
        quantize_model(model, w_group_size=16, w_method="rtn")
    with pytest.raises(ValueError, match="activation groups of 32 must be a multiple of the weight groups of 64"):
        quantize_model(model, w_group_size=64, a_group_size=32, w_method="rtn")
    with pytest.raises(ValueError, match="calibration text"):
        quantize_model(model)
    with pytest.raises(ValueError, match=r"30 tokens.*at least 49.*calibration_length to 29"):
        quantize_model(model, **{**CALIBRATION, "calibration": TOKENS[:30]})
    with pytest.raises(ValueError, match="w_bits=9"):
        quantize_model(model, w_bits=9)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_quantised_twice(tiny_model: Callable[..., nn.Module]) -> None:
    model = quantize_model(rotated(tiny_model("llama")), w_method="rtn", progress=False)
    with pytest.raises(ValueError, match=re.escape("model.layers.0.self_attn.q_proj is quantised already")):
        quantize_model(model, w_method="rtn")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_nan_weights_are_named(tiny_model: Callable[..., nn.Module], method: str) -> None:
    model = rotated(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        quantize_model(model, w_method=method, **CALIBRATION)


@pytest.mark.parametrize("group_size", [32, 64])
def test_groups_reduce_the_error(
    tiny_model: Callable[..., nn.Module], token_ids: torch.Tensor, group_size: int
) -> None:
    model = rotated(tiny_model("llama"))
    reference = logits(model, token_ids)
    whole = quantize_model(copy.deepcopy(model), w_method="rtn", a_bits=16, progress=False, **NO_CACHE)
    groups = quantize_model(model, w_method="rtn", a_bits=16, w_group_size=group_size, progress=False, **NO_CACHE)
    assert distance(groups, reference, token_ids) < distance(whole, reference, token_ids)


def test_cache_only_keeps_the_weights(tiny_model: Callable[..., nn.Module]) -> None:
    model = rotated(tiny_model("llama"))
    quantize_model(model, w_bits=16, a_bits=16)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert model.config.quantization_config.k_bits == 4


def test_clip_ratios_follow_the_bits_unless_given():
    assert QuarotConfig().a_clip == 0.9 and QuarotConfig().k_clip == QuarotConfig().v_clip == 0.95
    eight = QuarotConfig(a_bits=8, k_bits=8, v_bits=8)
    assert eight.a_clip == eight.k_clip == eight.v_clip == 1.0
    assert QuarotConfig(a_bits=8, a_clip=0.85).a_clip == 0.85
    assert QuarotConfig().replace(a_bits=8).a_clip == 1.0
    assert QuarotConfig(a_clip=0.85).replace(a_bits=8).a_clip == 0.85
    assert QuarotConfig(overrides={".*down_proj": {"a_bits": 8}}).for_module("mlp.down_proj").a_clip == 1.0
    mixed = QuarotConfig(k_bits=4, v_bits=8)
    assert (mixed.k_clip, mixed.v_clip) == (0.95, 1.0)
    assert mixed.replace(k_bits=8).k_clip == 1.0


def test_one_clip_ratio_for_keys_and_values() -> None:
    """``kv_clip`` sets both, as in checkpoints from before there were two; those keep the ratio they state."""
    both = QuarotConfig(k_bits=8, kv_clip=0.95)
    assert (both.k_clip, both.v_clip, both.kv_clip) == (0.95, 0.95, None)
    assert both.replace(kv_clip=0.9, v_clip=0.8).to_dict() == QuarotConfig(k_bits=8, k_clip=0.9, v_clip=0.8).to_dict()
    stored = both.to_dict()
    assert "kv_clip" not in stored
    before = {name: value for name, value in stored.items() if name not in ("k_clip", "v_clip")} | {"kv_clip": 0.95}
    assert QuarotConfig.from_dict(before) == QuarotConfig.from_dict(stored) == both
    with pytest.raises(ValueError, match=r"k_clip=1\.5 must be"):
        QuarotConfig(kv_clip=1.5)


@pytest.mark.parametrize("option", [{"gptq_act_order": True}, {"gptq_clip_search": True}], ids=str)
def test_a_head_that_gptq_rounds_takes_its_options(
    option: dict[str, Any], tiny_model: Callable[..., nn.Module]
) -> None:
    head_only = {"ignore": [], "overrides": {r"model\.layers\..*": {"w_bits": 16, "a_bits": 16}}, **NO_CACHE}
    model = rotated(tiny_model("llama"))
    plain = quantize_model(copy.deepcopy(model), **head_only, **CALIBRATION).lm_head
    found = quantize_model(model, **head_only, **option, **CALIBRATION).lm_head
    assert not torch.equal(plain.dequantize(), found.dequantize())
